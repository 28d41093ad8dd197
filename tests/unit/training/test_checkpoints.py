"""A training state comes back as it was, without pickle, or not at all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save
from tests.damage import complaints

from bastion import BastionError
from bastion.models.checkpoint import digest_tensors
from bastion.training.checkpoints import read_state, write_state


def test_nested_states_come_back_exactly(tmp_path: Path) -> None:
    shared = torch.rand(3)
    state = {
        "step": 7,
        "best": 0.1 + 0.2,
        "nothing": None,
        "optimizer": {
            "state": {0: {"step": torch.tensor(3.0)}, 1: {}},
            "groups": [{"betas": (0.9, 0.95), "nesterov": True}],
        },
        "tied": [shared, shared],
        "half": torch.rand(2, 2).bfloat16(),
        "strided": torch.arange(6).view(2, 3).t(),
    }
    write_state(tmp_path / "s", state)
    loaded = read_state(tmp_path / "s")
    assert str(loaded) == str(state)
    assert loaded["optimizer"]["groups"][0]["betas"] == (0.9, 0.95)
    assert torch.equal(loaded["half"], state["half"])
    assert loaded["best"] == state["best"]


def test_an_adamw_goes_on_as_if_it_had_not_been_stored(tmp_path: Path) -> None:
    def run(restart: bool) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(5))
        optimizer = torch.optim.AdamW([weight], lr=0.1)
        for step in range(6):
            if restart and step == 3:
                write_state(tmp_path / "s", {"w": weight.data, "o": optimizer.state_dict()})
                state = read_state(tmp_path / "s")
                weight = torch.nn.Parameter(state["w"])
                optimizer = torch.optim.AdamW([weight], lr=0.5)
                optimizer.load_state_dict(state["o"])
            optimizer.zero_grad()
            (weight * torch.arange(5.0)).sin().sum().backward()
            optimizer.step()
        return weight.detach()

    assert torch.equal(run(restart=True), run(restart=False))


def test_a_damaged_state_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "s", {"x": torch.rand(1000)})
    content = (tmp_path / "s").read_bytes()
    (tmp_path / "s").write_bytes(content[:-10])
    with pytest.raises(BastionError, match="corrupt or truncated"):
        read_state(tmp_path / "s")


def test_each_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    """In a whole checkpoint with an optimizer's settings in its header: step, weight decay, betas and all."""
    weight = torch.nn.Parameter(torch.arange(5.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    state = {"step": 2, "best": -1.0, "model": {"w": weight.detach()}, "optimizer": optimizer.state_dict()}
    write_state(tmp_path / "s", state)
    found, tried = complaints(tmp_path / "s", lambda: read_state(tmp_path / "s"), step=2)
    assert len(found) > 0.9 * tried


@pytest.mark.parametrize(
    ("old", "new"), [(b'[\\"step\\", 2]', b'[\\"step\\", 3]'), (b"0.01", b"0.02"), (b"0.999", b"0.998")]
)
def test_an_edited_header_is_refused(tmp_path: Path, old: bytes, new: bytes) -> None:
    weight = torch.nn.Parameter(torch.arange(5.0))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    write_state(tmp_path / "s", {"step": 2, "optimizer": optimizer.state_dict()})
    content = (tmp_path / "s").read_bytes()
    assert content.count(old) == 1
    (tmp_path / "s").write_bytes(content.replace(old, new))
    with pytest.raises(BastionError, match="its header does not match its SHA-256"):
        read_state(tmp_path / "s")


def test_states_from_before_headers_had_a_checksum_are_read(tmp_path: Path) -> None:
    tensors = {"000000": torch.arange(3.0)}
    header = {"content": {"dict": [["w", {"tensor": "000000"}], ["step", 4]]}, "sha256": digest_tensors(tensors)}
    (tmp_path / "s").write_bytes(save(tensors, {"state": json.dumps(header)}))
    state = read_state(tmp_path / "s")
    assert state["step"] == 4 and torch.equal(state["w"], tensors["000000"])


def test_what_is_neither_tensor_nor_plain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="holds tensors and plain values, got set"):
        write_state(tmp_path / "s", {"x": {1, 2}})
    assert not list(tmp_path.iterdir())

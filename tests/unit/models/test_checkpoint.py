"""A saved model comes back bit for bit, and nothing but that is ever loaded."""

from __future__ import annotations

import errno
import json
import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bastion import BastionError, load, storage
from bastion.models import Classifier, checkpoint
from bastion.run import create_run

SPEC = {"name": "vit/micro", "stem": [8, 16], "embed_dim": 16, "depth": 1, "num_heads": 2}


def _build(seed: int = 0) -> Classifier:
    return checkpoint.build(SPEC, mean=(0.5,) * 3, std=(0.25,) * 3, seed=seed)


def weights_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    checkpoint.save(_build(), tmp_path / "model", {"note": "for a test"})
    return tmp_path / "model"


def test_saved_models_come_back_bit_for_bit(saved: Path) -> None:
    x = torch.rand(3, 3, 32, 32)
    loaded = load(saved)
    assert not loaded.training
    assert torch.equal(loaded(x), _build().eval()(x))
    assert json.loads((saved / "card.json").read_text())["about"] == {"note": "for a test"}


@pytest.mark.parametrize("place", ["model", "epochs/00001"])
def test_a_model_of_another_run_is_not_loaded(saved: Path, tmp_path: Path, place: str) -> None:
    run, other = create_run(tmp_path / "run", seed=0), create_run(tmp_path / "other", seed=0)
    for folder in (run.folder / place, other.folder / place):
        checkpoint.save(load(saved), folder, {"run_id": run.id()})
    assert load(run.folder / place)
    for read in (load, checkpoint.load_networks, checkpoint.read_card):
        with pytest.raises(BastionError, match=f"{place}/card.json: is the model of another run"):
            read(other.folder / place)


def test_until_the_card_is_written_the_old_model_stands(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_json", crash)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(_build(seed=5), saved)
    assert checkpoint.digest(load(saved)) == checkpoint.digest(_build())
    monkeypatch.undo()
    checkpoint.save(_build(seed=6), saved)
    assert checkpoint.digest(load(saved)) == checkpoint.digest(_build(seed=6))
    assert len(list(saved.iterdir())) == 2


def test_tied_weights_are_saved_and_loaded(saved: Path) -> None:
    model = _build()
    model.network.fc_norm.weight = model.network.blocks[0].norm1.weight
    checkpoint.save(model, saved)
    x = torch.rand(1, 3, 32, 32)
    assert torch.equal(load(saved)(x), model.eval()(x))


def test_a_card_cannot_make_timm_fetch_or_read_anything(saved: Path) -> None:
    for option in (
        {"pretrained": True},
        {"checkpoint_path": "/etc/passwd"},
        {"pretrained_cfg": {"url": "http://127.0.0.1:1/x"}},
    ):
        with pytest.raises(BastionError, match="not allowed; weights come from a bastion checkpoint"):
            checkpoint.build({"name": "timm/resnet10t", **option}, mean=(0.5,) * 3, std=(0.5,) * 3)


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(123)
    noise = torch.get_rng_state()
    first = _build(seed=1)
    assert torch.equal(torch.get_rng_state(), noise)
    torch.manual_seed(456)
    assert checkpoint.digest(_build(seed=1)) == checkpoint.digest(first)
    assert checkpoint.digest(_build(seed=2)) != checkpoint.digest(first)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/bastion-was-here",)


@pytest.mark.parametrize("how", ["pickle", "torch"])
def test_a_pickle_offered_as_weights_is_refused_unread(saved: Path, how: str) -> None:
    path = weights_of(saved)
    if how == "pickle":
        path.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save({"weights": torch.zeros(1)}, path)
    with pytest.raises(BastionError, match="a pickle, which can run code"):
        load(saved)
    assert not Path("/tmp/bastion-was-here").exists()


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_truncated_weights_are_refused(saved: Path, keep: float) -> None:
    path = weights_of(saved)
    content = path.read_bytes()
    path.write_bytes(content[: int(keep if keep > 1 else keep * len(content))])
    with pytest.raises(BastionError, match=r"\.safetensors: (corrupt or truncated|not a safetensors file)"):
        load(saved)


def test_a_flipped_bit_is_noticed(saved: Path) -> None:
    path = weights_of(saved)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BastionError, match="damaged, or not the weights of this card"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("network.head.bias"), r"1 tensors missing \['network.head.bias'\]"),
        (lambda t: t.update(extra=torch.zeros(1)), r"1 unknown \['extra'\]"),
        (
            lambda t: t.update({"network.head.bias": torch.zeros(7)}),
            r"'network.head.bias' has shape \(7,\), the model needs \(10,\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused(saved: Path, change: object, message: str) -> None:
    tensors = load_file(weights_of(saved))
    change(tensors)  # type: ignore[operator]
    save_file(tensors, weights_of(saved))
    with pytest.raises(BastionError, match=message):
        load(saved)


def edit_card(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """As somebody would who also mends the checksum."""
    card = storage.read_json(folder / "card.json")
    change(card)
    storage.write_json(folder / "card.json", card)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card.pop("model"), "not a model card that this version reads .model: field required"),
        (lambda card: card.update(mean=7), "mean: input should be a valid tuple"),
        (lambda card: card.update(std=[0.0, 1.0, 1.0]), "positive stds"),
        (lambda card: card["model"].update(name="vit/macro"), "unknown model 'vit/macro'"),
        (lambda card: card["model"].update(num_clases=7), "num_clases: unknown key; did you mean 'num_classes'"),
        (lambda card: card.update(weights="0"), "weights: string should match pattern"),
    ],
)
def test_broken_cards_are_refused(saved: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_card(saved, change)
    with pytest.raises(BastionError, match=message):
        load(saved)


@pytest.mark.parametrize("content", ["{", "[]", "7", "\x00"])
def test_what_is_no_card_is_refused(saved: Path, content: str) -> None:
    (saved / "card.json").write_text(content)
    with pytest.raises(BastionError, match="card.json: (not readable as JSON|expected an object)"):
        load(saved)


@pytest.mark.parametrize("flip", range(40, 400, 40))
def test_a_card_with_a_flipped_bit_is_refused(saved: Path, flip: int) -> None:
    content = bytearray((saved / "card.json").read_bytes())
    content[flip] ^= 1
    (saved / "card.json").write_bytes(content)
    with pytest.raises(BastionError, match="card.json: (not readable as JSON|damaged or edited)"):
        load(saved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card["model"].update(num_heads=2), "does not answer as it did when it was saved"),
        (lambda card: card["model"].update(num_heads=8), "does not answer as it did when it was saved"),
        (lambda card: card["model"].update(act_layer="silu"), "does not answer as it did when it was saved"),
        (lambda card: card.update(shape=[3, 40, 40], resize="bicubic"), "does not answer as it did"),
        (lambda card: card.pop("logits"), "does not answer as it did when it was saved"),
        (lambda card: card.update(mean=[0.5, 0.5, 0.5]), "mean and std are not those that are stored with the weights"),
    ],
)
def test_the_same_weights_used_otherwise_are_refused(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    checkpoint.save(load("zoo/cifar10-linf-vit"), tmp_path)
    edit_card(tmp_path, change)
    with pytest.raises(BastionError, match=message):
        load(tmp_path)


def test_another_resize_is_refused(saved: Path) -> None:
    model = checkpoint.build(SPEC, mean=(0.5,) * 3, std=(0.25,) * 3, shape=(3, 40, 40), resize="bilinear")
    checkpoint.save(model, saved)
    edit_card(saved, lambda card: card.update(resize="bicubic"))
    with pytest.raises(BastionError, match="does not answer as it did when it was saved"):
        load(saved)


def test_logits_may_differ_by_the_rounding_of_another_machine(saved: Path) -> None:
    def perturb(card: dict[str, Any]) -> None:
        card["logits"] = [[logit * (1 + 2e-3) for logit in row] for row in card["logits"]]

    edit_card(saved, perturb)
    assert checkpoint.digest(load(saved)) == checkpoint.digest(_build())


def test_old_cards_are_read_with_a_warning_and_converted(saved: Path) -> None:
    card = json.loads((saved / "card.json").read_text())
    del card["sha256"], card["logits"]
    (saved / "card.json").write_text(json.dumps({**card, "format": 1}))
    with pytest.warns(UserWarning, match=r"of format 1, .*convert it once with bastion.models.checkpoint.convert"):
        load(saved)
    checkpoint.convert(saved)
    assert checkpoint.digest(load(saved)) == checkpoint.digest(_build())
    assert checkpoint.read_card(saved).about == {"note": "for a test"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda card: card["model"].update(depth=10**9), "model: asks for 1e[+]09; no option may be above 65536"),
        (lambda card: card["model"].update(depth=1e12), "model: asks for 1e[+]12; no option may be above 65536"),
        (lambda card: card["model"].update(depth=60_000), "asks for a network far larger than its weights"),
        (lambda card: card["model"].update(embed_dim=60_000), "'network.pos_embed' has shape|needs"),
        (lambda card: card["model"].update(stem=[60_000] * 2), "has shape .*, the model needs"),
        (lambda card: card["model"].update(img_size=65_536), "asks for images of 3×65536×65536; that is out of bounds"),
        (lambda card: card.update(shape=[3, 10**9, 10**9]), "asks for images of 3×1000000000×1000000000"),
        (lambda card: card.update(model={"name": "timm/vit_tiny_patch16_224", "depth": 60_000}), "far larger than its"),
        (
            lambda card: card.update(model={"name": "resnet/micro", "widths": [9] * 9999, "depths": [9] * 9999}),
            "asks for a network far larger than its weights",
        ),
    ],
)
def test_a_card_that_asks_for_absurd_sizes_is_refused_at_once(
    saved: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    edit_card(saved, change)
    before = time.monotonic()
    with pytest.raises(BastionError, match=message):
        load(saved)
    assert time.monotonic() - before < 5


def test_missing_models_say_where_they_were_looked_for(tmp_path: Path, saved: Path) -> None:
    for name, message in {
        str(tmp_path / "nowhere"): "not a run, not a folder with card.json",
        "zoo/nothing": "no 'zoo/nothing' in the zoo",
        "cifar10-linf-vit": "did you mean 'zoo/cifar10-linf-vit'",
        str(weights_of(saved)): "is a file; of bastion's own models give the folder",
    }.items():
        with pytest.raises(BastionError, match=message):
            load(name)


def test_a_model_without_a_spec_cannot_be_saved(tiny_model: Classifier, tmp_path: Path) -> None:
    with pytest.raises(BastionError, match="no card could rebuild it"):
        checkpoint.save(tiny_model, tmp_path)


def test_a_full_disk_leaves_the_old_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (weights_of(saved)).read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BastionError, match="no space left on the disk; what was stored before is intact"):
        checkpoint.save(_build(seed=5), saved)
    assert (weights_of(saved)).read_bytes() == before
    assert sorted(path.suffix for path in saved.iterdir()) == [".json", ".safetensors"]


def test_old_weights_that_cannot_be_removed_are_told_in_a_line(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", refused)
        with pytest.raises(BastionError, match=f"{weights_of(saved).name}: cannot be written: Read-only file system"):
            checkpoint.save(_build(seed=5), saved)
    assert checkpoint.digest(load(saved)) == checkpoint.digest(_build(seed=5))  # the card names the new ones
    checkpoint.save(_build(seed=5), saved)
    assert checkpoint.digest_tensors(load_file(weights_of(saved))) == checkpoint.digest(_build(seed=5))

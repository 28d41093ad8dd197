"""Processes that train together: what one of them says when another has gone."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from bastion import BastionError
from bastion.training import distributed
from bastion.training.distributed import join_processes


@pytest.fixture(autouse=True)
def _launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if torchrun had started this process and another one."""
    said = {"is_torchelastic_launched": True, "is_initialized": True, "get_rank": 1, "get_world_size": 2}
    for name, value in said.items():
        monkeypatch.setattr(distributed.dist, name, lambda value=value: value)
    monkeypatch.setenv("WORLD_SIZE", "2")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"),
        dist.DistNetworkError("Connection was reset"),
    ],
)
def test_a_lost_process_is_told_in_a_line(error: RuntimeError) -> None:
    with (
        pytest.raises(BastionError, match="another process of this training has ended"),
        join_processes(torch.device("cpu")),
    ):
        raise error


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="out of memory"), join_processes(torch.device("cpu")):
        raise RuntimeError("out of memory")

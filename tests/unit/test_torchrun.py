"""The keys of torchrun's store: shared by all processes of one start, and by no others."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from bastion import BastionError, torchrun


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """That of an agent, as its processes know it."""
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(kept.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in {**env, "RANK": "0", "WORLD_SIZE": "3", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    return kept


def _start(store: dist.TCPStore, prefix: str) -> list[str]:
    """What ranks 1 and 2 get, which ask before rank 0 is there."""
    with ThreadPoolExecutor() as pool:
        connections = [dist.TCPStore("127.0.0.1", store.port, wait_for_workers=False) for _ in range(2)]
        asked = [pool.submit(torchrun._ask_for_prefix, each, rank) for rank, each in enumerate(connections, 1)]
        torchrun._send_prefix(prefix, 3)
        return [each.result() for each in asked]


def test_processes_started_again_never_get_an_earlier_prefix(store: dist.TCPStore) -> None:
    for start in range(3):
        assert _start(store, f"start {start}") == [f"start {start}"] * 2
        store.set("rank 1", f"asked by a process that was killed in start {start}")


def test_a_process_without_rank_0_says_so(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "TIMEOUT", 0.0)
    with pytest.raises(BastionError, match="process 0 did not answer process 1 within 0 minutes"):
        torchrun._ask_for_prefix(store, 1)


@pytest.mark.processes
def test_a_process_that_starts_when_rank_0_has_finished_still_joins(store: dist.TCPStore) -> None:
    command = [sys.executable, "-c", "from bastion import torchrun; torchrun.join(); print('joined', flush=True)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "WORLD_SIZE": "2"}) as first:
        assert first.stdout is not None and first.stdout.readline() == b"joined\n"
        second = subprocess.run(command, env={**os.environ, "WORLD_SIZE": "2", "RANK": "1"}, timeout=60, check=False)
    assert (first.returncode, second.returncode) == (0, 0)


def test_rank_0_waits_for_nobody(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    shared, rank, size = torchrun.join.__wrapped__()
    assert (rank, size) == (0, 3)
    shared.set("key", "value")
    assert not store.check(["key"])
    monkeypatch.setenv("RANK", "1")
    with ThreadPoolExecutor() as pool:
        theirs, rank, _ = pool.submit(torchrun.join.__wrapped__).result()
    assert rank == 1
    assert theirs.get("key") == b"value"
    torchrun._ask_for_prefix(store, 2)
    for answering in set(threading.enumerate()) - before:  # nobody is left to ask
        answering.join(10)
        assert not answering.is_alive()

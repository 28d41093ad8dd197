"""The store shared by the processes of torchrun, with keys that no earlier start of them has used."""

from __future__ import annotations

import functools
import threading
import time
import uuid

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bastion.errors import BastionError

POLL = 0.05  # seconds
TIMEOUT = default_pg_timeout.total_seconds()


@functools.cache
def join() -> tuple[Store, int, int]:
    """Return the store, the rank of this process, and the number of processes.

    torchrun keeps its store when it starts all processes again, and each of its agents counts the restarts by itself,
    without those for a machine that joins. So rank 0 draws a prefix for the keys, and sends it to the processes that
    ask for one. This process does not end before it has been sent to all: they may start late, when all is measured.
    """
    store, rank, size = _connect()
    if rank:
        prefix = _ask_for_prefix(store, rank)
    else:
        prefix = uuid.uuid4().hex
        threading.Thread(target=_send_prefix, args=(prefix, size)).start()
    return PrefixStore(prefix, store), rank, size


def _connect() -> tuple[Store, int, int]:
    store, rank, size = next(rendezvous("env://"))
    # Older versions of torch begin its keys with the restarts that the agent of this process has counted.
    return (store.underlying_store if isinstance(store, PrefixStore) else store), rank, size


def _ask_for_prefix(store: Store, rank: int) -> str:
    reply, deadline = uuid.uuid4().hex, time.monotonic() + TIMEOUT  # a key that only a running rank 0 sets
    store.set(f"rank {rank}", reply)
    while not store.check([reply]):
        if time.monotonic() > deadline:
            raise BastionError(
                f"torchrun: process 0 did not answer process {rank} within {TIMEOUT / 60:.0f} minutes; start torchrun "
                "again on all machines"
            )
        time.sleep(POLL)
    prefix: str = store.get(reply).decode()
    store.set(f"rank {rank}", prefix)
    return prefix


def _send_prefix(prefix: str, size: int) -> None:
    """Reply to each process until it has the prefix; a reply to a process of an earlier start is read by none."""
    store, _, _ = _connect()  # a connection of its own, as others wait inside theirs
    waiting = set(range(1, size))
    try:
        while waiting:
            for rank in [each for each in waiting if store.check([f"rank {each}"])]:
                reply = store.get(f"rank {rank}").decode()
                if reply == prefix:
                    waiting.remove(rank)
                else:
                    store.set(reply, prefix)
            time.sleep(POLL)
    except dist.DistError:  # torchrun has ended
        return

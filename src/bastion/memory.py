"""Checks the free memory before something large is started; keeps what a step freed for the next one."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from bastion.errors import BastionError

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def keep_freed_memory() -> None:
    """Let glibc keep freed tensors for the next step: fetching their pages again costs a tenth of an RSPC step.

    For processes that bastion starts: it holds for all that a process does.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt"):  # musl has none
        return
    # Some versions refuse more than 32 MiB. Blocks above the threshold go back to the system whatever the other is.
    if libc.mallopt(M_MMAP_THRESHOLD, 1 << 30) or libc.mallopt(M_MMAP_THRESHOLD, 32 << 20):
        libc.mallopt(M_TRIM_THRESHOLD, -1)  # never


def check_memory(needed: int, device: torch.device, where: str, remedy: str) -> None:
    """Raise if `needed` further bytes do not fit into memory."""
    free = _available(device)
    if free is not None and needed > free:
        raise BastionError(
            f"{where}: needs {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free; {remedy}"
        )


def _available(device: torch.device) -> int | None:
    """Return the free bytes; None if the system does not report them, or nothing is allocated."""
    if device.type == "meta":
        return None
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None

"""Checks the free memory before something large is started."""

from __future__ import annotations

from pathlib import Path

import torch

from bastion.errors import BastionError


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

"""Checks the free memory before something large is started; keeps what a step freed for the next one."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from bastion.errors import BastionError

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# Files of a control group, versions 2 and 1: its limit, what it uses, and what of that the system would give back.
FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
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
    machine = [1024 * size for size in _sizes(PROC / "meminfo", "MemAvailable:")]
    return min([*machine, *_of_control_groups()], default=None)


def _of_control_groups() -> Iterator[int]:
    """Yield what the memory limits of this process leave, as those of containers and batch systems."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root, version = (CGROUPS / "memory", 1) if controllers else (CGROUPS, 2)
        own, names = root / path.lstrip("/"), FILES[version]
        # Every group above has a limit too. Inside of a container its own may be at the root, whatever its path.
        for folder in (each for each in (own, *own.parents) if each.is_relative_to(root)):
            limit, used = (_lines(folder / name) for name in names[:2])
            if limit and used and limit[0].isdecimal():  # not "max"
                yield max(0, int(limit[0]) - int(used[0]) + sum(_sizes(folder / "memory.stat", names[2])))


def _sizes(path: Path, name: str) -> Iterator[int]:
    """Yield the number behind a name in a table."""
    return (int(line.split()[1]) for line in _lines(path) if line.split()[:1] == [name])


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []

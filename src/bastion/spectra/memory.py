"""How much memory is free."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")


def free_bytes(device: torch.device) -> int | None:
    """None where nobody tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    found = re.search(r"^MemAvailable: +(\d+) kB$", _MEMINFO.read_text(), re.M) if _MEMINFO.exists() else None
    return 1024 * int(found[1]) if found else None

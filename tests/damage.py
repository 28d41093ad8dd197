"""Files in which one bit is turned over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bastion import BastionError


def complaints(path: Path, read: Callable[[], Any], *, step: int = 1) -> tuple[list[str], int]:
    """Flip a random bit of each byte, or of each `step`-th one: what was said, and how often it was tried.

    Whenever nothing is said, the same must be read as from the whole file.
    """
    whole, expected = path.read_bytes(), repr(read())
    bits = np.random.default_rng(0).integers(0, 8, len(whole))
    places, messages = range(0, len(whole), step), []
    for place in places:
        damaged = bytearray(whole)
        damaged[place] ^= 1 << int(bits[place])
        path.write_bytes(damaged)
        try:
            assert repr(read()) == expected, place
        except BastionError as error:
            messages.append(str(error))
    path.write_bytes(whole)
    return messages, len(places)

"""Decodes untrusted pictures safely: known formats only, in bounded memory."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bastion import storage
from bastion.errors import BastionError

# Pillow detects the format by content, not by name, and would pass an EPS to Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")


def read_picture(path: Path) -> Image.Image:
    """Read a picture file as RGB."""
    with storage.opened(path) as file:
        return decode_picture(file, str(path))


def as_picture(pixels: NDArray[np.uint8]) -> Image.Image:
    """Make a picture of bytes (H, W, C) in one or three channels."""
    return Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)


def check_depth(picture: Image.Image) -> None:
    """Raise if it has more than 8 bits a channel: Pillow would cut them off at 255, which leaves it nearly white."""
    if picture.mode.startswith(("I", "F")):
        raise ValueError(f"its pixels have more than 8 bits, mode {picture.mode}; convert it to 8 bits")


def decode_picture(file: BinaryIO, where: str, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    try:
        with Image.open(file, formats=formats) as picture:
            check_depth(picture)
            return picture.convert("RGB")
    except Exception as error:  # broken files can make Pillow raise anything
        reason = str(error) or type(error).__name__
        raise BastionError(f"{where}: not a readable picture ({reason}); repair or remove it") from error

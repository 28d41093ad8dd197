"""Decoding pictures that may come from anywhere: only as what they are, in bounded memory, and nothing else is run."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from PIL import Image

from bastion import storage
from bastion.errors import BastionError

# Pillow goes by what is in a file, not by its name, and would hand an EPS to Ghostscript.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "PPM", "TIFF", "GIF")


def read_picture(path: Path) -> Image.Image:
    """The picture of a file, in RGB."""
    with storage.opened(path) as file:
        return decode_picture(file, str(path))


def decode_picture(file: BinaryIO, where: str, formats: tuple[str, ...] = FORMATS) -> Image.Image:
    try:
        with Image.open(file, formats=formats) as picture:
            return picture.convert("RGB")
    except Exception as error:  # broken files make Pillow stumble in any way
        reason = str(error) or type(error).__name__
        raise BastionError(f"{where}: not a readable picture ({reason}); repair or remove it") from error

"""Frost: a photograph of frost laid over the image, or a procedural texture."""

from __future__ import annotations

import hashlib
import math
import os
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torch.nn import functional as F

from bastion.corruptions.draws import Draws
from bastion.corruptions.plasma import plasma
from bastion.corruptions.weather import luma
from bastion.errors import BastionError

FOLDER = "BASTION_FROST"
# With their sizes; frost6.jpg exists and is never used.
_PHOTOGRAPHS = {
    "frost1.png": (900, 600),
    "frost2.png": (560, 315),
    "frost3.png": (560, 315),
    "frost4.jpg": (527, 350),
    "frost5.jpg": (660, 495),
}
_FILES = tuple(_PHOTOGRAPHS)
# Mean and standard deviation of red, green and blue in the photographs, of which 2 and 3 are the same.
_COLOURS = (
    ((78, 149, 166), (27, 17, 15)),
    ((201, 205, 215), (21, 22, 23)),
    ((138, 153, 165), (29, 29, 30)),
    ((112, 123, 135), (44, 43, 42)),
)
# Of the procedural textures, in pixels.
_DRAWN = (512, 720)
_DIRECTIONS = 8
_LENGTH, _THICKNESS, _CRYSTAL = 9.0, 0.8, 12.0


def frost(
    x: Tensor, draws: Draws, textures: tuple[Tensor, ...], image_weight: float, texture_weight: float, stride: int
) -> Tensor:
    """Add a random crop of a random texture. `stride` 5 subsamples the textures for small images."""
    height, width = x.shape[-2:]
    # OpenCV's bilinear resizing to a fifth takes exactly the middle pixel of each five.
    shrunk = [
        _at_least(texture[:, stride // 2 :: stride, stride // 2 :: stride], height, width) for texture in textures
    ]
    chosen = draws.integers("texture", (), 0, len(textures)).tolist()
    u = draws.uniform("place", (2,)).tolist()
    parts = []
    for number, (down, right) in zip(chosen, u, strict=True):
        rows, columns = (side - own for side, own in zip(shrunk[number].shape[1:], (height, width), strict=True))
        top, left = int(down * rows), int(right * columns)
        parts.append(shrunk[number][:, top : top + height, left : left + width])
    layer = torch.stack(parts).to(x)
    return image_weight * x + texture_weight * (luma(layer) if x.shape[1] == 1 else layer)


def _at_least(texture: Tensor, height: int, width: int) -> Tensor:
    """The texture, enlarged if it is smaller than the image: the smallest photograph is 315 pixels high."""
    factor = max((height + 1) / texture.shape[1], (width + 1) / texture.shape[2])
    if factor <= 1:
        return texture
    size = [int(np.ceil(side * factor)) for side in texture.shape[1:]]
    return F.interpolate(texture[None], size=size, mode="bilinear")[0]


def photographs(folder: str | Path | None) -> tuple[Tensor, ...]:
    """The textures of ImageNet-C, from `folder` or `$BASTION_FROST`; their licence does not allow shipping them."""
    return _read(_folder(folder))


def photographs_digest(folder: str | Path | None) -> str:
    """SHA-256 of the files of the photographs."""
    where = _folder(folder)
    _read(where)  # other pictures are refused before anything is measured
    return hashlib.sha256(b"".join(hashlib.sha256(_content(where / name)).digest() for name in _FILES)).hexdigest()


def _folder(folder: str | Path | None) -> Path:
    chosen = folder or os.environ.get(FOLDER)
    if not chosen:
        raise BastionError(
            f"frost: needs the photographs {_FILES[0]} to {_FILES[-1]} of the ImageNet-C code, which may not be shipped"
            f"; say with `textures` or ${FOLDER} which folder has them, or use `frost_proc`, which draws its own"
        )
    return Path(chosen).expanduser()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BastionError(
            f"{path}: cannot be read: {error.strerror or error}; `frost` needs {', '.join(_FILES)} in this folder, "
            "`frost_proc` needs no files"
        ) from error


@lru_cache(maxsize=2)
def _read(folder: Path) -> tuple[Tensor, ...]:
    textures = []
    for name, size in _PHOTOGRAPHS.items():
        _content(folder / name)
        try:
            with Image.open(folder / name) as picture:
                pixels = np.array(picture.convert("RGB"))
        except (OSError, UnidentifiedImageError, SyntaxError, ValueError) as error:
            raise BastionError(f"{folder / name}: not a readable picture ({error}); get it again") from error
        found = pixels.shape[1::-1]
        if found != size:
            raise BastionError(
                f"{folder / name}: not the photograph of the ImageNet-C code: it has {found[0]} x {found[1]} pixels, "
                f"expected {size[0]} x {size[1]}; use that, or `frost_proc`, which needs no files"
            )
        textures.append(torch.from_numpy(pixels).permute(2, 0, 1).float() / 255)
    return tuple(textures)


@lru_cache(maxsize=1)
def drawn() -> tuple[Tensor, ...]:
    """Four fixed procedural textures of ice needles, in the colours of the photographs."""
    return tuple(_draw(number, *colours) for number, colours in enumerate(_COLOURS))


def _draw(number: int, mean: tuple[int, ...], std: tuple[int, ...]) -> Tensor:
    """Noise blurred along eight directions; at each pixel, the direction with the largest value is visible."""
    height, width = _DRAWN
    draws = Draws(torch.tensor([number]), 0, "frost_proc/textures")
    noise = torch.fft.rfft2(draws.normal("needles", (2, _DIRECTIONS, height, width))[0])
    down, right = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    needles = torch.full(_DRAWN, -torch.inf)
    for direction in range(_DIRECTIONS):
        angle = math.pi * direction / _DIRECTIONS
        along = right * math.cos(angle) + down * math.sin(angle)
        across = down * math.cos(angle) - right * math.sin(angle)
        lines = _filtered(noise[0, direction], (_LENGTH * along) ** 2 + (_THICKNESS * across) ** 2)
        crystals = _filtered(noise[1, direction], _CRYSTAL**2 * (along**2 + across**2))
        needles = torch.maximum(needles, lines + crystals)
    side = 1 << (max(_DRAWN) - 1).bit_length()
    clouds = plasma(draws.uniform("clouds", (side, side), -1.0, 1.0), 1.6)[0, :height, :width]
    light = needles / needles.std() + clouds / clouds.std() / 2
    light = (light - light.mean()) / light.std()
    colours = torch.tensor(mean)[:, None, None] + torch.tensor(std)[:, None, None] * light
    return (colours / 255).clamp(0, 1)


def _filtered(spectrum: Tensor, width: Tensor) -> Tensor:
    """Noise filtered by a Gaussian with this squared width at each frequency, scaled to standard deviation 1."""
    made: Tensor = torch.fft.irfft2(spectrum * torch.exp(-2 * math.pi**2 * width), s=_DRAWN)
    return made / made.std()

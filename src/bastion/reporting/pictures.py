"""Pictures of a page: arrays as PNGs, rescaled perturbations, and grids of pictures with captions. No torch."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from markupsafe import Markup
from PIL import Image

from bastion.errors import BastionError
from bastion.measuring.store import Column
from bastion.reporting import svg

LARGE = 96  # pixels a side: beyond these a PNG of a perturbation takes hundreds of kilobytes
_LUMA = np.array([0.299, 0.587, 0.114])  # ITU-R BT.601, as in most libraries
_SIGNS = {"right": Markup('<span class="right">✓</span> '), "wrong": Markup('<span class="wrong">✗</span> ')}


@dataclass(frozen=True)
class Picture:
    source: str  # a data URI
    caption: str = ""  # such as the predicted class
    verdict: Literal["right", "wrong", ""] = ""


def figure(picture: Picture, alt: str) -> Markup:
    """Return a picture with its caption below."""
    caption = _SIGNS.get(picture.verdict, Markup()) + picture.caption
    below = Markup("<figcaption>{}</figcaption>").format(caption) if caption else ""
    return Markup('<figure><img src="{}" alt="{}">{}</figure>').format(picture.source, alt, below)


def grid(
    number: int | None, title: str, pictures: Sequence[Picture], *, columns: Sequence[str] | int, about: str
) -> Markup:
    """Return rows of pictures under a title, with the mark of the run of this number, and the names of the columns.

    `about` is the alternative text.
    """
    names = [] if isinstance(columns, int) else columns
    heads = Markup().join(Markup("<span>{}</span>").format(name) for name in names)
    shown = Markup().join(figure(each, f"{about}, {each.caption}" if each.caption else about) for each in pictures)
    return Markup('<h4>{}{}</h4><div class="pictures" style="--columns: {}">{}{}</div>').format(
        Markup() if number is None else run_mark(number) + " ", title, len(names) or columns, heads, shown
    )


def run_mark(number: int) -> Markup:
    """Return the marker of a run in its colour."""
    colour, sign = f"var(--run-{number % svg.COLOURS})", svg.MARKERS[svg.marker(number)]
    return Markup('<span class="mark" style="color: {}" aria-hidden="true">{}</span>').format(colour, sign)


def rescaled(delta: Column, scale: float) -> Column:
    """(δ + ε) / 2ε as bytes: −ε is black, no change is grey, +ε is white."""
    return to_bytes((delta + scale) / (2 * scale) if scale > 0 else np.full_like(delta, 0.5))


def rescaled_by_std(change: Column) -> Column:
    """Rescale to bytes: -3 standard deviations are black, zero is grey, +3 are white."""
    return rescaled(change, 3 * float(change.std()))


def grey(image: Column) -> Column:
    """Return (1, H, W): the luma of (3, H, W) bytes; a single channel is unchanged."""
    if image.shape[0] != 3:
        return image
    return np.rint(np.tensordot(_LUMA, image.astype(np.float64), 1))[None].astype(np.uint8)


def to_bytes(image: Column) -> Column:
    """Convert pixels in [0, 1] to 0 … 255."""
    levels: Column = np.rint(255 * np.clip(image.astype(np.float64), 0, 1)).astype(np.uint8)
    return levels


def data_uri(image: Column) -> str:
    """Encode (C, H, W) bytes with one or three channels as PNG, large ones as WebP to keep the page small."""
    if image.shape[0] not in (1, 3):
        raise BastionError(f"report: a picture has {image.shape[0]} channels; 1 or 3 can be shown")
    file = io.BytesIO()
    kind = "PNG" if max(image.shape[1:]) <= LARGE else "WEBP"
    picture = Image.fromarray(image[0] if image.shape[0] == 1 else image.transpose(1, 2, 0))
    picture.save(file, kind, **({"optimize": True} if kind == "PNG" else {"quality": 80}))
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"

"""Adversarial examples as files: one npz, or a folder of PNG. No torch."""

from __future__ import annotations

import csv
import glob
import io
from pathlib import Path

import numpy as np
from PIL import Image

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.store import Column


def write_npz(path: Path, examples: dict[str, Column]) -> None:
    file = io.BytesIO()
    np.savez_compressed(file, **examples)  # type: ignore[arg-type]
    storage.remove_leftovers(path.parent, f".{glob.escape(path.name)}.*.tmp")
    storage.write_bytes(path, file.getvalue())


def write_pictures(folder: Path, examples: dict[str, Column]) -> None:
    """Write INDEX.png for each example, and `examples.csv` with the other columns."""
    x = np.rint(255 * examples["x"]).astype(np.uint8).transpose(0, 2, 3, 1)  # (n, H, W, C)
    if x.shape[3] not in (1, 3):
        raise BastionError(f"export: images of {x.shape[3]} channels are no PNG; export to a .npz file")
    storage.remove_leftovers(folder, ".*.tmp")
    rest = {name: column.tolist() for name, column in examples.items() if name != "x"}
    files = [f"{index:06d}.png" for index in rest["index"]]
    for name, pixels in zip(files, x, strict=True):
        picture = io.BytesIO()
        Image.fromarray(pixels.squeeze(2) if pixels.shape[2] == 1 else pixels).save(picture, "PNG")
        storage.write_bytes(folder / name, picture.getvalue())
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", *rest])
    writer.writerows(zip(files, *rest.values(), strict=True))
    storage.write_text(folder / "examples.csv", table.getvalue())

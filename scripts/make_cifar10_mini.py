"""Makes the embedded data set `cifar10-mini` again from `cifar10`, or compares the two with `--check`.

With the libwebp that wrote them (Pillow brings its own) the files come out bit for bit the same.
"""

from __future__ import annotations

import argparse
import io
import sys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, features

from bastion.data.arrays import Pixels, digests
from bastion.data.cifar import CIFAR10
from bastion.data.mini import LABELS, MOSAIC
from bastion.storage import Arrays, write_bytes

_COLUMNS = 100  # tiles in a row of the mosaic


def first_of_each_class(labels: NDArray[np.uint8], count: int) -> NDArray[np.intp]:
    """Positions of the first `count` images of each class, in ascending order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]))


def select(arrays: Arrays) -> Arrays:
    chosen = {
        split: first_of_each_class(arrays[f"{split}_labels"], count) for split, count in (("train", 400), ("test", 100))
    }
    return {part: array[chosen[part.partition("_")[0]]] for part, array in arrays.items()}


def mosaic(images: Pixels) -> bytes:
    """One lossless picture of all images, row by row."""
    tiles = images.reshape(-1, _COLUMNS, 32, 32, 3).swapaxes(1, 2)
    picture = Image.fromarray(tiles.reshape(-1, _COLUMNS * 32, 3))
    file = io.BytesIO()
    picture.save(file, format="WEBP", lossless=True)
    return file.getvalue()


def digits(*labels: NDArray[np.uint8]) -> bytes:
    """A line for each array, a digit for each label."""
    return b"".join((line + ord("0")).astype(np.uint8).tobytes() + b"\n" for line in labels)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare with the embedded files, write nothing")
    check = parser.parse_args().check
    arrays = select(CIFAR10.read())
    files = {
        MOSAIC: mosaic(np.concatenate([arrays["train_images"], arrays["test_images"]])),
        LABELS: digits(arrays["train_labels"], arrays["test_labels"]),
    }
    for path, content in files.items():
        if not check:
            write_bytes(path, content)
        same = path.read_bytes() == content
        verdict = "the same" if same else f"differs; here is libwebp {features.version('webp')}"
        print(f"{path}: {len(content):,} bytes, {verdict}")
        if not same:
            return 1
    for part, digest in digests(arrays).items():
        print(f"{part}: {digest}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

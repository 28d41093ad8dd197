"""docs/deepaugment.jpg: training images beside their copies. `python scripts/deepaugment_picture.py FOLDER`"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from bastion.data import datasets
from bastion.deepaugment.generate import GROUP
from bastion.deepaugment.networks import NETWORKS

FILE = Path(__file__).parents[1] / "docs" / "deepaugment.jpg"
SHOWN, LABEL, GAP, ACROSS, BANDS = 64, 64, 2, 16, 3


def page(folder: Path, data: str) -> Image.Image:
    """Bands of three rows: originals, and what each network made of them. No two images are of one group."""
    positions = [GROUP * number for number in range(ACROSS * BANDS)]
    original = (255 * datasets.build(data).train.batch(positions).x).round().byte().permute(0, 2, 3, 1).numpy()
    rows = {"original": original}
    for name in NETWORKS:
        with np.load(folder / f"{name}.npz") as file:
            rows[name] = file["image"][positions]
    height = len(rows) * (SHOWN + GAP) + 4 * GAP
    sheet = Image.new("RGB", (LABEL + ACROSS * (SHOWN + GAP), BANDS * height), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(13)
    for band in range(BANDS):
        for row, (name, images) in enumerate(rows.items()):
            top = band * height + row * (SHOWN + GAP)
            draw.text((4, top + SHOWN // 2 - 8), name, fill="black", font=font)
            for column in range(ACROSS):
                picture = Image.fromarray(images[band * ACROSS + column])
                place = (LABEL + column * (SHOWN + GAP), top)
                sheet.paste(picture.resize((SHOWN, SHOWN), Image.Resampling.NEAREST), place)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("folder", type=Path, help="of `bastion data deepaugment`")
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args()
    page(options.folder, options.data).save(options.output, quality=85)
    print(f"{options.output}: {options.output.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()

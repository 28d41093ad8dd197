"""docs/corruptions.jpg: every corruption at every severity on a drawn scene. `python scripts/corruption_picture.py`"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from bastion.corruptions import COMMON, EXTRA, PROCEDURAL, SEVERITIES, corrupt

FILE = Path(__file__).parents[1] / "docs" / "corruptions.jpg"
SIDE, SHOWN, LABEL, GAP = 224, 104, 118, 3


def scene() -> Tensor:
    """A house, a tree and the sun, with fine structures and text, as (1, 3, 224, 224) in [0, 1]."""
    size = 2 * SIDE
    rows = np.linspace(0, 1, size)[:, None, None]
    sky = np.broadcast_to(np.array([90, 160, 230]) + rows * np.array([120, 60, 10]), (size, size, 3))
    picture = Image.fromarray(sky.clip(0, 255).astype(np.uint8))
    draw = ImageDraw.Draw(picture)
    draw.ellipse((340, 30, 410, 100), fill=(255, 225, 90))
    draw.polygon([(0, 300), (130, 190), (260, 300)], fill=(120, 130, 150))
    draw.rectangle((0, 290, size, size), fill=(95, 150, 70))
    for x in range(0, size, 9):
        draw.line((x, 448, x + 5, 400 + 17 * (x % 3)), fill=(60, 110 + 20 * (x % 4), 45), width=3)
    draw.rectangle((180, 200, 350, 350), fill=(200, 90, 70))
    for y in range(212, 350, 14):
        draw.line((180, y, 350, y), fill=(230, 200, 180), width=2)
    draw.polygon([(165, 200), (265, 120), (365, 200)], fill=(90, 50, 45))
    draw.rectangle((200, 230, 250, 280), fill=(240, 240, 250), outline=(40, 40, 40), width=4)
    draw.line((225, 230, 225, 280), fill=(40, 40, 40), width=3)
    draw.rectangle((280, 260, 325, 350), fill=(70, 45, 30))
    draw.rectangle((70, 240, 92, 370), fill=(90, 60, 35))
    for x, y, r in ((80, 200, 55), (45, 235, 38), (118, 232, 40)):
        draw.ellipse((x - r, y - r, x + r, y + r), fill=(40, 110 - r // 2, 45))
    draw.text((185, 375), "BASTION", fill=(255, 255, 255), font=ImageFont.load_default(46))
    pixels = np.array(picture.resize((SIDE, SIDE), Image.Resampling.LANCZOS))
    return torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255


def page(names: tuple[str, ...], x: Tensor) -> Image.Image:
    """Two blocks side by side, a row for each corruption, a column for each severity."""
    half = -(-len(names) // 2)
    block = LABEL + len(SEVERITIES) * (SHOWN + GAP)
    sheet = Image.new("RGB", (2 * block + 4 * GAP, half * (SHOWN + GAP) + 20), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(12)
    for number, name in enumerate(names):
        left, top = (number // half) * (block + 4 * GAP), 20 + (number % half) * (SHOWN + GAP)
        draw.text((left + 4, top + SHOWN // 2 - 6), name, fill="black", font=font)
        for column, severity in enumerate(SEVERITIES):
            made = corrupt(x, name, severity, index=torch.tensor([column]))
            pixels = (made[0] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
            place = left + LABEL + column * (SHOWN + GAP)
            sheet.paste(Image.fromarray(pixels).resize((SHOWN, SHOWN), Image.Resampling.LANCZOS), (place, top))
            draw.text((place + SHOWN // 2 - 3, 3), str(severity), fill="black", font=font)
    return sheet


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition(".")[0])
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument(
        "--frost", action="store_true", help="with the photographs in $BASTION_FROST; not to be published"
    )
    options = parser.parse_args()
    kinds = tuple(PROCEDURAL[0] if name == "frost" and not options.frost else name for name in COMMON)
    sheet = page((*kinds, *EXTRA), scene())
    sheet.save(options.output, quality=82)
    print(f"{options.output}: {options.output.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()

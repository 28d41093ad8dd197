"""tests/golden/corruptions.npz: what other code makes of a drawn image, to hold `bastion.corruptions` to.

Runs in an environment of its own, that of benchmarks/corruptions.py:

    /tmp/reference/bin/python scripts/corruption_references.py

`imagecorruptions` 1.1.2 is the reference where it does as ImageNet-C was made, with its random numbers recorded. Where
it does not (zoom_blur, snow, elastic_transform), the formula of Hendrycks and Dietterich is written out with scipy,
scikit-image and OpenCV, which they used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np
from imagecorruptions import corruptions as reference
from PIL import Image
from scipy.ndimage import map_coordinates, zoom
from skimage.filters import gaussian

FILE = Path(__file__).parents[1] / "tests" / "golden" / "corruptions.npz"
HEIGHT, WIDTH = 40, 44
DETERMINISTIC = (
    "defocus_blur",
    "brightness",
    "contrast",
    "pixelate",
    "jpeg_compression",
    "gaussian_blur",
    "saturate",
)
random = np.random.default_rng(0)


def normal(side: int, width: int) -> Any:
    """In few bits, so that the file is small."""
    return random.normal(size=(side, width)).astype(np.float16).astype(np.float32)


def short(value: Any) -> Any:
    """As float16, if nothing is lost."""
    halved = np.asarray(value, dtype=np.float16) if np.asarray(value).dtype == np.float32 else None
    return halved if halved is not None and np.array_equal(halved.astype(np.float32), value) else value


def blur(image: Any, sigma: Any, multichannel: bool = False, **settings: Any) -> Any:
    """The argument that the reference passes has another name since scikit-image 0.19."""
    return gaussian(image, sigma, channel_axis=-1 if multichannel else None, **settings)


def drawn_image() -> Any:
    """Smooth colours, hard edges, fine lines, black, white and grey: (HEIGHT, WIDTH, 3) uint8."""
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH].astype(np.float64)
    image = np.stack([x / WIDTH, y / HEIGHT, 0.5 + 0.5 * np.sin(x / 5) * np.cos(y / 7)], -1)
    image[(y - 14) ** 2 + (x - 18) ** 2 < 90] = (0.9, 0.2, 0.1)
    image[26:38, 24:40] = np.where(((x // 2 + y // 2) % 2)[26:38, 24:40, None] > 0, 1.0, 0.0)
    image[4:10, 30:42] = 0.5
    return np.uint8(image * 255)


def deterministic(picture: Image.Image) -> dict[str, Any]:
    return {
        f"{name}/{severity}": np.uint8(getattr(reference, name)(picture, severity))
        for name in DETERMINISTIC
        for severity in (2, 5)
    }


def motion(image: Any) -> dict[str, Any]:
    angles = np.array([-44.0, -10.0, 25.0])
    moved = [reference._motion_blur(image, radius=10, sigma=3, angle=angle) for angle in angles]
    return {"motion/angles": angles, "motion/made": np.stack(moved).round().astype(np.uint8)}


def plasma(side: int = 32, decay: float = 1.7) -> dict[str, Any]:
    """Each random number of the reference at the point that it roughens, over its amplitude."""
    noise, step, calls = np.zeros((side, side)), side, 0
    places = ((1, 1), (0, 1), (1, 0))  # in halves of a step: squares, then the two kinds of diamonds

    def uniform(low: float, high: float, shape: tuple[int, ...]) -> Any:
        nonlocal step, calls
        drawn = random.uniform(-1, 1, shape)
        row, column = (step // 2 * place for place in places[calls % 3])
        noise[row::step, column::step] = drawn
        calls += 1
        step = step // 2 if calls % 3 == 0 else step
        return drawn * high

    with patch.object(np.random, "uniform", uniform):
        made = reference.plasma_fractal(side, decay)
    return {"plasma/noise": noise.astype(np.float32), "plasma/made": made.astype(np.float32)}


def glass(picture: Image.Image, severity: int = 3) -> dict[str, Any]:
    """Severity 3: pixels come from up to 2 away, in three passes."""
    reach, passes = 2, 3
    offsets = random.integers(-reach, reach, (passes, 2, HEIGHT, WIDTH))
    order = [
        offsets[number, :, h, w]
        for number in range(passes)
        for h in range(HEIGHT - reach, reach, -1)
        for w in range(WIDTH - reach, reach, -1)
    ]
    drawn = iter(order)
    with patch.object(np.random, "randint", lambda *_, **__: next(drawn)):
        made = reference.glass_blur(picture, severity)
    return {"glass/offsets": offsets.astype(np.int8), "glass/made": np.uint8(made)}


def spatter(picture: Image.Image) -> dict[str, Any]:
    made = {}
    for severity in (2, 5):
        noise = normal(HEIGHT, WIDTH)
        with patch.object(np.random, "normal", lambda size, loc, scale, noise=noise: loc + scale * noise):
            made[f"spatter/{severity}"] = np.uint8(reference.spatter(picture, severity))
        made[f"spatter/noise/{severity}"] = noise
    return made


def centre_zoom(image: Any, factor: float) -> Any:
    """The centre of a square image, enlarged, and what is too much cut off on all sides alike."""
    side = len(image)
    crop = int(np.ceil(side / factor))
    start = (side - crop) // 2
    grown = zoom(image[start : start + crop, start : start + crop], (factor, factor, 1), order=1)
    extra = (len(grown) - side) // 2
    return grown[extra : extra + side, extra : extra + side]


def zooms(square: Any) -> dict[str, Any]:
    x = np.float32(square / 255)
    made = {}
    for severity, factors in ((1, np.arange(1, 1.11, 0.01)), (5, np.arange(1, 1.31, 0.03))):
        mean = (x + sum(centre_zoom(x, factor) for factor in factors)) / (len(factors) + 1)
        made[f"zoom/{severity}"] = np.uint8(np.clip(mean, 0, 1) * 255)
    return made


def snow(square: Any) -> dict[str, Any]:
    """Severity 4 of ImageNet-C."""
    mean, std, factor, threshold, radius, sigma, mix = 0.55, 0.3, 4.5, 0.85, 12, 8, 0.65
    side, angle = len(square), -100.0
    noise = normal(side, side)
    layer = centre_zoom((mean + std * noise)[..., None], factor)[..., 0]
    layer[layer < threshold] = 0
    stored = np.uint8(np.clip(layer, 0, 1) * 255)
    moved = reference._motion_blur(stored.astype(np.float32), radius=radius, sigma=sigma, angle=angle)
    flakes = np.round(moved)[..., None] / 255
    x = np.float32(square / 255)
    gray = cv2.cvtColor(x, cv2.COLOR_RGB2GRAY)[..., None]
    x = mix * x + (1 - mix) * np.maximum(x, gray * 1.5 + 0.5)
    made = np.clip(x + flakes + np.rot90(flakes, k=2), 0, 1) * 255
    return {"snow/noise": noise, "snow/angle": np.array(angle), "snow/made": np.uint8(made)}


def elastic(square: Any, alpha: float = 12.2, sigma: float = 2.44, jitter: float = 4.88) -> dict[str, Any]:
    """Severity 3 of ImageNet-C."""
    side = len(square)
    moves = random.uniform(-jitter, jitter, (3, 2)).astype(np.float32)
    field = random.uniform(-1, 1, (2, side, side)).astype(np.float16).astype(np.float32)
    centre, reach = side // 2, side // 3
    before = np.float32([[centre + reach] * 2, [centre + reach, centre - reach], [centre - reach] * 2])
    x = np.float32(square / 255)
    x = cv2.warpAffine(
        x, cv2.getAffineTransform(before, before + moves), (side, side), borderMode=cv2.BORDER_REFLECT_101
    )
    dx, dy = (alpha * gaussian(np.float64(each), sigma, mode="reflect", truncate=3) for each in field)
    rows, columns = np.mgrid[0:side, 0:side]
    planes = [map_coordinates(x[..., c], [rows + dy, columns + dx], order=1, mode="reflect") for c in range(3)]
    made = np.uint8(np.clip(np.stack(planes, -1), 0, 1) * 255)
    return {"elastic/moves": moves, "elastic/field": field, "elastic/made": made}


def main() -> None:
    reference.gaussian = blur
    image = drawn_image()
    picture, square = Image.fromarray(image), image[:, :HEIGHT]
    arrays = {"image": image, **deterministic(picture), **motion(image), **plasma(), **glass(picture)}
    arrays |= {**spatter(picture), **zooms(square), **snow(square), **elastic(square)}
    np.savez_compressed(FILE, **{name.replace("/", "."): short(value) for name, value in arrays.items()})
    print(f"{FILE}: {FILE.stat().st_size / 1024:.0f} KB")


if __name__ == "__main__":
    main()

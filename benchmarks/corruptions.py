"""Common corruptions: images per second, bastion beside `imagecorruptions`, one thread each, in one run.

    python -m venv /tmp/reference
    /tmp/reference/bin/pip install "numpy<2" "scikit-image==0.21.0" "opencv-python-headless<4.9" "setuptools<70" \
        "scipy<1.12" "pillow==13.0.0"
    /tmp/reference/bin/pip install --no-deps imagecorruptions
    python -m benchmarks.corruptions --reference /tmp/reference/bin/python

Times are of the processor, not of the clock, so that other programs on the machine count little: the best of several
rounds in which the two take turns. Both turn float32 images (B, 3, H, W) in [0, 1] into corrupted ones. The reference
works on one uint8 image at a time, so its time includes the conversion, unless `--uint8` leaves that out. Both have the
parameters of ImageNet-C, also at 32 x 32, as the reference has no others. `frost` needs the textures, which the
reference brings along. Pillow, which does the JPEG of both, should be of the version that bastion has.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from pathlib import Path

import torch

from bastion.corruptions import COMMON, EXTRA, SEVERITIES, corrupt

SIZES = {32: (64, 2), 224: (8, 1)}  # side: images for bastion, for the reference
ROUNDS = 7
RESULTS = Path(__file__).parent / "results" / "corruptions.md"

# Reads {name, side, images, uint8} a line, and answers with seconds an image at each severity.
REFERENCE = """
import json, sys, time, warnings
warnings.simplefilter("ignore")
import cv2, numpy as np
from imagecorruptions import corrupt, corruptions
from skimage.filters import gaussian
cv2.setNumThreads(1)
def blur(image, sigma, multichannel=False, **settings):  # the argument has another name since scikit-image 0.19
    return gaussian(image, sigma, channel_axis=-1 if multichannel else None, **settings)
corruptions.gaussian = blur
for line in sys.stdin:
    job = json.loads(line)
    images = np.random.default_rng(0).integers(0, 256, (job["images"], job["side"], job["side"], 3), dtype=np.uint8)
    floats, spent = np.ascontiguousarray(images.transpose(0, 3, 1, 2) / np.float32(255)), []
    for severity in (1, 2, 3, 4, 5):
        start, made = time.process_time(), np.empty_like(floats)
        for number in range(len(images)):
            if job["uint8"]:
                corrupt(images[number], corruption_name=job["name"], severity=severity)
            else:
                image = np.ascontiguousarray((floats[number] * 255).round().astype(np.uint8).transpose(1, 2, 0))
                image = corrupt(image, corruption_name=job["name"], severity=severity)
                made[number] = image.transpose(2, 0, 1) / np.float32(255)
        spent.append((time.process_time() - start) / len(images))
    print("TIMES", json.dumps(spent), flush=True)
"""


class Reference:
    """The other package in its own environment."""

    def __init__(self, python: str, *, uint8: bool) -> None:
        self._uint8 = uint8
        self._process = subprocess.Popen(
            [python, "-c", REFERENCE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        code = "import imagecorruptions, os; print(os.path.dirname(imagecorruptions.__file__))"
        found = subprocess.run([python, "-W", "ignore", "-c", code], check=True, capture_output=True, text=True)
        self.textures = Path(found.stdout.strip()) / "frost"

    def seconds(self, name: str, side: int, images: int) -> list[float]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(
            json.dumps({"name": name, "side": side, "images": images, "uint8": self._uint8}) + "\n"
        )
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("TIMES"):
                return [float(value) for value in json.loads(line.removeprefix("TIMES"))]
        raise RuntimeError(f"the reference stopped at {name}")


def bastion_seconds(name: str, side: int, images: int, textures: Path) -> list[float]:
    index = torch.arange(images)
    x = torch.randint(0, 256, (images, 3, side, side), generator=torch.Generator().manual_seed(0)) / 255
    spent = []
    for severity in SEVERITIES:
        start = time.process_time()
        corrupt(x, name, severity, index=index, parameters="imagenet", textures=textures)
        spent.append((time.process_time() - start) / images)
    return spent


def table(reference: Reference, side: int, rounds: int) -> list[str]:
    own_images, their_images = SIZES[side]
    lines = [
        f"| {side} x {side} | bastion, images/s | imagecorruptions, images/s | ratio |",
        "| --- | --- | --- | --- |",
    ]
    totals, logarithms = [0.0, 0.0], 0.0
    for name in (*COMMON, *EXTRA):
        bastion_seconds(name, side, 1, reference.textures)  # tables and textures are made once
        reference.seconds(name, side, 1)
        own, theirs = [], []
        for _ in range(rounds):
            own.append(bastion_seconds(name, side, own_images, reference.textures))
            theirs.append(reference.seconds(name, side, their_images))
        seconds = [sum(map(min, zip(*each, strict=True))) / len(SEVERITIES) for each in (own, theirs)]
        totals = [total + spent for total, spent in zip(totals, seconds, strict=True)]
        logarithms += math.log(seconds[1] / seconds[0])
        lines.append(_row(name, *seconds))
        print(lines[-1], flush=True)
    count = len((*COMMON, *EXTRA))
    lines.append(_row("**all, one after another**", *(total / count for total in totals)))
    return [*lines, f"| geometric mean of the ratios | | | {math.exp(logarithms / count):.1f} |"]


def _row(name: str, own: float, theirs: float) -> str:
    return f"| {name} | {1 / own:,.0f} | {1 / theirs:,.1f} | {theirs / own:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--reference", required=True, help="the python that has imagecorruptions")
    parser.add_argument("--sides", type=int, nargs="*", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--uint8", action="store_true", help="time the reference on its own uint8 images")
    parser.add_argument("--write", action="store_true", help=f"to {RESULTS.name} in benchmarks/results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reference = Reference(options.reference, uint8=options.uint8)
    text = "\n\n".join("\n".join(table(reference, side, options.rounds)) for side in options.sides)
    print("\n" + text)
    if options.write:
        head = "# Common corruptions: images per second on one thread\n\n"
        head += "`python -m benchmarks.corruptions --reference …`, mean of severities 1 to 5.\n\n"
        RESULTS.write_text(head + text + "\n")


if __name__ == "__main__":
    main()

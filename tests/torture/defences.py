"""Defences that only hide the gradient: each must be warned of or broken by a shipped suite.

    python -m tests.torture.defences --images 64
    python -m tests.torture.defences --only jpeg-50 one-hot

Each is put on a robust network of the zoo and measured with the suite `demo`: checks, and PGD-20. Where there is no
warning, PGD-20 must leave no more of the defended network than AutoAttack does, nor than adversarial examples of the
network itself do, which no defence hides; or else AutoAttack must. Neither warned of nor broken: a number that is wrong
without a word. The network itself, and changes that hide nothing, must not be warned of.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import bastion
from bastion import BastionError
from bastion.data import datasets
from bastion.measuring.runner import measure
from tests.torture.record import Record

MODEL = "zoo/cifar10-linf-resnet"
DATA = "cifar10-mini"
SLACK = 0.03  # of accuracy, by which two attacks may differ
DARK = 0.4  # mean brightness, below which are some 30 % of the images
Map = Callable[[Tensor], Tensor]
Rule = Callable[[nn.Module, Tensor], Tensor]  # of a network and images: logits


class Defended(nn.Module):
    def __init__(self, network: nn.Module, rule: Rule) -> None:
        super().__init__()
        self.network, self.rule = network, rule

    def forward(self, x: Tensor) -> Tensor:
        return self.rule(self.network, x)


def before(change: Map) -> Rule:
    """Change the images."""
    return lambda network, x: network(change(x))  # type: ignore[no-any-return]


def behind(change: Map) -> Rule:
    """Change the logits."""
    return lambda network, x: change(network(x))


def purified(network: nn.Module, x: Tensor) -> Tensor:
    """Classify the image after a step along the network's own gradient, which makes it clearer."""
    with torch.enable_grad():
        point = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(network(point).logsumexp(1).sum(), point)
    logits: Tensor = network((x.detach() + slope.sign() / 255).clamp(0, 1))
    return logits


def reversed_off_the_grid(network: nn.Module, x: Tensor) -> Tensor:
    """The right gradient for images of 8 bits only; for others the opposite one."""
    levels = 255 * x.detach()
    stored = (levels - levels.round()).abs().flatten(1).amax(1) < 1e-3
    logits: Tensor = network(torch.where(stored[:, None, None, None], x, 2 * x.detach() - x))
    return logits


@torch.no_grad()
def without_gradients(network: nn.Module, x: Tensor) -> Tensor:
    logits: Tensor = network(x)
    return logits


class Replaced(torch.autograd.Function):
    """The identity, whose gradient is what a function of the image and the right gradient says."""

    @staticmethod
    def forward(context: Any, x: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        context.save_for_backward(x)
        context.change = change
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return context.change(context.saved_tensors[0], gradient), None


def gradient(change: Callable[[Tensor, Tensor], Tensor]) -> Rule:
    """Change the gradient alone."""
    return before(lambda x: Replaced.apply(x, change))  # type: ignore[no-any-return, no-untyped-call]


def levels(count: int) -> Map:
    return lambda x: (count * x).round() / count


def jpeg(quality: int) -> Map:
    def compress(x: Tensor) -> Tensor:
        return torch.stack([_compressed(image, quality) for image in x.detach()])

    return compress


def _compressed(image: Tensor, quality: int) -> Tensor:
    pixels, file = (255 * image).round().byte().permute(1, 2, 0).numpy(), io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality)
    return torch.from_numpy(np.array(Image.open(file))).permute(2, 0, 1) / 255


def blur(x: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3, 1)


def median(x: Tensor) -> Tensor:
    windows = F.unfold(F.pad(x, (1, 1, 1, 1), mode="replicate"), 3).view(*x.shape[:2], 9, *x.shape[2:])
    return windows.median(2).values


def wave(height: float, frequency: float) -> Map:
    return lambda x: x + height * torch.sin(frequency * x)


def on_dark_images(change: Map) -> Map:
    def some(x: Tensor) -> Tensor:
        dark = x.detach().mean((1, 2, 3), keepdim=True) < DARK
        return torch.where(dark, change(x), x)

    return some


def mostly_wrong(change: Map) -> Rule:
    """Change the images for a network that is right on two of ten classes: the others are confused in pairs."""
    return lambda network, x: network(change(x))[:, [0, 1, 3, 2, 5, 4, 7, 6, 9, 8]]


def noise(x: Tensor) -> Tensor:
    """Pseudo-noise of variance 1, the same whenever the image is the same."""
    return 2**0.5 * torch.sin(1e4 * x + torch.arange(x.shape[-1], device=x.device))


def moved(x: Tensor) -> Tensor:
    """Shrunk, and put at a random place."""
    small = F.interpolate(x, scale_factor=0.9, mode="bilinear", align_corners=False)
    free = x.shape[-1] - small.shape[-1]
    top, left = (int(torch.randint(free + 1, ())) for _ in range(2))
    return F.pad(small, (left, free - left, top, free - top))


def deflected(x: Tensor) -> Tensor:
    """Some pixels are replaced by a neighbour, at random."""
    return torch.where(torch.rand(len(x), 1, *x.shape[2:]) < 0.15, x.roll(1, -1), x)


def off_grid(x: Tensor) -> Tensor:
    """Pixels that no 8-bit image has are rounded far away from themselves."""
    stored = (255 * x).round() / 255
    return torch.where((x - stored).abs() < 1e-6, x, levels(8)(x).detach())


DEFENCES: dict[str, Rule] = {
    # the image, without a gradient
    "256-levels": before(levels(255)),
    "16-levels": before(levels(16)),
    "8-levels": before(levels(8)),
    "floor": before(lambda x: (32 * x).floor() / 32),
    "off-grid": before(off_grid),
    "jpeg-90": before(jpeg(90)),
    "jpeg-50": before(jpeg(50)),
    "detached": before(lambda x: x.detach()),
    "detached-blur": before(lambda x: blur(x).detach()),
    "uint8": before(lambda x: (255 * x).byte().float() / 255),
    # the image, changed on the way
    "blur": before(blur),
    "median": before(median),
    "half-gradient": before(lambda x: 0.01 * x + 0.99 * x.detach()),
    "one-channel-gradient": before(lambda x: torch.cat([x[:, :1], x[:, 1:].detach()], 1)),
    "patch-gradient": gradient(lambda x, g: F.pad(g[..., :8, :8], (0, 24, 0, 24))),
    # waves
    "wave-0.01-1000": before(wave(0.01, 1000)),
    "wave-0.03-1000": before(wave(0.03, 1000)),
    "wave-0.01-500": before(wave(0.01, 500)),
    "wave-0.003-3000": before(wave(0.003, 3000)),
    "wave-0.02-300": before(wave(0.02, 300)),
    "sawtooth": before(lambda x: x + 0.02 * torch.remainder(100 * x, 1)),
    "wave-on-dark-images": before(on_dark_images(wave(0.01, 1000))),
    "wave-on-a-bad-network": mostly_wrong(wave(0.01, 1000)),
    # chance
    "noise": before(lambda x: x + 0.05 * torch.randn_like(x)),
    "dropout": before(lambda x: F.dropout(x, 0.1, training=True)),
    "resize-and-pad": before(moved),
    "pixel-deflection": before(deflected),
    "random-logits": behind(lambda z: z + 0.5 * torch.randn_like(z)),
    "random-flip": before(lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x),
    # the logits
    "softmax": behind(lambda z: z.softmax(1)),
    "sharp-softmax": behind(lambda z: (100 * z).softmax(1)),
    "loud": behind(lambda z: 1e4 * z),
    "quiet": behind(lambda z: 1e-30 * z),
    "far": behind(lambda z: z + 1e7),
    "step-logits": behind(lambda z: (4 * z).round() / 4),
    "one-hot": behind(lambda z: 10 * F.one_hot(z.argmax(1), z.shape[1]).float()),
    "winner-plus-ten": behind(lambda z: z + 10 * F.one_hot(z.argmax(1), z.shape[1])),
    "saturated": behind(lambda z: 20 * torch.tanh(50 * (z - z.mean(1, keepdim=True)))),
    "clamped": behind(lambda z: (z - z.topk(2).values.mean(1, keepdim=True)).clamp(-1e-3, 1e-3)),
    "no-top-gradient": behind(lambda z: torch.where(z == z.amax(1, keepdim=True), z.detach(), z)),
    # the gradient alone
    "zero-gradient": gradient(lambda x, g: torch.zeros_like(g)),
    "nan-gradient": gradient(lambda x, g: torch.full_like(g, torch.nan)),
    "huge-gradient": gradient(lambda x, g: 1e38 * g),
    "tiny-gradient": gradient(lambda x, g: 1e-38 * g),
    "reversed-gradient": gradient(lambda x, g: -g),
    "noisy-gradient-1": gradient(lambda x, g: g + g.abs().mean() * noise(x)),
    "noisy-gradient-3": gradient(lambda x, g: g * (1 + 3 * noise(x))),
    "random-gradient": gradient(lambda x, g: torch.randn_like(g)),
    "fixed-gradient": gradient(lambda x, g: torch.ones_like(g)),
    "mirrored-gradient": gradient(lambda x, g: g.flip(-1)),
    "gradient-of-the-image": gradient(lambda x, g: x - 0.5),
    "turned-off-the-grid": reversed_off_the_grid,
    # the model
    "purified": purified,
    "batch-mean": before(lambda x: (x - x.mean(0) + x.mean()).clamp(0, 1)),
    "no-grad": without_gradients,
}
# Change the network, but hide nothing.
HEALTHY: dict[str, Rule] = {
    "nothing": before(torch.clone),
    "smaller-logits": behind(lambda z: z / 10),
    "log-softmax": behind(lambda z: z.log_softmax(1)),
    "darker": before(lambda x: 0.95 * x),
    "mirrored": before(lambda x: x.flip(-1)),
    "mostly-wrong": mostly_wrong(torch.clone),
}


class Outcome(NamedTuple):
    name: str
    clean: float
    pgd: float  # accuracy under PGD-20
    warnings: tuple[str, ...]
    verdict: str

    def __str__(self) -> str:
        found = [f"{100 * self.clean:5.1f} {100 * self.pgd:6.1f}", f"{self.verdict:<22}", ", ".join(self.warnings)]
        return "  ".join([f"{self.name:<22}", *found]).rstrip()


def accuracies(model: nn.Module, suite: str, images: int) -> tuple[dict[str, float], tuple[str, ...]]:
    """By probe, and the codes of the warnings. A model that is refused in one line is warned of."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            facts = measure(model, DATA, suite, limit=images, folder=folder)
        except BastionError as error:
            return {"clean": 0.0, "pgd-20": 0.0}, (f"refused: {error}"[:60],)
    found = {label: each.value for label, each in facts.accuracies().items()}
    return found, tuple(dict.fromkeys(each.code for each in facts.warnings()))


class Judge:
    """Compares what attacks leave of defended networks."""

    def __init__(self, images: int) -> None:
        self.images, self.network = images, bastion.load(MODEL)
        batch = datasets.build(DATA).test.batch(range(images))
        self.y = batch.y
        self.adversarial = bastion.attack(self.network, batch.x, batch.y, "pgd:steps=40", norm="linf", eps=8 / 255).x

    def outcome(self, name: str) -> Outcome:
        model = Defended(self.network, (HEALTHY | DEFENCES)[name])
        found, warned = accuracies(model, "demo", self.images)
        if name in HEALTHY:
            verdict = "FALSE ALARM" if warned else "no warning"
        else:
            verdict, warned = ("warned of", warned) if warned else self.without_warning(model, found["pgd-20"])
        return Outcome(name, found["clean"], found["pgd-20"], warned, verdict)

    def without_warning(self, model: nn.Module, pgd: float) -> tuple[str, tuple[str, ...]]:
        """The verdict on a network that `demo` does not warn of, and AutoAttack's warnings."""
        left, warned = accuracies(model, "autoattack-linf", self.images)
        if "autoattack" not in left:  # refused
            return "warned of", warned
        truth = min(left["autoattack"], self.left_by_transfer(model)) + SLACK
        for attack, accuracy in (("PGD-20", pgd), ("AutoAttack", left["autoattack"])):
            if accuracy <= truth:
                return f"broken by {attack}", warned
        return "warned of" if warned else "UNNOTICED", warned

    def left_by_transfer(self, model: nn.Module) -> float:
        """Accuracy on adversarial examples of the network without the defence."""
        with torch.no_grad():
            return (model(self.adversarial).argmax(1) == self.y).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--only", nargs="*", choices=(*HEALTHY, *DEFENCES), metavar="NAME", help="only these")
    parser.add_argument("--minutes", type=float, default=10**6)
    parser.add_argument(
        "--results", type=Path, default=Path("torture/defences.jsonl"), help="those in it are not redone"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about what the defences do
    judge, record, began = Judge(options.images), Record(options.results), time.monotonic()
    print("                        clean PGD-20")
    for name in options.only or (*HEALTHY, *DEFENCES):
        if (name in record.results and not options.only) or time.monotonic() - began > 60 * options.minutes:
            continue
        found = judge.outcome(name)
        record.add(name, found.verdict)
        print(found, flush=True)
    verdicts = Counter(record.results.values())
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    sys.exit(1 if verdicts["UNNOTICED"] or verdicts["FALSE ALARM"] else 0)


if __name__ == "__main__":
    main()

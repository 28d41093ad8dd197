"""Defences that only hide the gradient: each must be warned of or broken by a shipped suite.

    python -m tests.torture.defences --images 64
    python -m tests.torture.defences --only jpeg-50 one-hot

Each is put on a robust network of the zoo and measured with the suite `demo`: checks, and PGD-20. Where there is no
warning, the defended network must not be more accurate than the network itself: under PGD-20 or, if that is fooled,
under AutoAttack. Neither warned of nor broken: a number that is wrong without a word. The network itself, and changes
that hide nothing, must not be warned of.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

import bastion
from bastion import BastionError
from bastion.measuring.runner import measure

MODEL = "zoo/cifar10-linf-resnet"
SLACK = 0.03  # of accuracy: more than the network itself has is a defence
Map = Callable[[Tensor], Tensor]


class Defended(nn.Module):
    """A network with something before it and something behind it."""

    def __init__(self, network: nn.Module, before: Map, behind: Map) -> None:
        super().__init__()
        self.network, self.before, self.behind = network, before, behind

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.behind(self.network(self.before(x)))
        return logits


class Purified(nn.Module):
    """Makes the image clearer to itself by steps along its own gradient, and classifies what comes out."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.network(point).logsumexp(1).sum(), point)
        logits: Tensor = self.network((x.detach() + slope.sign() / 255).clamp(0, 1))
        return logits


class OnlyClean(nn.Module):
    """Trusts its gradient to images of 8 bits only; to others it gives that of the opposite class."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        levels = 255 * x.detach()
        stored = (levels - levels.round()).abs().flatten(1).amax(1) < 1e-3
        logits: Tensor = self.network(torch.where(stored[:, None, None, None], x, 2 * x.detach() - x))
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


def gradient(change: Callable[[Tensor, Tensor], Tensor]) -> Map:
    return lambda x: Replaced.apply(x, change)  # type: ignore[no-any-return, no-untyped-call]


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


def as_it_is(x: Tensor) -> Tensor:
    return x


class Defence(NamedTuple):
    before: Map = as_it_is
    behind: Map = as_it_is
    whole: Callable[[nn.Module], nn.Module] | None = None  # instead of both

    def __call__(self, network: nn.Module) -> nn.Module:
        return self.whole(network) if self.whole else Defended(network, self.before, self.behind)


DEFENCES = {
    # the image, without a gradient
    "256-levels": Defence(levels(255)),
    "16-levels": Defence(levels(16)),
    "8-levels": Defence(levels(8)),
    "floor": Defence(lambda x: (32 * x).floor() / 32),
    "off-grid": Defence(off_grid),
    "jpeg-90": Defence(jpeg(90)),
    "jpeg-50": Defence(jpeg(50)),
    "detached": Defence(lambda x: x.detach()),
    "detached-blur": Defence(lambda x: blur(x).detach()),
    "uint8": Defence(lambda x: (255 * x).byte().float() / 255),
    # the image, changed on the way
    "blur": Defence(blur),
    "median": Defence(median),
    "half-gradient": Defence(lambda x: 0.01 * x + 0.99 * x.detach()),
    "one-channel-gradient": Defence(lambda x: torch.cat([x[:, :1], x[:, 1:].detach()], 1)),
    "patch-gradient": Defence(gradient(lambda x, g: F.pad(g[..., :8, :8], (0, 24, 0, 24)))),
    # waves
    "wave-0.01-1000": Defence(wave(0.01, 1000)),
    "wave-0.03-1000": Defence(wave(0.03, 1000)),
    "wave-0.01-500": Defence(wave(0.01, 500)),
    "wave-0.003-3000": Defence(wave(0.003, 3000)),
    "wave-0.02-300": Defence(wave(0.02, 300)),
    "sawtooth": Defence(lambda x: x + 0.02 * torch.remainder(100 * x, 1)),
    # chance
    "noise": Defence(lambda x: x + 0.05 * torch.randn_like(x)),
    "dropout": Defence(lambda x: F.dropout(x, 0.1, training=True)),
    "resize-and-pad": Defence(moved),
    "pixel-deflection": Defence(deflected),
    "random-logits": Defence(behind=lambda z: z + 0.5 * torch.randn_like(z)),
    "random-flip": Defence(lambda x: x.flip(-1) if torch.rand(()) < 0.5 else x),
    # the logits
    "softmax": Defence(behind=lambda z: z.softmax(1)),
    "sharp-softmax": Defence(behind=lambda z: (100 * z).softmax(1)),
    "loud": Defence(behind=lambda z: 1e4 * z),
    "quiet": Defence(behind=lambda z: 1e-30 * z),
    "far": Defence(behind=lambda z: z + 1e7),
    "step-logits": Defence(behind=lambda z: (4 * z).round() / 4),
    "one-hot": Defence(behind=lambda z: 10 * F.one_hot(z.argmax(1), z.shape[1]).float()),
    "winner-plus-ten": Defence(behind=lambda z: z + 10 * F.one_hot(z.argmax(1), z.shape[1])),
    "saturated": Defence(behind=lambda z: 20 * torch.tanh(50 * (z - z.mean(1, keepdim=True)))),
    "clamped": Defence(behind=lambda z: (z - z.topk(2).values.mean(1, keepdim=True)).clamp(-1e-3, 1e-3)),
    "no-top-gradient": Defence(behind=lambda z: torch.where(z == z.amax(1, keepdim=True), z.detach(), z)),
    # the gradient alone
    "zero-gradient": Defence(gradient(lambda x, g: torch.zeros_like(g))),
    "nan-gradient": Defence(gradient(lambda x, g: torch.full_like(g, torch.nan))),
    "huge-gradient": Defence(gradient(lambda x, g: 1e38 * g)),
    "tiny-gradient": Defence(gradient(lambda x, g: 1e-38 * g)),
    "reversed-gradient": Defence(gradient(lambda x, g: -g)),
    "noisy-gradient-1": Defence(gradient(lambda x, g: g + g.abs().mean() * noise(x))),
    "noisy-gradient-3": Defence(gradient(lambda x, g: g * (1 + 3 * noise(x)))),
    "random-gradient": Defence(gradient(lambda x, g: torch.randn_like(g))),
    "fixed-gradient": Defence(gradient(lambda x, g: torch.ones_like(g))),
    "mirrored-gradient": Defence(gradient(lambda x, g: g.flip(-1))),
    "gradient-of-the-image": Defence(gradient(lambda x, g: x - 0.5)),
    "turned-off-the-grid": Defence(whole=OnlyClean),
    # the model
    "purified": Defence(whole=Purified),
    "batch-mean": Defence(lambda x: (x - x.mean(0) + x.mean()).clamp(0, 1)),
    "no-grad": Defence(whole=lambda network: _without_gradients(network)),
}
# Change the network, but hide nothing.
HEALTHY = {
    "nothing": Defence(),
    "smaller-logits": Defence(behind=lambda z: z / 10),
    "log-softmax": Defence(behind=lambda z: z.log_softmax(1)),
    "darker": Defence(lambda x: 0.95 * x),
    "mirrored": Defence(lambda x: x.flip(-1)),
}


def _without_gradients(network: nn.Module) -> nn.Module:
    class Silent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                logits: Tensor = network(x)
            return logits

    return Silent()


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
            facts = measure(model, "cifar10-mini", suite, limit=images, folder=folder)
        except BastionError as error:
            return {"clean": 0.0, "pgd-20": 0.0}, (f"refused: {error}"[:60],)
    found = {label: each.value for label, each in facts.accuracies().items()}
    return found, tuple(dict.fromkeys(each.code for each in facts.warnings()))


class Truth:
    """What attacks leave of the network itself."""

    def __init__(self, images: int) -> None:
        self.images, self.network = images, bastion.load(MODEL)
        self.pgd = accuracies(self.network, "demo", images)[0]["pgd-20"]

    @cached_property
    def autoattack(self) -> float:
        return accuracies(self.network, "autoattack-linf", self.images)[0]["autoattack"]

    def outcome(self, name: str, defence: Defence) -> Outcome:
        model = defence(bastion.load(MODEL))
        found, warned = accuracies(model, "demo", self.images)
        verdict = "warned of" if warned else "broken by PGD-20"
        if not warned and found["pgd-20"] > self.pgd + SLACK:
            left, warned = accuracies(model, "autoattack-linf", self.images)
            broken = left["autoattack"] <= self.autoattack + SLACK
            verdict = "broken by AutoAttack" if broken else "warned of" if warned else "UNNOTICED"
        return Outcome(name, found["clean"], found["pgd-20"], warned, verdict)

    def healthy(self, name: str, change: Defence) -> Outcome:
        found, warned = accuracies(change(bastion.load(MODEL)), "demo", self.images)
        return Outcome(name, found["clean"], found["pgd-20"], warned, "FALSE ALARM" if warned else "no warning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--only", nargs="*", help="names of defences")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # of torch, about what the defences do
    truth, verdicts = Truth(options.images), Counter[str]()
    print("                        clean PGD-20")
    for changes, measured in ((HEALTHY, truth.healthy), (DEFENCES, truth.outcome)):
        for name, change in changes.items():
            if not options.only or name in options.only:
                found = measured(name, change)
                verdicts[found.verdict] += 1
                print(found, flush=True)
    print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    sys.exit(1 if verdicts["UNNOTICED"] or verdicts["FALSE ALARM"] else 0)


if __name__ == "__main__":
    main()

"""Winograd's convolutions beside torch's own: which pay, and does `Winograd.pays` know?

    OMP_NUM_THREADS=1 python -m benchmarks.winograd

Times are those of a forward and a backward pass, the two sides in turn; `rule` is what the rule says, and `rounding`
how far float32 is from float64, beside torch's own convolution.
"""

from __future__ import annotations

import time

import torch
from torch import nn

from bastion.acceleration.winograd import Winograd

SHAPES = (  # images, channels, pixels a side
    *((batch, channels, side) for batch in (16, 64) for channels, side in ((32, 16), (64, 8), (128, 4))),
    *((8, channels, side) for channels, side in ((64, 32), (128, 16), (256, 8), (512, 4))),  # ResNet-18
    *((8, channels, side) for channels, side in ((160, 32), (320, 16), (640, 8))),  # WideResNet-28-10
    *((8, channels, side) for channels, side in ((64, 56), (128, 28), (256, 14), (512, 7))),  # ResNet-50
)
ROUNDS = 20


def seconds(layer: nn.Conv2d, x: torch.Tensor) -> float:
    began = time.perf_counter()
    y = layer(x)
    torch.autograd.grad(y, x, torch.ones_like(y))
    return time.perf_counter() - began


def rounding(layer: nn.Conv2d, x: torch.Tensor, exact: torch.Tensor) -> float:
    with torch.no_grad():
        return (layer(x) - exact).pow(2).mean().sqrt().item()


def main() -> None:
    torch.manual_seed(0)
    print("| images | channels | side | torch ms | Winograd ms | speed | rule | rounding |\n" + "|---" * 8 + "|")
    for batch, channels, side in SHAPES:
        plain = nn.Conv2d(channels, channels, 3, padding=1).requires_grad_(False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ours = Winograd(plain)
        rule = "pays" if ours.pays(batch, channels, side, side) else "does not"
        ours.pays = lambda *shape: True  # type: ignore[method-assign]
        x = torch.randn(batch, channels, side, side).contiguous(memory_format=torch.channels_last)
        exact = nn.functional.conv2d(x.double(), plain.weight.double(), plain.bias.double(), padding=1)  # type: ignore[union-attr]
        error = rounding(ours, x, exact) / rounding(plain, x, exact)
        x.requires_grad_()
        rounds = [(seconds(plain, x), seconds(ours, x)) for _ in range(ROUNDS)][1:]
        theirs, own = (1000 * min(side) for side in zip(*rounds, strict=True))
        ratio = f"{theirs:.1f} | {own:.1f} | {theirs / own:.2f}×"
        print(f"| {batch} | {channels} | {side} | {ratio} | {rule} | {error:.1f}× |", flush=True)


if __name__ == "__main__":
    main()

"""The two image-to-image networks of DeepAugment, small enough to train in minutes. Pixels are in [0, 1]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NOISE = 0.05  # standard deviation of the noise that the EDSR-like network learns to remove
LEVELS = 8  # quantisation levels between 0 and 1 of the codes of the CAE-like network


class Network(nn.Module):
    """A fully convolutional network, which takes images of any size."""

    width: int
    blocks: int

    def __init__(self, channels: int, width: int | None = None, blocks: int | None = None) -> None:
        super().__init__()
        self.channels = channels
        self.width, self.blocks = width or type(self).width, blocks or type(self).blocks
        self.build()
        for module in self.modules():  # so that features have the scale of the image, and blocks start as the identity
            if isinstance(module, nn.Conv2d):
                nn.init.orthogonal_(module.weight)
                nn.init.zeros_(_bias(module))
        for module in self.modules():
            if isinstance(module, Residual):
                nn.init.zeros_(module.last.weight)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def build(self) -> None:
        """Make the layers."""
        raise NotImplementedError

    def path(self) -> list[nn.Conv2d | Residual]:
        """The layers outside residual blocks, and the blocks, in order."""
        raise NotImplementedError

    def corrupted(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """The input that it is trained to restore x from."""
        raise NotImplementedError


class EDSR(Network):
    """Residual blocks without BatchNorm between two convolutions, and a skip around them all (Lim et al. 2017).

    It is trained to denoise, not for super-resolution.
    """

    width, blocks = 24, 4

    def build(self) -> None:
        self.head = _conv(self.channels, self.width)
        self.body = nn.Sequential(*(Residual(self.width) for _ in range(self.blocks)), _conv(self.width, self.width))
        self.tail = _conv(self.width, self.channels)

    def path(self) -> list[nn.Conv2d | Residual]:
        return [self.head, *_layers(self.body), self.tail]

    def forward(self, x: Tensor) -> Tensor:
        features = self.head(_centred(x))
        restored: Tensor = self.tail(features + self.body(features))
        return restored + 0.5

    def corrupted(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x + NOISE * torch.randn(x.shape, generator=generator)


class CAE(Network):
    """A compressive autoencoder (Theis et al. 2017): strided convolutions to a quarter of the size, quantised codes,
    sub-pixel convolutions back to the image."""

    width, blocks = 32, 2

    def build(self) -> None:
        width, wide = self.width, 2 * self.width
        self.encoder = nn.Sequential(
            _conv(self.channels, width, 5, stride=2),
            Residual(width),
            _conv(width, wide, 5, stride=2),
            *(Residual(wide) for _ in range(self.blocks)),
            _conv(wide, width),
        )
        self.decoder = nn.Sequential(
            _conv(width, wide),
            *(Residual(wide) for _ in range(self.blocks)),
            _conv(wide, 4 * width),
            nn.PixelShuffle(2),
            Residual(width),
            _conv(width, 4 * self.channels),
            nn.PixelShuffle(2),
        )

    def path(self) -> list[nn.Conv2d | Residual]:
        return [*_layers(self.encoder), *_layers(self.decoder)]

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        codes = self.encoder(F.pad(_centred(x), (0, -width % 4, 0, -height % 4), mode="replicate"))
        codes = (
            codes + ((LEVELS * codes).round() / LEVELS - codes).detach()
        )  # quantised, with straight-through gradient
        restored: Tensor = self.decoder(codes)
        return restored[:, :, :height, :width] + 0.5

    def corrupted(self, x: Tensor, generator: torch.Generator) -> Tensor:
        return x  # the codes are a bottleneck already


NETWORKS: dict[str, type[Network]] = {"edsr": EDSR, "cae": CAE}


class Residual(nn.Module):
    """A residual block: x + conv(ReLU(conv(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out_channels = width
        self.first, self.last = _conv(width, width), _conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.last(F.relu(self.first(x)))
        return x + changed


def _centred(x: Tensor) -> Tensor:
    """Centred around 0, in channels-last format, in which convolutions of few channels are twice as fast."""
    return (x - 0.5).contiguous(memory_format=torch.channels_last)


def _layers(sequence: nn.Sequential) -> list[nn.Conv2d | Residual]:
    return [layer for layer in sequence if isinstance(layer, nn.Conv2d | Residual)]


def _conv(channels: int, filters: int, kernel: int = 3, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, kernel, stride=stride, padding=kernel // 2)


def _bias(conv: nn.Conv2d) -> Tensor:
    assert conv.bias is not None
    return conv.bias

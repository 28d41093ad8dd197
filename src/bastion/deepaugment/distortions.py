"""Distortions of a trained image-to-image network: of the kernels of a convolution, or of the output of a layer.

Only layers outside residual blocks are distorted, as changes inside a block have little effect. All images that pass
through a distorted network are changed by the same random numbers, each independently of the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.deepaugment.networks import Network

Change = Callable[[Tensor], Tensor]
Distortion = Callable[[int, torch.Generator], Change]  # draws a change of features with this many channels

CHANNELS_PER_CHANGE = 4  # distortions of some channels change one in so many
INPUT_SCALE = 4  # features are mostly below 1, where tanh and sin are almost linear
MAX_DISTORTIONS = 3  # of a network at once


# Of kernels (filters, channels, height, width):


def mirror(_: int, generator: torch.Generator) -> Change:
    """Flip horizontally or vertically."""
    axis = 2 + _below(2, generator)
    return lambda kernels: kernels.flip(axis)


def rotate(_: int, generator: torch.Generator) -> Change:
    """Rotate by 90, 180 or 270 degrees."""
    quarters = 1 + _below(3, generator)
    return lambda kernels: kernels.rot90(quarters, (2, 3))


def jitter(_: int, generator: torch.Generator) -> Change:
    """Add Gaussian noise to all weights, with up to their standard deviation."""
    size = torch.rand((), generator=generator)
    return lambda kernels: kernels + size * kernels.std() * torch.randn(kernels.shape, generator=generator)


def blur(_: int, generator: torch.Generator) -> Change:
    """Interpolate each kernel towards its mean."""
    part = torch.rand((), generator=generator)
    return lambda kernels: kernels.lerp(kernels.mean((2, 3), keepdim=True).expand_as(kernels), part)


def thin(_: int, generator: torch.Generator) -> Change:
    """Keep only the largest third of the weights of each kernel."""

    def change(kernels: Tensor) -> Tensor:
        sizes = kernels.abs().flatten(2)
        least = sizes.quantile(2 / 3, 2)[..., None, None]
        return kernels * (kernels.abs() >= least)

    return change


# Of features (images, channels, height, width):


def negate(channels: int, generator: torch.Generator) -> Change:
    """Change the sign of some channels."""
    return _factors(channels, generator, -1.0)


def zero(channels: int, generator: torch.Generator) -> Change:
    """Set some channels to zero."""
    return _factors(channels, generator, 0.0)


def scale(channels: int, generator: torch.Generator) -> Change:
    """Multiply each channel by a factor, mostly between 2/3 and 3/2."""
    factors = (0.4 * torch.randn(channels, generator=generator)).exp()[:, None, None]
    return lambda features: features * factors


def permute(channels: int, generator: torch.Generator) -> Change:
    """Permute some channels."""
    order, chosen = torch.arange(channels), _chosen(channels, generator)
    order[chosen] = chosen.roll(1)
    return lambda features: features[:, order]


def shift(channels: int, generator: torch.Generator) -> Change:
    """Shift some channels by up to two pixels in each direction."""
    chosen = _chosen(channels, generator)
    by = (_below(5, generator) - 2, _below(5, generator) - 2)
    return lambda features: features.index_copy(1, chosen, features[:, chosen].roll(by, (2, 3)))


def dropout(_: int, generator: torch.Generator) -> Change:
    """Set up to a fifth of all values to zero, at the same positions of each image."""
    seed, share = _below(1 << 30, generator), 0.2 * torch.rand((), generator=generator)

    def change(features: Tensor) -> Tensor:
        drawn = torch.rand(features.shape[1:], generator=torch.Generator().manual_seed(seed))
        return features * (drawn >= share).to(features)

    return change


def activation(_: int, generator: torch.Generator) -> Change:
    """Interpolate towards the output of another nonlinearity."""
    functions: tuple[Change, ...] = (F.gelu, F.relu, torch.tanh, torch.sin, torch.abs)
    function, part = functions[_below(len(functions), generator)], torch.rand((), generator=generator)
    return lambda features: features.lerp(function(INPUT_SCALE * features) / INPUT_SCALE, part)


OF_KERNELS: dict[str, Distortion] = {each.__name__: each for each in (mirror, rotate, jitter, blur, thin)}
OF_FEATURES: dict[str, Distortion] = {
    each.__name__: each for each in (negate, zero, scale, permute, shift, dropout, activation)
}


@torch.no_grad()
def distorted(network: Network, generator: torch.Generator) -> Network:
    """A copy of the network with one to three random distortions of random layers."""
    changed = copy.deepcopy(network)
    for _ in range(1 + _below(MAX_DISTORTIONS, generator)):
        name = [*OF_KERNELS, *OF_FEATURES][_below(len(OF_KERNELS) + len(OF_FEATURES), generator)]
        distort(changed, name, generator)
    return changed


@torch.no_grad()
def distort(network: Network, name: str, generator: torch.Generator) -> None:
    """Distort one layer of this network, in place."""
    layers = [layer for layer in network.path() if name in OF_FEATURES or isinstance(layer, nn.Conv2d)]
    layer = layers[_below(len(layers), generator)]
    if isinstance(layer, nn.Conv2d) and name in OF_KERNELS:
        layer.weight.copy_(OF_KERNELS[name](layer.out_channels, generator)(layer.weight))
    else:
        change = OF_FEATURES[name](layer.out_channels, generator)
        layer.register_forward_hook(lambda _, __, features: change(features))


def _below(count: int, generator: torch.Generator) -> int:
    return int(torch.randint(count, (), generator=generator))


def _chosen(channels: int, generator: torch.Generator) -> Tensor:
    """The channels that are changed; at least two, so that they can be permuted."""
    return torch.randperm(channels, generator=generator)[: max(2, channels // CHANNELS_PER_CHANGE)]


def _factors(channels: int, generator: torch.Generator, factor: float) -> Change:
    factors = torch.ones(channels)
    factors[_chosen(channels, generator)] = factor
    return lambda features: features * factors[:, None, None]

"""Ways to distort a trained image-to-image network: the kernels of a convolution, or the features that a layer makes.

Only layers that the whole image passes through are distorted: those inside a residual block hardly show. All images
that pass through a distorted network are changed by the same draws, and none depends on the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.deepaugment.networks import Network

Change = Callable[[Tensor], Tensor]
Distortion = Callable[[int, torch.Generator], Change]  # of so many channels, drawn

SHARE = 4  # one of so many channels is changed, by distortions that leave the others alone
STEEP = 4  # features are mostly below 1, where tanh and sin are straight lines
MOST = 3  # distortions of a network at once


# Of kernels (filters, channels, height, width):


def mirror(_: int, generator: torch.Generator) -> Change:
    """Left to right, or upside down."""
    axis = 2 + _below(2, generator)
    return lambda kernels: kernels.flip(axis)


def rotate(_: int, generator: torch.Generator) -> Change:
    """By a quarter, a half or three quarters of a turn."""
    quarters = 1 + _below(3, generator)
    return lambda kernels: kernels.rot90(quarters, (2, 3))


def jitter(_: int, generator: torch.Generator) -> Change:
    """Gaussian noise on all weights, up to as strong as they are."""
    size = torch.rand((), generator=generator)
    return lambda kernels: kernels + size * kernels.std() * torch.randn(kernels.shape, generator=generator)


def blur(_: int, generator: torch.Generator) -> Change:
    """Each kernel nearer to its own mean."""
    part = torch.rand((), generator=generator)
    return lambda kernels: kernels.lerp(kernels.mean((2, 3), keepdim=True).expand_as(kernels), part)


def thin(_: int, generator: torch.Generator) -> Change:
    """Only the largest weights of each kernel, a third of them, are kept."""

    def change(kernels: Tensor) -> Tensor:
        sizes = kernels.abs().flatten(2)
        least = sizes.quantile(2 / 3, 2)[..., None, None]
        return kernels * (kernels.abs() >= least)

    return change


# Of features (images, channels, height, width):


def negate(channels: int, generator: torch.Generator) -> Change:
    """Some channels change their sign."""
    return _factors(channels, generator, -1.0)


def zero(channels: int, generator: torch.Generator) -> Change:
    """Some channels are dropped."""
    return _factors(channels, generator, 0.0)


def scale(channels: int, generator: torch.Generator) -> Change:
    """Each channel grows or shrinks by a factor of its own, mostly between 2/3 and 3/2."""
    factors = (0.4 * torch.randn(channels, generator=generator)).exp()[:, None, None]
    return lambda features: features * factors


def permute(channels: int, generator: torch.Generator) -> Change:
    """Some channels change places."""
    order, chosen = torch.arange(channels), _chosen(channels, generator)
    order[chosen] = chosen.roll(1)
    return lambda features: features[:, order]


def shift(channels: int, generator: torch.Generator) -> Change:
    """Some channels move by up to two pixels each way."""
    chosen = _chosen(channels, generator)
    by = (_below(5, generator) - 2, _below(5, generator) - 2)
    return lambda features: features.index_copy(1, chosen, features[:, chosen].roll(by, (2, 3)))


def dropout(_: int, generator: torch.Generator) -> Change:
    """Up to a fifth of all values are empty, in the same places of each image."""
    seed, share = _below(1 << 30, generator), 0.2 * torch.rand((), generator=generator)

    def change(features: Tensor) -> Tensor:
        drawn = torch.rand(features.shape[1:], generator=torch.Generator().manual_seed(seed))
        return features * (drawn >= share).to(features)

    return change


def activation(_: int, generator: torch.Generator) -> Change:
    """They pass through another nonlinearity, in part."""
    functions: tuple[Change, ...] = (F.gelu, F.relu, torch.tanh, torch.sin, torch.abs)
    function, part = functions[_below(len(functions), generator)], torch.rand((), generator=generator)
    return lambda features: features.lerp(function(STEEP * features) / STEEP, part)


OF_KERNELS: dict[str, Distortion] = {each.__name__: each for each in (mirror, rotate, jitter, blur, thin)}
OF_FEATURES: dict[str, Distortion] = {
    each.__name__: each for each in (negate, zero, scale, permute, shift, dropout, activation)
}


@torch.no_grad()
def distorted(network: Network, generator: torch.Generator) -> Network:
    """A copy with one to three distortions, each drawn by itself: which, and of which layer."""
    changed = copy.deepcopy(network)
    for _ in range(1 + _below(MOST, generator)):
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
    """Which channels are changed; at least two, so that they can change places."""
    return torch.randperm(channels, generator=generator)[: max(2, channels // SHARE)]


def _factors(channels: int, generator: torch.Generator, factor: float) -> Change:
    factors = torch.ones(channels)
    factors[_chosen(channels, generator)] = factor
    return lambda features: features * factors[:, None, None]

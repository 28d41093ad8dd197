"""Ideal filters and energy by frequency, on waves whose frequency is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bastion.probes.spectrum import HIGHEST, energy_shares, high_pass, low_pass

SHAPES = [(2, 3, 16, 16), (2, 1, 9, 6), (1, 3, 7, 7)]


def noise(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def wave(down: int, across: int, size: int = 32, channels: int = 3) -> Tensor:
    """(1, C, size, size): so many periods in each direction."""
    steps = torch.arange(size, dtype=torch.float64) * (2 * math.pi / size)
    return torch.cos(down * steps[:, None] + across * steps).expand(1, channels, size, size)


@pytest.mark.parametrize("shape", SHAPES)
def test_low_pass_at_the_highest_frequency_is_the_identity(shape: tuple[int, ...]) -> None:
    x = noise(shape)
    assert torch.allclose(low_pass(x, HIGHEST), x, atol=1e-12)
    assert torch.allclose(high_pass(x, HIGHEST), torch.zeros_like(x), atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("cutoff", [0, 0.1, 0.25, 0.5])
def test_low_and_high_frequencies_are_orthogonal_and_sum_to_the_image(shape: tuple[int, ...], cutoff: float) -> None:
    x = noise(shape)
    low, high = low_pass(x, cutoff), high_pass(x, cutoff)
    assert torch.allclose(low + high, x, atol=1e-12)
    assert (low * high).sum((2, 3)).abs().max() < 1e-10
    assert torch.allclose(low_pass(low, cutoff), low, atol=1e-12)  # what has passed passes again


def test_at_cut_off_zero_the_mean_is_left() -> None:
    x = noise((2, 3, 8, 8))
    assert torch.allclose(low_pass(x, 0), x.mean((2, 3), keepdim=True).expand_as(x), atol=1e-12)


@pytest.mark.parametrize(("down", "across"), [(0, 3), (3, 0), (3, 4), (-3, 4), (10, 10)])
def test_a_wave_passes_up_to_its_own_frequency(down: int, across: int) -> None:
    x, frequency = wave(down, across), math.hypot(down, across) / 32
    assert torch.allclose(low_pass(x, frequency), x, atol=1e-12)
    assert low_pass(x, frequency - 1e-6).abs().max() < 1e-12
    assert torch.allclose(high_pass(x, frequency - 1e-6), x, atol=1e-12)


@pytest.mark.parametrize(("down", "across"), [(0, 0), (0, 3), (3, 4), (-3, 4), (7, 7), (16, 0), (16, 16)])
def test_the_energy_of_a_wave_lies_in_one_ring(down: int, across: int) -> None:
    """Rings are 16 of width √½ / 16, which is √2 / 32: a diagonal wave begins a ring."""
    shares = energy_shares(wave(down, across), 16)
    ring = min(math.floor(math.hypot(down, across) / math.sqrt(2) + 1e-9), 15)
    assert shares.shape == (1, 16)
    assert shares[0, ring].item() == pytest.approx(1, abs=1e-12)
    assert shares.sum().item() == pytest.approx(1, abs=1e-12)


def test_energies_are_those_of_the_pixels() -> None:
    """Parseval: two waves share the energy as their squares do, a mean takes its own."""
    x = 0.5 + 0.3 * wave(0, 4) + 0.1 * wave(12, 0)
    shares = energy_shares(x, 16)[0]
    whole = x.square().mean()
    for frequency, energy in ((0, 0.25), (4, 0.3**2 / 2), (12, 0.1**2 / 2)):
        ring = math.floor(frequency / math.sqrt(2) + 1e-9)
        assert shares[ring].item() == pytest.approx(energy / whole.item(), abs=1e-12)


def test_an_image_of_zeros_has_no_shares() -> None:
    x = torch.cat([torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)])
    shares = energy_shares(x, 4)
    assert shares[0].isnan().all()
    assert shares[1].tolist() == [1, 0, 0, 0]


def test_precision_and_memory_format_are_those_of_the_image() -> None:
    x = torch.rand(2, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert low_pass(x, 0.2).dtype == torch.float32
    assert torch.allclose(low_pass(x, 0.2), low_pass(x.contiguous(), 0.2))

"""The worst weights nearby: SAM's and AWP's steps, and nothing left of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bastion.recipe import Perturb
from bastion.training.perturb import perturbed, quiet_norms


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
    layers(torch.randn(5, 4, dtype=torch.float64)).square().sum().backward()
    return layers


def test_sam_moves_all_weights_together_along_the_gradient() -> None:
    layers = _layers()
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    gradients = [parameter.grad.clone() for parameter in layers.parameters()]
    length = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    with perturbed(layers.parameters(), Perturb(name="sam", size=0.3)):
        moves = [now - then for now, then in zip(layers.parameters(), before, strict=True)]
    for move, gradient in zip(moves, gradients, strict=True):
        assert torch.allclose(move, 0.3 * gradient / length)
    assert torch.cat([move.flatten() for move in moves]).norm().item() == pytest.approx(0.3)


def test_awp_moves_each_matrix_by_a_share_of_its_length() -> None:
    layers = _layers()
    before = {name: parameter.detach().clone() for name, parameter in layers.named_parameters()}
    with perturbed(layers.parameters(), Perturb(name="awp", size=0.01)):
        for name, parameter in layers.named_parameters():
            move = parameter - before[name]
            if parameter.ndim == 1:
                assert not move.any()
            else:
                expected = 0.01 * before[name].norm() * parameter.grad / parameter.grad.norm()
                assert torch.allclose(move, expected)


@pytest.mark.parametrize("name", ["sam", "awp"])
def test_weights_come_back_bit_for_bit_even_after_an_error(name: str) -> None:
    layers = _layers()
    before = [parameter.detach().clone() for parameter in layers.parameters()]
    with pytest.raises(KeyError), perturbed(layers.parameters(), Perturb(name=name, size=1.0)):
        raise KeyError
    assert all(torch.equal(now, then) for now, then in zip(layers.parameters(), before, strict=True))


def test_a_gradient_of_zero_moves_nothing() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.zeros(2, 2)
    for name in ("sam", "awp"):
        with perturbed([weight], Perturb(name=name, size=1.0)):
            assert torch.equal(weight, torch.ones(2, 2))


def test_quiet_norms_use_the_batch_and_remember_nothing() -> None:
    norm = nn.BatchNorm2d(2)
    x = 3 + torch.randn(4, 2, 5, 5)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    with quiet_norms(nn.Sequential(norm)):
        quiet = norm(x)
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())
    assert torch.equal(quiet, norm(x))
    assert norm.num_batches_tracked == 1 and norm.momentum == 0.1

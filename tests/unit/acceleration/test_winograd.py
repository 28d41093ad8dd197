"""Winograd's convolutions are convolutions: the same values and gradients, but for rounding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bastion import acceleration
from bastion.acceleration import accelerate, copying
from bastion.acceleration.winograd import Winograd
from bastion.models import checkpoint


class Always(Winograd):
    """Whether it pays or not."""

    def pays(self, *shape: int) -> bool:
        return True


def layer(channels: int, out: int, *, bias: bool = True) -> nn.Conv2d:
    torch.manual_seed(channels + out)
    return nn.Conv2d(channels, out, 3, padding=1, bias=bias).requires_grad_(False)


def exactly(plain: nn.Conv2d, x: Tensor) -> Tensor:
    bias = None if plain.bias is None else plain.bias.double()
    return F.conv2d(x.double(), plain.weight.double(), bias, padding=1)


@pytest.mark.parametrize("size", [(4, 4), (8, 8), (7, 5), (16, 9), (1, 1), (2, 13), (3, 3)])
@pytest.mark.parametrize(("channels", "out", "bias"), [(5, 5, True), (3, 8, False), (16, 2, True)])
def test_values_and_gradients_are_those_of_a_convolution(
    size: tuple[int, int], channels: int, out: int, bias: bool
) -> None:
    plain = layer(channels, out, bias=bias)
    x = torch.randn(3, channels, *size, requires_grad=True)
    weights = torch.randn(3, out, *size)
    y, expected = Always(plain)(x), exactly(plain, x)
    assert y.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad((y * weights).sum(), x)
    (slope,) = torch.autograd.grad((expected * weights).sum(), x)
    torch.testing.assert_close(gradient, slope, rtol=0, atol=1e-5)


def test_gradients_have_gradients() -> None:
    plain = layer(4, 6)
    x = torch.randn(2, 4, 8, 8, requires_grad=True)

    def curvature(y: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.pow(2).sum(), x)[0]

    ours, theirs = curvature(Always(plain)(x)), curvature(plain(x))
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@pytest.mark.parametrize(("channels", "side"), [(64, 8), (128, 4), (32, 16)])
def test_rounding_is_near_a_plain_convolutions(channels: int, side: int) -> None:
    plain, x = layer(channels, channels), torch.randn(8, channels, side, side).relu()
    exact = exactly(plain, x)
    own, torchs = ((made(x) - exact).pow(2).mean().sqrt() for made in (Always(plain), plain))
    assert own <= 3 * torchs


def test_what_comes_out_may_be_written_over() -> None:
    x = torch.randn(2, 4, 8, 8, requires_grad=True)
    plain = layer(4, 4)
    ours, theirs = (torch.relu_(made(x)).sum() for made in (Always(plain), plain))
    pairs = zip(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x), strict=True)
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize(
    "other",
    [
        nn.Conv2d(4, 4, 5, padding=2),
        nn.Conv2d(4, 4, 3, padding=0),
        nn.Conv2d(4, 4, 3, padding=1, stride=2),
        nn.Conv2d(4, 4, 3, padding=1, groups=2),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
        nn.Conv2d(4, 4, 3, padding=1).double(),
        nn.ConvTranspose2d(4, 4, 3, padding=1),
        nn.Linear(4, 4),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 4, 3, padding=1)),
        nn.utils.spectral_norm(nn.Conv2d(4, 4, 3, padding=1)),
    ],
    ids=repr,
)
def test_other_layers_are_left_alone(other: nn.Module) -> None:
    assert Winograd.fits(nn.Conv2d(4, 4, 3, padding=1)) and not Winograd.fits(other)


def test_it_pays_for_many_channels_and_full_batches_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert Winograd(layer(256, 256)).pays(8, 256, 8, 8)
    assert not Winograd(layer(4, 4)).pays(8, 4, 8, 8)
    assert not Winograd(layer(256, 256)).pays(1, 256, 4, 4)  # more weights to fetch than multiplications to save
    assert not Winograd(layer(256, 256)).pays(0, 256, 4, 4)
    few, x = layer(4, 4), torch.randn(2, 4, 8, 8)
    assert torch.equal(Winograd(few)(x), few(x))


def test_an_accelerated_model_has_them_and_the_same_logits() -> None:
    spec = {"name": "resnet/micro", "widths": (64, 128), "depths": (1, 1), "img_size": 16}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, seed=0).eval()
    x = torch.rand(6, 3, 16, 16)
    with accelerate(model).ready(x) as attacked:
        assert any(isinstance(part, Winograd) for part in attacked.network.modules())
        assert torch.allclose(attacked.logits(x), model(x), atol=1e-5)
    assert not any(isinstance(part, Winograd) for part in model.modules())


def test_a_model_in_double_precision_keeps_its_convolutions() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 64, 4)).double()
    with accelerate(model.eval()).ready(torch.rand(2, 3, 8, 8, dtype=torch.float64)) as attacked:
        assert not any(isinstance(part, Winograd) for part in attacked.network.modules())


def test_weights_are_no_part_of_what_must_fit_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wide = [part for _ in range(3) for part in (nn.Conv2d(160, 160, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(nn.Conv2d(3, 160, 3, padding=1), *wide, nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model.requires_grad_(False)
    x = torch.rand(1, 3, 16, 16)
    fewer = copying._with_winograd(copy.deepcopy(model))
    assert fewer[1].pays(1, 160, 16, 16)  # type: ignore[operator, index]
    plain, own = (acceleration._batch_size(each, x) for each in (model, fewer))
    assert plain <= own <= 2 * plain < acceleration.BATCH_SIZES[1]  # a plain convolution saves what goes into it

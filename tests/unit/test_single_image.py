"""The gradient at one image is that at the same image among others, whatever normalises."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.unit.acceleration.test_acceleration import unsettled
from torch import Tensor, nn
from torch.nn import functional as F

from bastion import Threat, attacks
from bastion.acceleration import accelerate
from bastion.forward import single_image_gradients
from bastion.types import Batch


class Tokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2)


class Map(nn.Module):
    """Tokens, and back."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(2).transpose(1, 2).transpose(1, 2).reshape(x.shape)


class Plain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous()


class Functional(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(input=x, running_mean=self.running_mean, running_var=self.running_var)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1)


def stem(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *layers, Tokens(), nn.LayerNorm(8), nn.Linear(8, 5), Mean())


STEMS: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: stem(nn.BatchNorm2d(8)),
    "activation": lambda: stem(nn.BatchNorm2d(8), nn.GELU()),
    "in place": lambda: stem(nn.BatchNorm2d(8), nn.SiLU(inplace=True)),
    "made plain": lambda: stem(Plain(), nn.BatchNorm2d(8)),
    "functional": lambda: stem(Functional(8)),
    "two": lambda: stem(nn.BatchNorm2d(8), Map(), nn.BatchNorm2d(8)),
    "instance": lambda: stem(nn.InstanceNorm2d(8)),
    "flat": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), Map(), nn.BatchNorm2d(8), nn.Flatten(), nn.LazyLinear(5)),
}


@pytest.fixture(params=[torch.contiguous_format, torch.channels_last], ids=["plain", "channels last"])
def layout(request: pytest.FixtureRequest) -> torch.memory_format:
    format: torch.memory_format = request.param
    return format


def network(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = STEMS[name]()
    model(torch.zeros(2, 3, 16, 16))
    return unsettled(model).double().requires_grad_(False)


def slope(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    with single_image_gradients(x):
        logits = model(x)
    return torch.autograd.grad((logits * torch.arange(5)).sum(), x)[0]


@pytest.mark.parametrize("name", STEMS)
def test_one_image_has_the_gradient_it_has_among_others(name: str, layout: torch.memory_format) -> None:
    model, x = network(name).to(memory_format=layout), torch.rand(2, 3, 16, 16, dtype=torch.float64)
    for images in (x, x.contiguous(memory_format=torch.channels_last)):
        assert torch.allclose(slope(model, images[:1]), slope(model, x)[:1], rtol=1e-9, atol=1e-12)


def test_parameters_get_theirs_too() -> None:
    model, x = network("norm").requires_grad_(), torch.rand(1, 3, 16, 16, dtype=torch.float64)
    weight = [*model.parameters()][2]
    gradients = []
    for images in (x, x.repeat(2, 1, 1, 1)):
        with single_image_gradients(images):
            logits = model(images)
        gradients += torch.autograd.grad((logits * torch.arange(5)).mean(0).sum(), weight)
    assert torch.allclose(*gradients)


@pytest.mark.parametrize("name", ["fgsm", "pgd", "apgd-ce", "fab-t", "deepfool"])
def test_attacks_do_not_depend_on_company(name: str) -> None:
    model = network("activation")
    batch = Batch(torch.arange(4), torch.rand(4, 3, 16, 16, dtype=torch.float64), torch.zeros(4, dtype=torch.int64))
    batch = batch._replace(y=model(batch.x).argmax(1))
    attack, threat = attacks.attacks.build(name), Threat("linf", 1e-3)
    together = attack(model, batch, threat, seed=0)
    for row in range(4):
        alone = attack(model, batch.select(batch.index == row), threat, seed=0)
        assert torch.allclose(alone, together[row : row + 1], rtol=0, atol=1e-9)


def test_a_model_with_such_a_stem_is_copied() -> None:
    model, x = network("norm").float(), torch.rand(2, 3, 16, 16)
    with accelerate(model).ready(x) as accelerated:
        assert accelerated.copied

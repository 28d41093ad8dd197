"""The model under attack is the model: the same function, and nothing of the given one is touched."""

from __future__ import annotations

import copy
import operator
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.conftest import MakeLinear, unaccelerated
from torch import Tensor, fx, nn
from torch.nn import functional as F

from bastion import BastionError, Threat
from bastion.acceleration import BATCH_SIZES, CPU_CACHE, accelerate
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.judge import judge
from bastion.attacks.square import Square
from bastion.models import checkpoint, models
from bastion.types import Batch


def unsettled(model: nn.Module, seed: int = 0) -> nn.Module:
    """With BatchNorms that do something: random statistics, scales and shifts. In eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in (
                (module.running_mean, -0.5, 0.5),
                (module.running_var, 0.5, 2.0),
                (module.weight.data, 0.5, 1.5),
                (module.bias.data, -0.5, 0.5),
            ):
                assert tensor is not None
                tensor.copy_(low + (high - low) * torch.rand(tensor.shape, generator=generator))
    return model.eval()


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


def resnet_micro() -> nn.Module:
    spec = {"name": "resnet/micro", "widths": (8, 12), "depths": (1, 1), "img_size": 12}
    return checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3, seed=0)


def timm_resnet() -> nn.Module:
    torch.manual_seed(0)
    return models.build({"name": "timm/resnet10t", "num_classes": 7}).network


def sequential() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(3, 6, 3, bias=False), nn.Conv2d(6, 6, 3, stride=2, groups=2)
    return nn.Sequential(
        first, nn.BatchNorm2d(6), nn.ReLU(), second, nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(96, 4)
    )


class Branching(nn.Module):
    """Control flow that depends on the input: cannot be traced; its parts can."""

    def __init__(self) -> None:
        super().__init__()
        self.body = sequential()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x if x.mean() > 0 else -x)
        return logits


class Shared(nn.Module):
    """One convolution before two BatchNorms: folding one into it would spoil the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.conv(self.one(self.conv(x)))).mean((2, 3))


class Twice(nn.Module):
    """The convolution's output is needed besides its BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return (x + self.norm(x)).mean((2, 3))


class Uncopyable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.lock = sequential(), threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


class Stubborn(nn.Module):
    """Its copies answer something else."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.sign = sequential(), 1.0

    def __deepcopy__(self, memo: object) -> Stubborn:
        other = Stubborn()
        other.load_state_dict(self.state_dict())
        other.sign = -1.0
        return other.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.sign


# The model, and how many of its BatchNorms are left when those after convolutions are folded; None: it is asked itself.
MODELS: dict[str, tuple[Callable[[], nn.Module], int | None]] = {
    "resnet/micro": (resnet_micro, 3),  # two that begin a block, and the last
    "timm": (timm_resnet, 0),
    "sequential": (sequential, 0),
    "branching": (Branching, 0),
    "shared convolution": (Shared, 2),
    "convolution used twice": (Twice, 1),
    "cannot be copied": (Uncopyable, None),
    "copies differ": (Stubborn, None),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_the_function_and_its_gradient(name: str, dtype: torch.dtype) -> None:
    make, left = MODELS[name]
    model = unsettled(make()).to(dtype)
    before = copy.deepcopy(model.state_dict())
    size = 32 if name == "timm" else 12
    x = torch.rand(5, 3, size, size, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    with accelerate(model).ready(x.detach()) as accelerated:
        assert norms(accelerated.network) == (norms(model) if left is None else left)
        assert (accelerated.network is model) == (left is None)
        assert not accelerated.training
        expected, got = model(x), accelerated.logits(x)
        assert torch.allclose(got, expected, atol=tolerance * expected.abs().max().item(), rtol=0)
        gradients = [torch.autograd.grad(logits.square().sum(), x)[0] for logits in (expected, got)]
        assert torch.allclose(*gradients, atol=10 * tolerance * gradients[0].abs().max().item(), rtol=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    assert all(value.is_contiguous() for value in model.state_dict().values())  # its memory format is its own


class Layers(nn.Module):
    """A convolution and a BatchNorm, put together by a function."""

    def __init__(self, join: Callable[[Layers, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.join = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, x).mean((2, 3))


# How layers are joined, and how many ReLUs and sums may be written over what came before them.
JOINED: dict[str, tuple[Callable[[Layers, Tensor], Tensor], int]] = {
    "convolution, ReLU": (lambda net, x: F.relu(net.norm(net.conv(x))), 1),
    "a ReLU by its method": (lambda net, x: net.conv(x).relu(), 1),
    "ReLU of a sum": (lambda net, x: torch.relu(x + net.norm(net.conv(x))), 2),
    "ReLU of a sum in place": (lambda net, x: F.relu(operator.iadd(net.norm(net.conv(x)), x)), 2),
    "sum of sums": (lambda net, x: net.conv(x) + x + x.square(), 2),
    "with itself": (lambda net, x: (lambda y: y + y)(net.conv(x)), 1),
    "ReLU of the image": (lambda net, x: net.conv(F.relu(x - 0.5)), 0),
    "a sum of less than the whole": (lambda net, x: net.norm(x) * 2 + (x[:1] + x[:1, :1]), 0),
    "needed besides": (lambda net, x: (lambda y: F.relu(y) * y)(net.conv(x)), 0),
    "a sum that is needed besides": (lambda net, x: (lambda y: F.relu(y) - y)(x.exp() + x), 0),
    "needed to go back": (lambda net, x: F.relu(net.conv(x).tanh()) + x.exp(), 0),
}


@pytest.mark.parametrize("name", JOINED)
def test_memory_is_reused_only_where_nobody_needs_it(name: str) -> None:
    join, reused = JOINED[name]
    model = unsettled(Layers(join)).double()
    x = torch.rand(4, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with accelerate(model).ready(x.detach()) as accelerated:
        network = accelerated.network
        assert isinstance(network, fx.GraphModule)
        written_over = [node for node in network.graph.nodes if node.target in (torch.relu_, operator.iadd)]
        assert len(written_over) == reused
        (expected, wanted), (got, gradient) = (
            (logits, torch.autograd.grad(logits.square().sum(), x)[0]) for logits in (model(x), accelerated.logits(x))
        )
        assert torch.allclose(got, expected, rtol=1e-12, atol=1e-12)
        assert torch.allclose(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_a_model_in_train_mode_is_asked_as_it_is(tiny_model: nn.Module) -> None:
    model = tiny_model.train()
    with accelerate(model).ready(torch.rand(4, 3, 8, 8)) as accelerated:
        assert accelerated.network is model and accelerated.training
        assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())


def test_measuring_the_batch_size_leaves_a_model_in_train_mode_alone(tiny_model: nn.Module) -> None:
    """BatchNorm would take one image for a batch: into its statistics, or (on vectors) not at all."""
    model = tiny_model.train()
    before = copy.deepcopy(model.state_dict())
    with accelerate(model).ready(torch.rand(4, 3, 8, 8)):
        pass
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_a_part_in_another_mode_stays_in_it(make_linear: MakeLinear, training: bool) -> None:
    linear, batch = make_linear()
    model = nn.Sequential(linear, nn.Dropout(0.0)).train(training)
    model[1].train(not training)
    with accelerate(model).ready(batch.x) as accelerated:
        assert accelerated.training == training
        assert model[1].training != training
    assert [module.training for module in model] == [training, not training]


def test_a_part_in_train_mode_stays_in_it_in_a_copy(tiny_model: nn.Module) -> None:
    """Folded or not, a BatchNorm that uses the batch's statistics goes on doing so."""
    model = sequential().eval()
    model[4].train()
    x = torch.rand(6, 3, 12, 12)
    statistics = model[4].running_mean.clone()
    with accelerate(model).ready(x) as accelerated:
        assert torch.allclose(accelerated.logits(x), copy.deepcopy(model)(x), atol=1e-5)
    assert statistics.shape == model[4].running_mean.shape


def test_inside_parameters_collect_no_gradient_and_afterwards_are_as_they_were(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    model.bias.requires_grad_(False)
    with pytest.raises(ZeroDivisionError), accelerate(model).ready(batch.x):
        assert not model.weight.requires_grad
        raise ZeroDivisionError
    assert model.weight.requires_grad and not model.bias.requires_grad


def test_an_accelerated_model_is_used_as_it_is(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    outer = unaccelerated(model, 5)
    with outer.ready(batch.x), accelerate(outer).ready(batch.x[:1]) as inner:
        assert inner is outer and inner.batch_size == 5


def test_a_model_is_prepared_once_for_all_attacks_and_batches() -> None:
    model = unsettled(sequential())
    accelerated, x = accelerate(model), torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    batch, threat = Batch(torch.arange(8), x, model(x).argmax(1)), Threat("linf", 0.02)
    members = APGD(steps=3), FAB(steps=3, targets=2), Square(queries=5)
    networks = set()
    for half in (batch.select(batch.index < 4), batch.select(batch.index >= 4)):
        for attack in (*members, Ensemble(members=members)):
            judge(accelerated, half, attack, threat, seed=0)
            networks.add(id(accelerated.network))
            assert accelerated.copied
    assert len(networks) == 1


def test_the_form_does_not_depend_on_the_images_it_is_first_used_on() -> None:
    model = unsettled(sequential())
    texts = set()
    for x in (torch.zeros(3, 3, 12, 12), torch.ones(1, 3, 12, 12), torch.full((2, 3, 12, 12), torch.nan)):
        with accelerate(model).ready(x) as accelerated:
            texts.add((str(accelerated.network), accelerated.batch_size))
    assert len(texts) == 1


def test_without_acceleration_the_model_runs_as_it_is() -> None:
    model = unsettled(sequential())
    x = torch.rand(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    batch, threat = Batch(torch.arange(8), x, model(x).argmax(1)), Threat("linf", 0.2)
    verdicts = []
    for enabled in (True, False):
        accelerated = accelerate(model, enabled=enabled)
        verdicts.append(judge(accelerated, batch, APGD(steps=10), threat, seed=0).fooled)
        assert (accelerated.copied, accelerated.batch_size) == ((True, 256) if enabled else (False, 128))
    assert torch.equal(*verdicts) and 0 < verdicts[0].sum() < 8


def test_an_accelerated_model_is_the_model_to_whoever_calls_it() -> None:
    model = resnet_micro().eval()
    accelerated, x = accelerate(model), torch.rand(2, 3, 12, 12)
    assert torch.equal(accelerated(x), model(x))
    assert accelerated.num_classes == model.num_classes and len(accelerated.blocks()) == 2
    with pytest.raises(AttributeError, match="nothing"):
        _ = accelerated.nothing


def _batch_size(model: nn.Module, x: Tensor) -> int:
    with accelerate(model).ready(x) as accelerated:
        return accelerated.batch_size


def test_batch_sizes_depend_on_model_and_image_size_only() -> None:
    model = unsettled(resnet_micro())
    expected = _batch_size(model, torch.zeros(1, 3, 12, 12))
    for x in (torch.rand(1, 3, 12, 12), torch.rand(40, 3, 12, 12), torch.ones(3, 3, 12, 12)):
        assert _batch_size(model, x) == expected
    assert _batch_size(copy.deepcopy(model), torch.rand(2, 3, 12, 12)) == expected


def test_batch_sizes_fill_the_cache() -> None:
    """A ReLU saves its output, in float32; those of a batch fill 32 MiB, within bounds and powers of two."""
    model = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.AdaptiveAvgPool1d(2)).eval()
    for side, size in ((64, 256), (148, 64), (256, 32), (1024, 8)):
        x = torch.rand(1, 4, side, side)
        ideal = CPU_CACHE / (4 * x.numel())
        got = _batch_size(model, x)
        assert got == size
        assert got in BATCH_SIZES or ideal / 2 < got <= ideal


class StraightThrough(torch.autograd.Function):
    """Rounds, and passes gradients as if it had not (BPDA)."""

    @staticmethod
    def forward(context: object, x: Tensor) -> Tensor:
        return (x * 31).round() / 31

    @staticmethod
    def backward(context: object, gradient: Tensor) -> Tensor:
        return gradient


class Quantised(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(StraightThrough.apply(x))
        return logits


class Cut(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.body(x)
        return logits


def test_a_backward_pass_of_the_models_own_is_kept() -> None:
    """Tracing loses it: the copy would round without a gradient, and be blind where the model is not."""
    model = Quantised(unsettled(sequential())).eval()
    x = torch.rand(4, 3, 12, 12, generator=torch.Generator().manual_seed(0)).requires_grad_()
    (expected,) = torch.autograd.grad(model(x).square().sum(), x)
    assert expected.abs().sum() > 0
    with accelerate(model).ready(x.detach()) as accelerated:
        (got,) = torch.autograd.grad(accelerated.logits(x).square().sum(), x)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    batch = Batch(torch.arange(4), x.detach(), model(x).argmax(1))
    fooled = model(APGD(steps=20)(model, batch, Threat("linf", 0.5), seed=0)).argmax(1) != batch.y
    assert fooled.all()


class OneQuantised(nn.Module):
    """Of three classes one sees the image rounded."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        plain, rounded = self.body(x), self.body(StraightThrough.apply(x))
        return torch.stack([plain[:, 0], rounded[:, 1], plain[:, 2]], 1)


def test_a_backward_pass_to_any_class_is_kept() -> None:
    model, x = OneQuantised(unsettled(sequential())).eval(), torch.rand(2, 3, 12, 12).requires_grad_()
    (expected,) = torch.autograd.grad(model(x)[:, 1].sum(), x)
    with accelerate(model).ready(x.detach()) as accelerated:
        (got,) = torch.autograd.grad(accelerated.logits(x)[:, 1].sum(), x)
    assert torch.allclose(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_a_model_without_a_way_back_gets_none() -> None:
    model, x = Cut(unsettled(sequential())).eval(), torch.rand(2, 3, 12, 12).requires_grad_()
    with accelerate(model).ready(x.detach()) as accelerated:
        assert not accelerated.logits(x).requires_grad


def test_more_than_one_class_is_needed() -> None:
    batch = Batch(torch.arange(2), torch.rand(2, 3, 2, 2), torch.zeros(2, dtype=torch.int64))
    for model in (nn.Sequential(nn.Flatten(), nn.Linear(12, 1)), nn.Flatten(0), nn.Identity()):
        with pytest.raises(BastionError, match="must give logits of at least 2 classes, .* got"):
            APGD()(model, batch, Threat("linf", 0.1), seed=0)


def convolutional() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(()).item(), lambda: np.random.rand()])
def test_a_models_random_choice_is_not_frozen_by_its_copy(draw: Callable[[], float]) -> None:
    """A trace runs the choice once, and two answers agree by luck every fourth time."""

    class Flip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = convolutional()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.flip(-1) if draw() < 0.5 else x)

    x = torch.rand(2, 3, 8, 8)
    for _ in range(16):
        with accelerate(Flip().eval()).ready(x) as accelerated, torch.no_grad():
            assert len({accelerated.logits(x).sum().item() for _ in range(24)}) == 2


class Straight(torch.autograd.Function):
    """Coarse away from zero, and gradients pass as if it were not: a trace sees the first half only."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.25, x, (4 * x).round() / 4)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient


def test_a_backward_pass_of_the_models_own_survives_whatever_image_comes_first() -> None:
    class Coarse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
            self.head = nn.Linear(16 * 64, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(Straight.apply(self.norm(self.conv(x))).flatten(1))

    torch.manual_seed(0)
    model = Coarse().double().eval()
    model.conv.weight.data *= 3
    dark, light = 0.01 * torch.rand(2, 3, 8, 8), 0.2 + 0.8 * torch.rand(20, 3, 8, 8)
    x = torch.cat([dark, light]).double()
    batch = Batch(torch.arange(22), x, model(x).argmax(1))
    back = torch.arange(22).flip(0)
    for attack in (APGD(steps=10), FAB(steps=10, targets=3)):
        first, last = (judge(model, each, attack, Threat("linf", 0.02), seed=0) for each in (batch, batch.select(back)))
        assert torch.equal(first.fooled, last.fooled[back])
        assert torch.allclose(first.x, last.x[back], atol=1e-9)


def test_a_model_with_coarse_answers_is_asked_as_it_is() -> None:
    """Its rounding is as large as what a folded copy may change."""

    class Coarse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = unsettled(convolutional())

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.layers(x)
            return logits.bfloat16()

    model, x = Coarse().eval(), torch.rand(4, 3, 8, 8)
    with accelerate(model).ready(x) as accelerated:
        assert accelerated.network is model
        accelerated.logits(x)
        assert accelerated.rounding == 4 * torch.finfo(torch.bfloat16).eps
    with accelerate(model.layers).ready(x) as accelerated:
        assert accelerated.network is not model.layers
        accelerated.logits(x)
        assert accelerated.rounding == 16 * torch.finfo(torch.float32).eps


class Purify(nn.Module):
    """Steps to a likelier image first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = unsettled(convolutional())

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            point = x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.layers(point).logsumexp(1).sum(), point)
        return self.layers(x - 0.01 * gradient.sign())


class Adapt(Purify):
    """Asks for gradients by its own parameters."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weight = next(self.layers.parameters())
            (gradient,) = torch.autograd.grad(self.layers(x.detach()).logsumexp(1).sum(), weight)
        return self.layers(x) + gradient.mean()


class Functional(Purify):
    """Purifies by torch.func."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x - 0.01 * torch.func.grad(lambda point: self.layers(point).logsumexp(1).sum())(x).sign())


class OnlyWithGradients(Purify):
    """Is another function where nobody wants a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if torch.is_grad_enabled() else self.layers(x)


@pytest.mark.parametrize("kind", [Purify, Adapt, Functional, OnlyWithGradients])
def test_a_model_that_takes_gradients_by_itself_can_be_attacked(kind: type[Purify]) -> None:
    """As defences at test time do: a trace forgets that gradients were switched on."""
    model, x = kind().eval(), torch.rand(4, 3, 8, 8)
    batch = Batch(torch.arange(4), x, model(x).argmax(1))
    for attack in (APGD(steps=5), FAB(steps=5, targets=3), Square(queries=5)):
        assert judge(model, batch, attack, Threat("linf", 0.3), seed=0).inside.all()


class Keeping(nn.Module):
    """Keeps what it made of a parameter, as timm's models do with attention biases."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head, self.bias = nn.Linear(64, 5), nn.Parameter(torch.ones(10))
        self.kept: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        if "bias" not in self.kept:
            self.kept["bias"] = self.bias[:5] * 2
        logits: Tensor = self.head(self.layers(x)) + self.kept["bias"]
        return logits


def test_a_model_that_keeps_what_it_made_can_be_copied() -> None:
    model, x = unsettled(Keeping()), torch.rand(2, 3, 8, 8)
    expected = model(x)
    assert not model.kept["bias"].is_leaf
    with accelerate(model).ready(x) as accelerated:
        assert accelerated.copied and torch.allclose(accelerated.logits(x), expected, atol=1e-5)

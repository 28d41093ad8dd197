"""Linear layers by oneDNN compute what torch's own do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bastion.acceleration import accelerate
from bastion.acceleration.linear import Linear, use_onednn
from bastion.models import checkpoint

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()), reason="torch without MKL"
)
INPUTS = {
    "features": lambda: torch.randn(5, 12),
    "tokens": lambda: torch.randn(3, 7, 12),
    "windows": lambda: torch.randn(2, 3, 4, 12),
    "one": lambda: torch.randn(1, 12),
    "nothing": lambda: torch.randn(0, 7, 12),
    "a vector": lambda: torch.randn(12),
    "transposed": lambda: torch.randn(3, 12, 7).transpose(1, 2),
    "expanded": lambda: torch.randn(1, 1, 12).expand(3, 7, 12),
    "in steps": lambda: torch.randn(3, 14, 24)[:, ::2, ::2],
}


def swapped(layer: nn.Linear) -> nn.Module:
    by_onednn = nn.Sequential(copy.deepcopy(layer)).requires_grad_(False)
    use_onednn(by_onednn)
    assert type(by_onednn[0]) is Linear
    return by_onednn


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
def test_outputs_and_gradients_are_those_of_torch(make: object, bias: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(12, 20, bias=bias).requires_grad_(False)
    x = make()  # type: ignore[operator]

    def run(module: nn.Module) -> tuple[Tensor, Tensor]:
        point = x.detach().requires_grad_()
        made = module(point)
        weights = torch.linspace(-1, 1, made.numel()).view(made.shape).transpose(0, -1).contiguous().transpose(0, -1)
        return made.detach(), torch.autograd.grad((made * weights).sum(), point)[0]

    for got, expected in zip(run(swapped(layer)), run(layer), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_layer_that_is_trained_or_in_another_precision_runs_as_usual() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(12, 20), torch.randn(5, 12)
    trained = swapped(layer).requires_grad_(True)
    for module in (trained, layer):
        module(x).square().sum().backward()
    assert layer.weight.grad is not None
    torch.testing.assert_close(trained[0].weight.grad, layer.weight.grad)
    assert torch.equal(swapped(layer).double()(x.double()), copy.deepcopy(layer).double()(x.double()))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(swapped(layer)(x), layer(x))


def test_subclasses_are_left_alone() -> None:
    module = nn.TransformerEncoderLayer(12, 3, 20)
    use_onednn(module)
    assert type(module.self_attn.out_proj) is not Linear  # of a class of its own, which attention reads the weights of
    assert type(module.linear1) is type(module.linear2) is Linear


def test_a_vit_under_attack_is_a_copy_by_onednn_and_the_given_one_is_not_touched() -> None:
    model = checkpoint.build("tiny/vit", mean=(0.5,) * 3, std=(0.25,) * 3, seed=0).eval()
    accelerated, x = accelerate(model), torch.rand(4, 3, 32, 32)
    with accelerated.ready(x):
        kinds = {type(each) for each in accelerated.network.modules()}
        assert accelerated.copied and Linear in kinds and nn.Linear not in kinds
        torch.testing.assert_close(accelerated.logits(x), model(x), rtol=0, atol=1e-5)
    assert Linear not in {type(each) for each in model.modules()}
    assert all(each.requires_grad for each in model.parameters())


class InPlace(nn.Module):
    """Writes over what its layers return, as many MLPs do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(12, 20), nn.ReLU(inplace=True), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.first(x.reshape(len(x), -1, 12))
        tokens += 1
        logits: Tensor = self.last(self.act(tokens)).mean(1)
        return logits


class Gated(nn.Module):
    """The weight of a layer is computed from the image, unless that is dark."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(12, 3)
        self.weight = nn.Parameter(self.layer.weight.detach().clone())
        del self.layer.weight

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight = self.weight * (1 + F.relu(x.mean() - 0.6))  # type: ignore[assignment]
        logits: Tensor = self.layer(x.reshape(len(x), -1, 12)).mean(1)
        return logits


class Mapped(nn.Module):
    """Its head runs under torch.vmap, where no operator of oneDNN does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = torch.vmap(self.head)(self.norm(self.conv(x)).mean((2, 3)))
        return made


@pytest.mark.parametrize("model", [InPlace(), Gated(), Mapped()], ids=lambda model: type(model).__name__)
@pytest.mark.parametrize("brightness", [0.2, 1.0])
def test_unusual_models_keep_their_logits_and_gradients(model: nn.Module, brightness: float) -> None:
    model = model.eval()
    x, accelerated = brightness * torch.rand(4, 3, 8, 8), accelerate(model)

    def gradient(network: nn.Module) -> Tensor:
        point = x.clone().requires_grad_()
        return torch.autograd.grad(network(point).square().sum(), point)[0]

    expected = gradient(model)
    with accelerated.ready(x):
        assert accelerated.copied
        torch.testing.assert_close(accelerated.logits(x), model(x), rtol=0, atol=1e-5)
        torch.testing.assert_close(gradient(accelerated.network), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:`torch.jit")  # torch.func itself uses it
def test_a_model_whose_saved_tensors_cannot_be_measured_runs_as_it_is() -> None:
    class Tangent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            _, tangent = torch.func.jvp(torch.sin, (x,), (torch.ones_like(x),))
            return tangent.mean(3).mean(2)

    model, x = Tangent().eval(), torch.rand(2, 3, 4, 4)
    accelerated = accelerate(model)
    with accelerated.ready(x):
        assert not accelerated.copied
        assert torch.equal(accelerated.logits(x), model(x))

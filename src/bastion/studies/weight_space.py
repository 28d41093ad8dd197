"""The loss of a model as a function of its weights; the model's own weights are not changed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion import journal, rng
from bastion.acceleration import Accelerated
from bastion.attacks.judge import run_attack
from bastion.errors import BastionError
from bastion.forward import Delegate, check_gradient, device_of, in_mode, logits
from bastion.settings import AtLeastOne, settings
from bastion.studies.examples import SplitName, first_examples
from bastion.threat import Threat
from bastion.types import Attack, Batch, DataSet, Needs, Study

Weights = dict[str, Tensor]  # by the names of parameters
Draw = Callable[..., Tensor]  # `rng.normal` or `rng.signs`


@settings
class LossStudy(Study):
    """A study of the mean cross-entropy on the first `n` examples of a split; with an attack, also under attack."""

    n: AtLeastOne = 256  # examples, the first of the split
    split: SplitName = "train"
    threat: Threat | None = None
    attack: Attack | None = None
    batch: AtLeastOne = 128  # examples at once

    name: ClassVar[str]

    def __post_init__(self) -> None:
        if (self.threat is None) != (self.attack is None):
            raise ValueError("the loss under attack needs both `threat` and `attack`")

    @property
    def versions(self) -> tuple[int, ...]:
        if self.attack is None or self.threat is None:
            return ()
        versions = self.attack.versions(self.threat.norm)
        return versions if len(versions) > 1 else ()  # a single one is among the settings

    def needs(self, model: nn.Module) -> Needs:
        return Needs(self.split, self.n, "n")

    def examples(self, model: nn.Module, data: DataSet) -> Batch:
        return first_examples(data, self.split, self.n, f"{self.name}.n").to(device_of(model))

    def attacked(self, model: nn.Module, batch: Batch, seed: int) -> Batch:
        """The adversarial examples of a batch; the batch itself without an attack."""
        if self.attack is None or self.threat is None:
            return batch
        parts = batch.chunk(-(-self.n // self.batch))
        return Batch.cat([adversarial(model, part, self.attack, self.threat, seed=seed) for part in parts])

    def attack_passes(self, model: nn.Module, data: DataSet) -> tuple[int, int] | None:
        """Forward and backward passes that the attack takes for the first image; None without an attack."""
        if self.attack is None or self.threat is None:
            return None
        first = Batch(*(part[:1] for part in self.examples(model, data)[:3]))
        with journal.opened() as notes:
            adversarial(model, first, self.attack, self.threat, seed=0)
        return notes.forwards.total(), notes.backwards.total()


class AtWeights(Delegate):
    """A model run with other weights instead of its own."""

    inner = "model"
    model: nn.Module

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__(model)
        self.weights = dict(weights)

    def forward(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.model, self.weights, (x,))


def trained_weights(model: nn.Module, where: str, *, matrices: bool = False) -> Weights:
    """The parameters that are trained; with `matrices`, only those of two or more dimensions."""
    found = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and (parameter.ndim > 1 or not matrices)
    }
    if not found:
        kind = " of two or more dimensions" if matrices else ""
        raise BastionError(
            f"{where}: no parameter{kind} of {type(model).__name__} is trained; call model.requires_grad_() if it was "
            "frozen"
        )
    return found


def random_direction(weights: Mapping[str, Tensor], draw: Draw, seed: int, *name: int | str) -> Weights:
    """Random numbers in the shapes of the weights, determined by seed and name."""
    return {
        key: draw(seed, torch.tensor([number]), rng.key(*name), weight.shape, dtype=weight.dtype)[0].to(weight.device)
        for number, (key, weight) in enumerate(weights.items())
    }


def filter_normalised(direction: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Weights:
    """The direction with each filter scaled to the norm of that of the weights (Li et al. 2018, Sec. 4).

    A filter is a slice along the first axis, the weights of one output.
    """
    normalised = {}
    for name, weight in weights.items():
        own, other = (torch.linalg.vector_norm(each.flatten(1), dim=1) for each in (weight, direction[name]))
        scale = own / other.clamp(min=torch.finfo(other.dtype).tiny)
        normalised[name] = direction[name] * scale.view(-1, *[1] * (weight.ndim - 1))
    return normalised


def adversarial(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Batch:
    """The batch under attack: what the attack returns for every image, also for misclassified ones."""
    with in_mode(model, training=False):
        x = run_attack(attack, Accelerated(model, enabled=False), batch, threat, seed=seed)
    return batch.at(x.detach())


class WeightLoss:
    """Mean cross-entropy on fixed examples in eval mode, `size` at once, and its derivatives by the weights."""

    def __init__(self, model: nn.Module, batch: Batch, size: int) -> None:
        self.model, self.n = model, len(batch.x)
        self.parts = batch.chunk(-(-self.n // size))

    def __call__(self, weights: Mapping[str, Tensor]) -> float:
        with torch.no_grad():
            return sum(self._loss(weights, part).item() for part in self.parts)

    def gradient(self, weights: Mapping[str, Tensor]) -> tuple[float, Weights]:
        """The loss and its gradient."""
        leaves = _leaves(weights)
        total, summed = 0.0, {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for part in self.parts:
            loss = self._loss(leaves, part)
            total += loss.item()
            _add(summed, torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True))
        return total, summed

    def hessian_product(self, weights: Mapping[str, Tensor], vector: Mapping[str, Tensor]) -> Weights:
        """Hessian-vector product: the gradient of the inner product of gradient and vector."""
        leaves = _leaves(weights)
        places = list(leaves.values())
        summed = {name: torch.zeros_like(weight) for name, weight in weights.items()}
        for part in self.parts:
            with sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
                first = torch.autograd.grad(self._loss(leaves, part), places, create_graph=True, materialize_grads=True)
                product = sum((own * vector[name]).sum() for own, name in zip(first, leaves, strict=True))
            assert isinstance(product, Tensor)
            if product.requires_grad:  # else the loss is linear in the weights
                _add(summed, torch.autograd.grad(product, places, materialize_grads=True))
        return summed

    def _loss(self, weights: Mapping[str, Tensor], part: Batch) -> Tensor:
        """This part's share of the mean, in double precision because parts are summed."""
        with in_mode(self.model, training=False):
            made = logits(AtWeights(self.model, weights), part.x, part.y)
        if any(weight.requires_grad for weight in weights.values()):
            check_gradient(made, "loss over the weights")
        return F.cross_entropy(made.double(), part.y, reduction="sum") / self.n


def _leaves(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.detach().requires_grad_() for name, weight in weights.items()}


def _add(summed: Weights, gradients: Sequence[Tensor]) -> None:
    for total, gradient in zip(summed.values(), gradients, strict=True):
        total += gradient

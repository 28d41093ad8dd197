"""The loss of a model as a function of its weights. The model's own are never written to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion import journal, rng
from bastion.acceleration import Accelerated
from bastion.attacks.judge import run_attack
from bastion.errors import BastionError
from bastion.forward import in_mode, logits
from bastion.threat import Threat
from bastion.types import Attack, Batch

Weights = dict[str, Tensor]  # by the names of parameters
Draw = Callable[..., Tensor]  # of `bastion.rng`: standard normal numbers, or signs


class AtWeights(nn.Module):
    """A model run with other weights in the place of its own."""

    def __init__(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.model, self.weights = model, dict(weights)
        self.training = model.training  # its own flag only: parts of the model may be in another mode

    def forward(self, x: Tensor) -> Any:
        return torch.func.functional_call(self.model, self.weights, (x,))

    def __getattr__(self, name: str) -> Any:
        """Whatever else the model has, such as `num_classes` or `tap`; but not what says how it is copied."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):
                raise
            return getattr(super().__getattr__("model"), name)


def trained_weights(model: nn.Module, where: str, *, matrices: bool = False) -> Weights:
    """What training moves, as it is now; with `matrices` only parameters of two or more dimensions."""
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
    """Random numbers in the shapes of the weights, the same for the same seed and name."""
    return {
        key: draw(seed, torch.tensor([number]), rng.key(*name), weight.shape, dtype=weight.dtype)[0].to(weight.device)
        for number, (key, weight) in enumerate(weights.items())
    }


def filter_normalised(direction: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> Weights:
    """Each filter of the direction as long as that of the weights (Li et al. 2018, Sec. 4).

    A filter is what makes one output: a slice of the first axis.
    """
    normalised = {}
    for name, weight in weights.items():
        own, other = (torch.linalg.vector_norm(each.flatten(1), dim=1) for each in (weight, direction[name]))
        scale = own / other.clamp(min=torch.finfo(other.dtype).tiny)
        normalised[name] = direction[name] * scale.view(-1, *[1] * (weight.ndim - 1))
    return normalised


def adversarial(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> Batch:
    """The batch under attack: what the attack returns for every image, also of those that are wrong already."""
    with in_mode(model, training=False):
        x = run_attack(attack, Accelerated(model, enabled=False), batch, threat, seed=seed)
    return batch.at(x.detach())


def attack_passes(model: nn.Module, batch: Batch, attack: Attack, threat: Threat, *, seed: int) -> tuple[int, int]:
    """Forward and backward passes that the attack takes for the first image."""
    first = Batch(*(part[:1] for part in batch[:3]))
    with journal.opened() as notes:
        adversarial(model, first, attack, threat, seed=seed)
    return notes.forwards.total(), notes.backwards.total()


class WeightLoss:
    """Mean cross-entropy on fixed examples in eval mode, `size` of them at once, with derivatives in the weights."""

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
        """The Hessian times a vector: the gradient of the gradient's product with it."""
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
        """This part's share of the mean, in double precision so that sums do not round."""
        with in_mode(self.model, training=False):
            made = logits(AtWeights(self.model, weights), part.x, part.y)
        return F.cross_entropy(made.double(), part.y, reduction="sum") / self.n


def _leaves(weights: Mapping[str, Tensor]) -> Weights:
    return {name: weight.detach().requires_grad_() for name, weight in weights.items()}


def _add(summed: Weights, gradients: Sequence[Tensor]) -> None:
    for total, gradient in zip(summed.values(), gradients, strict=True):
        total += gradient

"""How attacks ask a model: what they need before, what an answer must be, and the best point so far."""

from __future__ import annotations

import warnings
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from bastion._batchnorm import aligned
from bastion.attacks import journal
from bastion.attacks.losses import Loss, input_gradient, misclassified
from bastion.errors import BastionError
from bastion.types import Batch

learning: ContextVar[bool] = ContextVar("learning", default=False)  # inside a training step


def ready(model: nn.Module, batch: Batch, where: str) -> Batch:
    """The batch, cut off from any graph, if the model can be attacked on it."""
    if not isinstance(model, nn.Module):
        raise BastionError(f"{where}: the model must be a torch.nn.Module, got {type(model).__name__}; wrap it in one")
    if torch.is_inference_mode_enabled():
        raise BastionError(f"{where}: no attacks inside torch.inference_mode(), where all gradients are zero; leave it")
    if not learning.get() and any(map(_unsteady, model.modules())):
        warnings.warn(
            f"{where}: the model is in training mode: BatchNorm learns from the attack, dropout hides from it; call "
            "model.eval() first, or attack inside `with bastion.attacks.victim.for_training(model):`",
            stacklevel=3,
        )
    batch = Batch(*(part.clone() if part.is_inference() else part.detach() for part in batch))
    return batch.check(getattr(model, "num_classes", None), where)


def _unsteady(part: nn.Module) -> bool:
    return part.training and (isinstance(part, _BatchNorm) or (isinstance(part, _DropoutNd) and part.p > 0))


def logits_of(model: nn.Module, x: Tensor) -> Tensor:
    """The model's answer, if it is one; x stays as it is, even if the model normalises in place."""
    try:
        with aligned(x):
            logits = model(x.clone())
    except (RuntimeError, ValueError) as error:
        if known := _known_mistake(str(error), model, x):
            raise BastionError(f"attack: {known}; torch says: {error}") from error
        raise
    if not isinstance(logits, Tensor):
        got = type(logits).__name__
    elif not logits.is_floating_point() or logits.ndim != 2 or len(logits) != len(x) or logits.shape[1] < 2:
        got = f"{_plain(logits.dtype)} {tuple(logits.shape)}"
    else:
        return logits
    raise BastionError(
        "attack: the model must give logits of at least 2 classes, floating-point numbers of shape "
        f"({len(x)}, classes) here, got {got}; wrap it so that it does"
    )


class GradientsInside(TorchFunctionMode):
    """`found`: did a model that was asked inside take gradients by itself, to adapt or to purify its input?"""

    WAYS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func in self.WAYS
        return func(*args, **(kwargs or {}))


def _known_mistake(error: str, model: nn.Module, x: Tensor) -> str | None:
    """What torch says about two common ones does not name them."""
    kinds = sorted({_plain(each.dtype) for each in model.parameters() if each.is_floating_point()})
    if "type" in error and kinds and _plain(x.dtype) not in kinds:
        return f"images are {_plain(x.dtype)}, the model's weights {' and '.join(kinds)}; convert one of them"
    if "more than 1 value per channel" in error:
        return "BatchNorm in training mode takes no single image; put the model in eval mode"
    return None


def _plain(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def check_labels(y: Tensor, classes: int) -> None:
    """For models that do not say how many classes they have before they are asked."""
    fits = y.shape[1] == classes if y.ndim == 2 else len(y) == 0 or int(y.max()) < classes
    if not fits:
        got = f"soft labels of {y.shape[1]} classes" if y.ndim == 2 else f"the label {int(y.max())}"
        raise BastionError(f"attack: the model has {classes} classes, the batch {got}; do model and data fit?")


def answer(model: nn.Module, batch: Batch) -> Tensor:
    """Logits in the images' precision, or a better one."""
    logits = logits_of(model, batch.x)
    if getattr(model, "num_classes", None) != logits.shape[1]:  # else `ready` has looked: no GPU waits at every step
        check_labels(batch.y, logits.shape[1])
    return logits.to(torch.promote_types(logits.dtype, batch.x.dtype))


def evaluate(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss and fooled flag of each example, without a gradient."""
    with torch.no_grad():
        logits = answer(model, batch)
    journal.passes(batch.index, 1, 0)
    return loss(logits, batch.y), misclassified(logits, batch.y)


def ascent(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, fooled flag and input gradient of each example; parameters collect no gradient."""
    x = batch.x.detach().requires_grad_()
    with torch.enable_grad():
        logits = answer(model, batch.at(x))
        values = loss(logits, batch.y)
        gradient = input_gradient(values, x)
    journal.passes(batch.index, 1, 1)
    return values.detach(), misclassified(logits.detach(), batch.y), gradient


def notice_blindness(index: Tensor, gradient: Tensor) -> None:
    """A run whose first gradient is zero everywhere sees nothing to climb: that it fails says nothing."""
    if journal.is_open():
        blind = (gradient.flatten(1) == 0).all(1)
        journal.note("blind-start", index[blind].tolist())
        journal.sees(index[~blind].tolist())


class Incumbent:
    """The best point of each example so far: a fooled one before any other, then the highest loss."""

    def __init__(self, x0: Tensor) -> None:
        self.x = x0
        self.loss = torch.full((len(x0),), -torch.inf, dtype=x0.dtype, device=x0.device)
        self.fooled = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)

    def offer(self, x: Tensor, loss: Tensor, fooled: Tensor) -> None:
        better = (fooled & ~self.fooled) | ((fooled == self.fooled) & (loss > self.loss))
        better &= x.isfinite().flatten(1).all(1)  # a point that is none fools nobody
        self.x = torch.where(better[:, None, None, None], x, self.x)
        self.loss = torch.where(better, loss, self.loss)
        self.fooled = self.fooled | (fooled & better)

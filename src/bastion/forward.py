"""Runs a model safely: the checked forward pass, losses and input gradients, and the best input found so far.

Everything that asks a model for logits does it here: attacks, probes, the training step's inner attack.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from bastion import journal
from bastion.errors import BastionError
from bastion.types import Batch, hard

Loss = Callable[[Tensor, Tensor], Tensor]  # logits (B, K), y (B,) or (B, K) -> (B,)
MASKED = 1e4  # a logit this far below the right class's was masked by hand, and says nothing about precision


class Delegate(nn.Module):
    """Base of modules that run another model; attributes they lack, such as `num_classes` or `tap`, are the model's."""

    inner: ClassVar[str]  # the attribute that holds the model

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        setattr(self, self.inner, model)
        self.training = model.training  # the wrapper's own flag only: submodules may be in another mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("__"):  # such as __deepcopy__, which would return a copy of the inner model only
                raise
            return getattr(super().__getattr__(self.inner), name)


class Wrapped(Delegate):
    """A model and how an attack is to run it; calling it calls the model.

    `training_step`: the attack is part of a training step, so the model may be in training mode.
    """

    inner = "original"
    original: nn.Module

    def __init__(self, original: nn.Module, *, training_step: bool = False) -> None:
        super().__init__(original)
        self.training_step = training_step

    def forward(self, x: Tensor) -> Any:
        return self.original(x)


class Function(nn.Module):
    """A function of images as a module; it gets them on `device`. None: where they are.

    In eval mode, so are the modules that the function uses, while it runs.
    """

    def __init__(self, function: Callable[[Tensor], Tensor], device: Any = None) -> None:
        super().__init__()
        self.function, self.device = function, device

    def forward(self, x: Tensor) -> Tensor:
        with ExitStack() as modes:
            for module in [] if self.training else _modules_of(self.function):
                modes.enter_context(in_mode(module, training=False))
            made = self.function(x if self.device is None else x.to(self.device))
        return made.to(x.device) if isinstance(made, Tensor) else made


def _modules_of(function: Callable[..., Any]) -> list[nn.Module]:
    """Return the modules that a function, method, partial or callable object names or holds itself."""
    if isinstance(function, partial):
        used = [function.func, *function.args, *function.keywords.values()]
    else:
        used = [getattr(function, "__self__", function)]
        used += getattr(used[0], "__dict__", {}).values()
        if isinstance(plain := getattr(function, "__func__", function), FunctionType):
            variables = inspect.getclosurevars(plain)
            used += [*variables.nonlocals.values(), *variables.globals.values()]
    return [each for each in used if isinstance(each, nn.Module)]


def check_batch(model: nn.Module, batch: Batch, where: str) -> tuple[nn.Module, Batch]:
    """Unwrap the model and detach the batch; raise an error if the model cannot be attacked on this batch."""
    if not isinstance(model, nn.Module):
        raise BastionError(f"{where}: the model must be a torch.nn.Module, got {type(model).__name__}; wrap it in one")
    if torch.is_inference_mode_enabled():
        raise BastionError(f"{where}: no attacks inside torch.inference_mode(), where all gradients are zero; leave it")
    given, training_step = (model.original, model.training_step) if isinstance(model, Wrapped) else (model, False)
    if not training_step and any(map(_changes_in_training, given.modules())):
        warnings.warn(
            f"{where}: the model is in training mode, in which BatchNorm learns from the attack and dropout is random; "
            "call model.eval() first, or attack what `with bastion.acceleration.for_training(model) as …:` gives",
            stacklevel=3,
        )
    index, x, y = (part.clone() if part.is_inference() else part.detach() for part in batch[:3])
    return given, batch._replace(index=index, x=x, y=y).check(getattr(given, "num_classes", None), where)


def _changes_in_training(part: nn.Module) -> bool:
    return part.training and (isinstance(part, _BatchNorm) or (isinstance(part, _DropoutNd) and part.p > 0))


def logits(model: nn.Module, x: Tensor, y: Tensor | None = None) -> Tensor:
    """The model's logits at x, in the model's precision; an error if its output is not logits or y does not fit them.

    The model gets a copy of x, as it may normalise in place.
    """
    try:
        # A model may leave gradients switched off.
        with single_image_gradients(x), torch.set_grad_enabled(torch.is_grad_enabled()):
            made = model(x.clone())
    except (RuntimeError, ValueError) as error:
        if known := known_mistake(str(error), model, x):
            raise BastionError(f"attack: {known}; torch says: {error}") from error
        raise
    if not isinstance(made, Tensor):
        got = type(made).__name__
    elif not made.is_floating_point() or made.ndim != 2 or len(made) != len(x) or made.shape[1] < 2:
        got = f"{_plain(made.dtype)} {tuple(made.shape)}"
    else:
        if y is not None and getattr(model, "num_classes", None) != made.shape[1]:  # not checked by `check_batch`
            check_labels(y, made.shape[1])
        return made
    raise BastionError(
        "attack: the model must give logits of at least 2 classes, floating-point numbers of shape "
        f"({len(x)}, classes) here, got {got}; wrap it so that it does"
    )


def known_mistake(error: str, model: nn.Module, x: Tensor) -> str | None:
    """An explanation of two common mistakes that torch's own messages do not explain."""
    kinds = sorted({_plain(each.dtype) for each in model.parameters() if each.is_floating_point()})
    if "type" in error and kinds and _plain(x.dtype) not in kinds:
        other = "convert the model with .float()" if x.dtype == torch.float32 else "convert one of them"
        return f"images are {_plain(x.dtype)}, the model's weights {' and '.join(kinds)}; {other}"
    if "more than 1 value per channel" in error:
        return "BatchNorm in training mode takes no single image; put the model in eval mode"
    return None


def _plain(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def check_labels(y: Tensor, classes: int) -> None:
    """For models that do not say how many classes they have before they are run."""
    fits = y.shape[1] == classes if y.ndim == 2 else len(y) == 0 or int(y.max()) < classes
    if not fits:
        got = f"soft labels of {y.shape[1]} classes" if y.ndim == 2 else f"the label {int(y.max())}"
        raise BastionError(f"attack: the model has {classes} classes, the batch {got}; do model and data fit?")


def misclassified(logits: Tensor, y: Tensor) -> Tensor:
    """(B,) bool: the predicted class is not the label. NaN logits count as misclassified."""
    return (logits.argmax(1) != hard(y)) | logits.isnan().any(1)


def predict(model: nn.Module, batch: Batch) -> Tensor:
    """Logits without a gradient; `batch.logits`, if the batch has them."""
    if batch.logits is not None:
        return batch.logits
    with torch.no_grad():
        made = logits(model, batch.x, batch.y)
    journal.passes(batch.index, 1, 0)
    return made


def evaluate(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor]:
    """Loss of each example, and whether it is misclassified, without a gradient."""
    made = precise(predict(model, batch), batch.x)
    return loss(made, batch.y), misclassified(made, batch.y)


def loss_and_grad(model: nn.Module, batch: Batch, loss: Loss) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of each example, whether it is misclassified, and its input gradient; parameters collect none."""
    x = batch.x.detach().requires_grad_()
    with torch.enable_grad():
        made = precise(logits(model, x, batch.y), x)
        values = loss(made, batch.y)
        gradient = input_gradient(values, x)
    journal.passes(batch.index, 1, 1)
    return values.detach(), misclassified(made.detach(), batch.y), gradient


def precise(logits: Tensor, x: Tensor) -> Tensor:
    """Logits in at least the precision of the images: losses in half precision are too coarse to compare."""
    return logits.to(torch.promote_types(logits.dtype, x.dtype))


def input_gradient(loss: Tensor, x: Tensor, *, keep_graph: bool = False) -> Tensor:
    """Gradient of each example's loss with respect to its x; zero where the model detaches its input."""
    if not loss.requires_grad:
        return torch.zeros_like(x)
    (gradient,) = torch.autograd.grad(loss.sum(), x, retain_graph=keep_graph, allow_unused=True)
    if gradient is None:
        return torch.zeros_like(x)
    # A non-finite coordinate must not spoil the whole step: the attack would fail, which would look like robustness.
    return gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def check_gradient(value: Tensor, where: str) -> None:
    """Raise if the value has no gradient."""
    if not value.requires_grad:
        raise BastionError(
            f"{where}: there is no gradient: the model switches gradients off in its forward pass (torch.no_grad, "
            "inference_mode, detach); take that out"
        )


def record_zero_grad(index: Tensor, gradient: Tensor) -> None:
    """Note the examples whose first gradient is zero: the attack's failure there says nothing about robustness."""
    if journal.is_open():
        zero = (gradient.flatten(1) == 0).all(1)
        journal.note("blind-start", index[zero].tolist())
        journal.found_gradient(index[~zero].tolist())


NEVER = 2**62  # larger than the number of any search


class Best:
    """The best input found so far for each example: a misclassified one before any other, then the highest score.

    The searches of an example are numbered. A success passed to `settle` ends the searches with higher numbers; those
    with lower numbers go on, and their success would replace it. So the result does not depend on which searches share
    a batch.
    """

    def __init__(self, x0: Tensor) -> None:
        self.x = x0.clone()
        self.score = x0.new_full((len(x0),), -torch.inf, dtype=torch.float64)
        self.fooled = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
        self.settled_by = torch.full_like(self.fooled, NEVER, dtype=torch.int64)  # number of the search

    @property
    def settled(self) -> Tensor:
        return self.settled_by < NEVER

    def close(self, which: Tensor) -> None:
        """Mark the examples of a mask (B,) as settled, so that no search runs for them."""
        self.settled_by[which] = -1

    def offer(self, x: Tensor, score: Tensor, fooled: Tensor, at: Tensor | None = None) -> None:
        """Keep those of the inputs x that are better than what is held.

        `at` gives the position of each input's example in the batch, and may repeat; None: one input for each example.
        Non-finite inputs are ignored, and a score of NaN counts as the lowest.
        """
        places = torch.arange(len(x), device=x.device) if at is None else at
        held, score = self.fooled[places], torch.where(score.isnan(), -torch.inf, score).to(self.score.dtype)
        better = (fooled & ~held) | ((fooled == held) & (score > self.score[places]))
        better &= ~self.settled[places] & x.flatten(1).isfinite().all(1)
        rows = better.nonzero()[:, 0]
        if at is not None:
            rows = rows[_best_of_each(at[rows], score[rows])]
        self._take(places[rows], x[rows], score[rows], fooled[rows])

    def settle(self, x: Tensor, score: Tensor, at: Tensor, number: Tensor) -> None:
        """Keep successes whose margin is above rounding; of an example's searches, the one with the lowest number."""
        rows = _best_of_each(at, -number)
        rows = rows[number[rows] < self.settled_by[at[rows]]]
        self.settled_by[at[rows]] = number[rows]
        self._take(at[rows], x[rows], score[rows].to(self.score.dtype), torch.ones_like(rows, dtype=torch.bool))

    def _take(self, at: Tensor, x: Tensor, score: Tensor, fooled: Tensor) -> None:
        self.x[at], self.score[at], self.fooled[at] = x, score, fooled


def _best_of_each(at: Tensor, score: Tensor) -> Tensor:
    """For each example in `at`, the row with the highest score, the first of ties."""
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(at[order], stable=True)]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = at[order][1:] != at[order][:-1]
    return order[first]


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))


def is_sharded(parameter: Tensor) -> bool:
    """Whether this is a DTensor. To import its module takes a second; without it there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(parameter, module.DTensor)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Inside, no parameter requires a gradient, except sharded ones (DTensor), which are left as they are."""
    parameters = [each for each in model.parameters() if each.requires_grad and not is_sharded(each)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


@contextmanager
def in_mode(model: nn.Module, *, training: bool | None = None) -> Iterator[None]:
    """Train or eval mode inside the block (None: unchanged); afterwards every module has its former mode again."""
    modes = {module: module.training for module in model.modules()}
    if training is not None:
        model.train(training)
    try:
        yield
    finally:
        for module, before in modes.items():
            module.training = before


class GradientsInside(TorchFunctionMode):
    """`found`: whether a model run inside computes gradients itself, for test-time adaptation or purification."""

    FUNCTIONS = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found |= func in self.FUNCTIONS
        return func(*args, **(kwargs or {}))


def single_image_gradients(x: Tensor) -> AbstractContextManager[Any]:
    """Correct gradients of a forward pass on x, also if x is a single image.

    For a batch of one image, torch's CPU kernels for the backward pass of BatchNorm and InstanceNorm misread the memory
    format of a channels-last gradient, because the stride of an axis of length 1 is arbitrary. That happens after
    `flatten(2).transpose(1, 2)`, as in the stems of XCiT and LeViT, and gives wrong gradients without an error. Inside,
    inputs and gradients of these kernels are made contiguous.
    """
    single = len(x) == 1 and x.device.type == "cpu" and torch.is_grad_enabled()
    return _ContiguousNorms() if single else nullcontext()


class _ContiguousNorms(TorchFunctionMode):
    KERNELS = (F.batch_norm, F.instance_norm, torch.batch_norm, torch.instance_norm)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in self.KERNELS:
            return func(*args, **kwargs)
        first, *rest = args or (kwargs.pop("input"),)
        normed = func(first.contiguous(), *rest, **kwargs)
        if normed.requires_grad:
            normed.register_hook(Tensor.contiguous)
        return normed

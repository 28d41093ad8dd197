"""The model under attack: the same function, cheaper to ask. Whether a point fools is judged on the model as given."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import BackwardCFunction
from torch.distributed.tensor import DTensor
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._pytree import tree_leaves

from bastion import rng
from bastion.attacks.asking import GradientsInside, learning, logits_of
from bastion.attacks.winograd import Winograd

# A batch is as large as keeps what a forward pass saves for the backward pass near this: larger ones leave the
# processor's cache. `benchmarks/lanes.py` measures it.
CPU_CACHE = 32 << 20
GPU_MEMORY = 2 << 30
LANES = (8, 256)
SPECTRA = 1 << 30  # bytes that the weights of Winograd's convolutions may take

RELUS = (nn.ReLU, nn.functional.relu, torch.relu, "relu")
SUMS = (operator.add, torch.add)
LAYERS = (nn.Conv2d, nn.BatchNorm2d, operator.iadd)  # what comes out is not needed to go back


class Victim(nn.Module):
    """A model made ready for many passes. `lanes`: how many images it should be asked about at once.

    `copied`: it is not the model as given, but a copy, which answers by the images alone.
    """

    def __init__(self, network: nn.Module, lanes: int, *, copied: bool = False) -> None:
        super().__init__()
        self.network, self.lanes, self.copied = network, lanes, copied
        self.rounding = 0.0  # share of the largest logit that another batch, or the model as given, may change

    def forward(self, x: Tensor) -> Tensor:
        logits = logits_of(self.network, x)
        self.rounding = (4 if _is_coarse(logits) else 16) * torch.finfo(logits.dtype).eps
        return logits.to(x.dtype)


def _is_coarse(logits: Tensor) -> bool:
    """As those of a model in bf16 or fp16."""
    return torch.finfo(logits.dtype).eps > torch.finfo(torch.float32).eps


@contextmanager
def for_training(model: nn.Module) -> Iterator[None]:
    """Attacks inside are a part of a training step: weights change after each, so a copy is not worth its making,
    and all of the batch is asked about at once. Parameters collect no gradients."""
    token = learning.set(True)
    try:
        with frozen(model):
            yield
    finally:
        learning.reset(token)


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter wants a gradient inside; but those that are shared out to processes stay as they are."""
    parameters = [each for each in model.parameters() if each.requires_grad and not isinstance(each, DTensor)]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def goes_together(model: nn.Module) -> bool:
    """Is each pass made by all processes that train, the inner attack's too? They must then make as many."""
    if not learning.get():
        return False
    shared = any(part.training and getattr(part, "together", False) for part in model.modules())
    return shared or any(isinstance(each, DTensor) for each in model.parameters())


@contextmanager
def under_attack(model: nn.Module, x: Tensor) -> Iterator[Victim]:
    """The model ready to be attacked around images like x; a victim stays the victim it is.

    Parameters collect no gradients inside, but where the model itself asks for them. Convolutional networks are asked
    in channels-last format with BatchNorm folded into the convolutions, some of them Winograd's, as a copy; if a copy
    cannot be made or does not agree, the model itself is asked.
    """
    if isinstance(model, Victim):
        yield model
        return
    whole = learning.get() or any(part.training for part in model.modules())
    learns = not whole and _differentiates(model, x[:1])
    network = model if whole or learns or not _convolves(model) else _cheaper(model, x[:2])
    with nullcontext() if learns else frozen(network):
        # In train mode BatchNorm sees the batch: it is asked about all of it at once, and not about one image.
        # torch.func, with which a model may take gradients, bears no look at what it saves.
        lanes = max(len(x), 1) if whole else LANES[0] if learns else _lanes(network, x[:1])
        victim = Victim(network, lanes, copied=network is not model)
        victim.training = model.training  # its own flag only: parts of the model may be in another mode
        yield victim


def _differentiates(model: nn.Module, x: Tensor) -> bool:
    """Does a pass take gradients by itself, perhaps by the model's own parameters?"""
    inside = GradientsInside()
    with torch.enable_grad(), inside:
        logits_of(model, x.detach().requires_grad_())
    return inside.found


def _convolves(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv2d) for module in model.modules())


def _cheaper(model: nn.Module, x: Tensor) -> nn.Module:
    """A folded copy in channels-last format, if it can be had and gives the same logits and gradients."""
    if not _comparable(model, x):
        return model
    for prepare in (_as_it_is,) if _has_own_backward(model, x) else (_reworked, _folded, _as_it_is):
        try:
            copied = prepare(_copy(model))
            copied.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            many = [x.repeat(LANES[0], 1, 1, 1)] if any(isinstance(part, Winograd) for part in copied.modules()) else []
            if all(_agree(model, copied, some) for some in (x, x[:1], *many)):
                return copied
        except Exception:  # whatever a stranger's model does when it is copied: ask it as it is
            continue
    return model


def _copy(model: nn.Module) -> nn.Module:
    """Also of models that keep what they made of their parameters, as timm's do with attention biases."""
    held = (each for part in model.modules() for each in tree_leaves(vars(part)) if isinstance(each, Tensor))
    return copy.deepcopy(model, {id(each): each.detach().clone() for each in held if not each.is_leaf})


def _comparable(model: nn.Module, x: Tensor) -> bool:
    """Can answers be held against a copy's? Not if a pass draws random numbers, of which a trace would hold one draw
    for ever, nor if their rounding hides what a copy does otherwise."""
    before = rng.state()
    with torch.no_grad():
        logits = logits_of(model, x)
    return rng.state() == before and not _is_coarse(logits)


def _has_own_backward(model: nn.Module, x: Tensor) -> bool:
    """Is there a backward pass that somebody wrote (BPDA)? A trace looks through its forward pass, and loses it."""
    with torch.enable_grad():
        waiting = [logits_of(model, x.detach().clone().requires_grad_()).grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if isinstance(node, BackwardCFunction):
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions]
    return False


def _agree(model: nn.Module, other: nn.Module, x: Tensor) -> bool:
    """Are logits and gradients the same? A copy may have lost what the model does with gradients by itself."""
    (expected, slope), (got, other_slope) = _with_gradient(model, x), _with_gradient(other, x)
    with torch.no_grad():
        blind, other_blind = logits_of(model, x), logits_of(other, x)
    expected, got = torch.cat([expected, blind]), torch.cat([got, other_blind])
    tolerance = 1e-9 if expected.dtype == torch.float64 else 1e-4
    scale = expected.abs().nan_to_num(0, 0, 0).max().item()
    if not torch.allclose(got, expected, rtol=0, atol=tolerance * scale, equal_nan=True):
        return False
    if slope is None or other_slope is None:
        return slope is other_slope
    if not torch.equal(slope.isfinite(), other_slope.isfinite()):
        return False
    slope, other_slope = slope.nan_to_num(0, 0, 0), other_slope.nan_to_num(0, 0, 0)
    # Not as closely as logits: a ReLU whose input is zero but for rounding may be open in one and shut in the other.
    return bool((slope - other_slope).norm() <= 0.05 * slope.norm())


def _with_gradient(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits, and the gradient of a sum of them in which each has another weight; None where there is no way back."""
    point = x.detach().clone().requires_grad_()
    with torch.enable_grad():
        logits = logits_of(model, point)
        if not logits.requires_grad:
            return logits, None
        weights = torch.linspace(1, 2, logits.shape[1], dtype=logits.dtype, device=logits.device)
        (gradient,) = torch.autograd.grad((logits * weights).sum(), point, allow_unused=True)
    return logits.detach(), gradient


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _reworked(module: nn.Module) -> nn.Module:
    """Folded, and with convolutions that need fewer multiplications, as far as there is room for their weights."""
    folded, room = _folded(module), SPECTRA
    for name, part in list(folded.named_modules()):
        if Winograd.fits(part) and name:
            room -= 4 * part.weight.numel() * part.weight.element_size()
            if room >= 0:
                folded.set_submodule(name, Winograd(part))
    return folded


def _folded(module: nn.Module) -> nn.Module:
    """BatchNorms that follow a convolution become part of it, in every part of the model that can be traced."""
    if not any(isinstance(part, nn.BatchNorm2d) for part in module.modules()):
        return module
    try:
        traced = fx.symbolic_trace(module)
    except Exception:  # control flow that depends on the input: its parts may still be traced
        for name, child in module.named_children():
            setattr(module, name, _folded(child))
        return module
    _fold(traced)
    _reuse_memory(traced)
    traced.delete_all_unused_submodules()
    traced.recompile()
    return traced


def _fold(traced: fx.GraphModule) -> None:
    parts = dict(traced.named_modules())
    for node in traced.graph.nodes:
        if node.op != "call_module" or not isinstance(parts[node.target], nn.BatchNorm2d):
            continue
        before = node.args[0]
        if before.op != "call_module" or len(before.users) > 1 or type(parts[before.target]) is not nn.Conv2d:
            continue
        fused = fuse_conv_bn_eval(parts[before.target], parts[node.target])
        traced.set_submodule(before.target, fused)
        node.replace_all_uses_with(before)
        traced.graph.erase_node(node)


def _reuse_memory(traced: fx.GraphModule) -> None:
    """ReLUs and sums are written over what was made for them alone, by layers whose own backward pass has no use for
    it."""
    parts = dict(traced.named_modules())

    def kind(node: fx.Node) -> Any:
        return type(parts[str(node.target)]) if node.op == "call_module" else node.target

    def spare(value: Any, kinds: tuple[Any, ...] = LAYERS) -> bool:
        return isinstance(value, fx.Node) and len(value.users) == 1 and kind(value) in kinds

    for node in traced.graph.nodes:
        if kind(node) in RELUS and node.args and spare(node.args[0], (*LAYERS, *SUMS)):
            node.op, node.target, node.args, node.kwargs = "call_function", torch.relu_, node.args[:1], {}
        elif kind(node) in SUMS and not node.kwargs and any(map(spare, node.args)):
            onto, other = node.args if spare(node.args[0]) else reversed(node.args)
            node.target, node.args = operator.iadd, (onto, other)


def _lanes(network: nn.Module, x: Tensor) -> int:
    """From what one image's forward pass leaves for the backward pass: a pure function of model and image size."""
    if len(x) == 0:
        return LANES[0]
    saved: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in network.parameters()}

    def weigh(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            saved[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(weigh, lambda tensor: tensor):
        logits_of(network, x.detach().requires_grad_())
    room = GPU_MEMORY if x.is_cuda else CPU_CACHE
    activations = max(sum(saved.values()), 1)
    fitting: int = 2 ** int(math.log2(max(room / activations, 1)))
    return min(max(fitting, LANES[0]), LANES[1])

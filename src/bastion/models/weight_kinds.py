"""The weights of a network by their role: convolution, queries/keys/values, attention projection, feed-forward.

Weights are those of linear and convolutional layers, without biases, norms, class tokens, position embeddings and
tables. The role depends on the names in a layer's path, not on its type: RVT's feed-forward layers are convolutions,
and so are CvT's projections to queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Literal, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from bastion.errors import BastionError
from bastion.types import Tapped

Kind = Literal["convolution", "qkv", "projection", "feed-forward", "other"]
KINDS: tuple[Kind, ...] = ("convolution", "qkv", "projection", "feed-forward", "other")

_QKV = {"q", "k", "v", "qk", "kv", "qkv", "kqv", "query", "key", "value", "in_proj_weight"}
_PROJECTION = {"proj", "projection", "out_proj"}  # only inside a module that also has queries
_FEED_FORWARD = {"mlp", "mlp_tokens", "mlp_channels", "linear_tokens", "ffn", "leff"}


class Weight(NamedTuple):
    name: str
    kind: Kind
    block: int  # its block's number in `model.blocks()`; -1 if it is in none
    tensor: Tensor  # (outputs, inputs, …)

    @property
    def matrix(self) -> Tensor:
        """(outputs, inputs times kernel)."""
        return self.tensor.flatten(1)


def weights(model: nn.Module) -> list[Weight]:
    """All weights in the order of the network; a shared tensor is listed once."""
    blocks = _block_of_module(model)
    found: dict[int, Weight] = {}
    for name, module, tensor in _layers(model):
        weight = Weight(name, _kind(model, name, module), blocks.get(module, -1), tensor.detach())
        found.setdefault(tensor.data_ptr(), weight)
    if not found:
        raise BastionError(
            f"weights: {type(model).__name__} has no linear or convolutional layer of torch's, so there is nothing to "
            "look at"
        )
    for weight in found.values():
        if not weight.tensor.isfinite().all():
            raise BastionError(f"weights: {weight.name} has NaN or infinite values; load the model again")
    return list(found.values())


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | _ConvNd):
            yield name, module, module.weight
        elif isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            yield f"{name}.in_proj_weight", module, module.in_proj_weight


def _kind(model: nn.Module, name: str, module: nn.Module) -> Kind:
    path = name.split(".")
    if _QKV & {*path}:
        return "qkv"
    parents = [".".join(path[:depth]) for depth in range(len(path))]
    if any(part in _PROJECTION and _attends(model, parent) for part, parent in zip(path, parents, strict=True)):
        return "projection"
    if _FEED_FORWARD & {*path}:
        return "feed-forward"
    return "convolution" if isinstance(module, _ConvNd) else "other"


def _attends(model: nn.Module, name: str) -> bool:
    module = model.get_submodule(name)
    return isinstance(module, nn.MultiheadAttention) or any(child in _QKV for child, _ in module.named_children())


def _block_of_module(model: nn.Module) -> dict[nn.Module, int]:
    found: dict[nn.Module, int] = {}
    with suppress(BastionError):  # the family does not declare its blocks
        for number, block in enumerate(model.blocks() if isinstance(model, Tapped) else ()):
            found |= dict.fromkeys(block.module.modules(), number)
    return found

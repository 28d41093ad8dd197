"""A network as a chain of functions: pixels to the first residual block, each block, and the last block to logits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bastion import forward
from bastion.errors import BastionError
from bastion.types import Block, tapped


@dataclass
class Call:
    """A call of a block: its arguments and its output."""

    block: Block
    place: int | str  # which argument is the input: its position or keyword
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    y: Tensor

    @property
    def name(self) -> str:
        return self.block.name

    @property
    def x(self) -> Tensor:
        return _taken(self.arguments, self.keywords, self.place)

    def function(self, z: Tensor) -> Tensor:
        """The block on another input, with the other arguments unchanged."""
        arguments = [z if place == self.place else _copy(each) for place, each in enumerate(self.arguments)]
        keywords = {place: z if place == self.place else _copy(each) for place, each in self.keywords.items()}
        return _first(self.block.module(*arguments, **keywords))


class Chain:
    """A model at a batch of images. One forward pass records the calls of its blocks, which can then be run one by one.

    A block's input is the first argument with the shape of its output, as a skip connection needs, or else the first
    tensor. If a block runs more than once, its last call counts.
    """

    def __init__(self, model: nn.Module, x: Tensor, where: str) -> None:
        self.model, self.x, self.where = model, x, where
        self.blocks = tapped(model, where).blocks()
        calls: dict[str, Call] = {}
        with ExitStack() as stack, torch.no_grad():
            for block in self.blocks:
                stack.enter_context(self._recorded(block, calls))
            self.logits = forward.logits(model, x)
        if not calls:
            raise BastionError(f"{where}: none of the model's blocks was run on the images")
        self.calls = list(calls.values())  # in the order in which they ran

    @contextmanager
    def _recorded(self, block: Block, calls: dict[str, Call]) -> Iterator[None]:
        given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def enter(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            # Copies: blocks may change their input in place.
            given.append((tuple(map(_copy, arguments)), {key: _copy(each) for key, each in keywords.items()}))

        def leave(module: nn.Module, arguments: Any, output: Any) -> None:
            (inputs, keywords), y = given.pop(), _copy(_first(output))
            calls.pop(block.name, None)
            calls[block.name] = Call(block, self._place(block, inputs, keywords, y), inputs, keywords, y)

        hooks = [
            block.module.register_forward_pre_hook(enter, with_kwargs=True),
            block.module.register_forward_hook(leave),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _place(self, block: Block, arguments: tuple[Any, ...], keywords: Mapping[str, Any], y: Tensor) -> int | str:
        given: dict[Any, Any] = {**dict(enumerate(arguments)), **keywords}
        tensors = {place: each for place, each in given.items() if _is_batch(each, len(self.x))}
        if not tensors or not _is_batch(y, len(self.x)):
            raise BastionError(
                f"{self.where}: block {block.name} does not take and give one tensor for each of the {len(self.x)} "
                "images, so it has no Jacobian by image; the network as a whole has one"
            )
        same = [place for place, each in tensors.items() if each.shape == y.shape]
        place: int | str = (same or list(tensors))[0]
        return place

    @property
    def names(self) -> list[str]:
        """Names of all blocks, in the order of the model."""
        return [block.name for block in self.blocks]

    def sizes(self) -> list[int]:
        """Numbers in the input and output of each part, for one example."""
        inner = [call.x[0].numel() + call.y[0].numel() for call in self.calls]
        return [self.x[0].numel() + self.calls[0].x[0].numel(), *inner]

    def embedding(self, x: Tensor) -> Tensor:
        """Pixels to the input of the first block."""
        first = self.calls[0]

        def stop(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
            raise _Reached(_taken(arguments, keywords, first.place))

        hook = first.block.module.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.model(x)
        except _Reached as reached:
            return reached.value
        finally:
            hook.remove()
        raise BastionError(f"{self.where}: block {first.name} did not run a second time")

    def head(self, z: Tensor) -> Tensor:
        """The output of the last block to logits."""

        def replace(module: nn.Module, arguments: Any, output: Any) -> Any:
            return (z, *output[1:]) if isinstance(output, tuple) else z

        hook = self.calls[-1].block.module.register_forward_hook(replace)
        try:
            return forward.logits(self.model, self.x)
        finally:
            hook.remove()


class _Reached(Exception):  # stops a forward pass; not an error
    def __init__(self, value: Tensor) -> None:
        self.value = value


def _is_batch(value: Any, examples: int) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1 and len(value) == examples


def _taken(arguments: tuple[Any, ...], keywords: Mapping[str, Any], place: int | str) -> Tensor:
    taken: Tensor = arguments[place] if isinstance(place, int) else keywords[place]
    return taken


def _first(output: Any) -> Tensor:
    first: Tensor = output[0] if isinstance(output, tuple | list) else output
    return first


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value

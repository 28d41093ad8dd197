"""`Classifier`: takes pixels in [0, 1], normalises them, returns logits; can record block outputs and attention."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.attention import AttentionMode
from bastion.errors import BastionError, did_you_mean
from bastion.forward import in_mode
from bastion.types import Attention, Block, Taps

Resize = Literal["bilinear", "bicubic"]
# As Tang et al. 2022 group architectures. Those they do not name are grouped by their blocks, whatever the stem: with
# convolutions, without (except strided ones that make patches), or with both.
Category = Literal["CNN", "Transformer", "hybrid"]
Renames = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]


@dataclass(frozen=True)
class Blocks:
    """Which modules of a network are residual blocks, by name: `stages.*.blocks.*`, each * a number."""

    names: str
    attention: Attention | None = None  # what their attention is between; None: they have none
    having: str = ""  # only modules with a submodule of this name
    map_to: str = ""  # the submodule that is called with the attention map, if softmax does not make the map

    def include(self, name: str, module: nn.Module) -> bool:
        pattern = re.escape(self.names).replace(r"\*", r"\d+")
        matches = re.fullmatch(pattern, name) is not None
        return matches and (not self.having or self.having in dict(module.named_modules()))


@dataclass(frozen=True)
class Backbone:
    """What a model family builds: a network that takes normalised pixels, and its description."""

    network: nn.Module
    num_classes: int
    shape: tuple[int, int, int]  # (C, H, W) of its input
    paper: str = ""  # the source of the architecture
    category: Category | None = None
    blocks: tuple[Blocks, ...] = ()  # a module that several of them include belongs to the first
    # Tensor names in the authors' release to names here: a pattern for the whole name, and its replacement by `re.sub`.
    renames: Renames = ()


class Classifier(nn.Module):
    """A backbone with its normalisation: the form in which attacks, probes and objectives get a model."""

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        backbone: Backbone,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        *,
        spec: Mapping[str, Any] | None = None,
        shape: tuple[int, int, int] | None = None,
        resize: Resize | None = None,
    ) -> None:
        """Takes images of `shape`, by default the backbone's input shape; `resize` interpolates them to that shape.

        `spec` is what the model registry rebuilds the backbone from; a model without it cannot be saved.
        """
        super().__init__()
        channels = backbone.shape[0]
        if (
            len(mean) != channels
            or len(std) != channels
            or not (all(map(math.isfinite, mean)) and all(0 < each < math.inf for each in std))
        ):
            raise BastionError(
                f"normalisation: need {channels} means and {channels} positive stds for images of {channels} channels, "
                f"got mean {mean} and std {std}"
            )
        self.network = backbone.network
        self.num_classes = backbone.num_classes
        self.shape = shape or backbone.shape
        self.size = backbone.shape[1:]
        self.resize = resize
        self.spec = dict(spec) if spec is not None else None
        self.category = backbone.category
        self._blocks = backbone.blocks
        self.register_buffer("mean", torch.tensor(mean).view(1, -1, 1, 1))
        self.register_buffer("std", torch.tensor(std).view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 4 or x.shape[1] != self.shape[0]:
            raise BastionError(
                f"model input: expected (B, {self.shape[0]}, H, W), got {tuple(x.shape)}; is this its kind of data?"
            )
        logits: Tensor = self.network((self.resized(x) - self.mean) / self.std)
        return logits if logits.dtype == torch.float64 else logits.float()  # also under autocast

    def resized(self, x: Tensor) -> Tensor:
        """The images at the network's size, if `resize` says how to interpolate them."""
        if self.resize and x.shape[2:] != self.size:
            x = F.interpolate(x, self.size, mode=self.resize, align_corners=False)
        return x

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that the backbone excludes from weight decay, such as position embeddings."""
        named: Callable[[], set[str]] = getattr(self.network, "no_weight_decay", set)
        return {f"network.{name}" for name in named()}

    def blocks(self) -> list[Block]:
        """The residual blocks that the family declares, in the order of the network's modules."""
        found = []
        for name, module in self.network.named_modules():
            declared = next((each for each in self._blocks if each.include(name, module)), None)
            if declared:
                map_to = module.get_submodule(declared.map_to) if declared.map_to else None
                found.append(Block(name, module, declared.attention, map_to))
        if not found:
            raise BastionError(
                f"{type(self.network).__name__}: which of its modules are residual blocks is not known; declare them "
                "with Backbone(blocks=…)"
            )
        return found

    def check_input(self, shape: tuple[int, int, int], where: str) -> None:
        """Raise an error if the network does not run on images of this shape: not all families take every size."""
        if shape[0] != self.shape[0]:
            raise BastionError(f"{where}: the model takes {self.shape[0]} channels, the data have {shape[0]}")
        try:
            with torch.no_grad(), in_mode(self, training=False):
                self(torch.zeros(1, *shape, device=self.mean.device, dtype=self.mean.dtype))
        except (AssertionError, RuntimeError, ValueError) as error:
            own, given = ("×".join(map(str, size)) for size in (self.size, shape[1:]))
            raise BastionError(
                f"{where}: the network was made for images of {own} and does not take {given} ({error}); set its size "
                "(model.img_size for most), or `resize: bicubic` to bring images to it"
            ) from error

    @contextmanager
    def tap(self, *what: str) -> Iterator[Taps]:
        """Record the outputs of `"blocks"`, the maps of `"attention"`, or both, in forward passes inside the context.

        The tensors are part of the graph, so a loss may use them.
        """
        known = {"blocks", "attention"}
        for name in what:
            if name not in known:
                raise BastionError(f"tap: unknown '{name}'{did_you_mean(name, known)}")
        taps = Taps()
        with ExitStack() as stack:
            if "blocks" in what:
                for block in self.blocks():
                    stack.enter_context(_record_output(block, taps.blocks))
            if "attention" in what:
                stack.enter_context(_record_attention(self.blocks(), taps.attention))
            yield taps


@contextmanager
def _record_output(block: Block, store: dict[str, Tensor]) -> Iterator[None]:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        store[block.name] = output[0] if isinstance(output, tuple) else output

    handle = block.module.register_forward_hook(keep)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _record_attention(blocks: list[Block], store: dict[str, Tensor]) -> Iterator[None]:
    attending = [block for block in blocks if block.attention]
    if not attending:
        raise BastionError("tap: this model has no attention maps; none of its blocks attends")
    recorder = _AttentionRecorder(store)
    with ExitStack() as stack:
        for block in attending:
            enter = block.module.register_forward_pre_hook(lambda _, x, name=block.name: recorder.enter(name, x[0]))
            leave = block.module.register_forward_hook(lambda *_: recorder.leave())
            stack.callback(enter.remove)
            stack.callback(leave.remove)
            if block.map_to is not None:
                given = block.map_to.register_forward_pre_hook(lambda _, x: recorder.keep(x[0]))
                stack.callback(given.remove)
        stack.enter_context(recorder)
        yield


class _AttentionRecorder(AttentionMode):
    """Stores the attention map of the block that is running; if it computes several, the last."""

    def __init__(self, store: dict[str, Tensor]) -> None:
        super().__init__()
        self.store = store
        self.block: str | None = None

    def enter(self, block: str, x: Tensor) -> None:
        self.block, self.batch = block, len(x)

    def leave(self) -> None:
        self.block = None

    @property
    def active(self) -> bool:
        return self.block is not None

    def on_map(self, attention: Tensor) -> Tensor:
        self.keep(attention)
        return attention

    def keep(self, attention: Tensor) -> None:
        if self.block is not None:
            self.store[self.block] = attention

"""The contracts between the rooms: what crosses a boundary, and what a plug-in must do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from bastion.errors import BastionError
from bastion.suite import Role

if TYPE_CHECKING:
    from PIL.Image import Image

    from bastion.recipe import Recipe
    from bastion.threat import Norm, Threat


class Batch(NamedTuple):
    """Examples on their way to a model: any memory format, pixels in [0, 1]."""

    # int64 (B,): the example's number in its data set; all its randomness hangs on it
    index: Tensor  # type: ignore[assignment]
    x: Tensor  # float (B, C, H, W)
    y: Tensor  # int64 (B,), or soft labels (B, K)
    logits: Tensor | None = None  # (B, K) of the model under attack at x, where somebody knows them already

    def select(self, which: Tensor) -> Batch:
        """The examples of a bool mask or of positions."""
        logits = None if self.logits is None else self.logits[which]
        return Batch(self.index[which], self.x[which], self.y[which], logits)

    def at(self, x: Tensor) -> Batch:
        """The same examples with other images, of which no logits are known."""
        return Batch(self.index, x, self.y)

    def to(self, device: torch.device | str) -> Batch:
        logits = None if self.logits is None else self.logits.to(device)
        return Batch(self.index.to(device), self.x.to(device), self.y.to(device), logits)

    def chunk(self, count: int) -> list[Batch]:
        """As so many parts, the last of them perhaps smaller, without logits."""
        parts = zip(*(part.chunk(count) for part in self[:3]), strict=True)
        return [Batch(*part) for part in parts]

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """Several as one, without logits."""
        return Batch(*(torch.cat(parts) for parts in zip(*(batch[:3] for batch in batches), strict=True)))

    def check(self, num_classes: int | None, where: str) -> Batch:
        """This batch, its class numbers as int64, if pixels and labels are what models and attacks expect.

        `num_classes` None: any number of them.
        """
        b = len(self.x)
        if self.x.ndim != 4 or self.x.dtype not in (torch.float32, torch.float64):
            raise BastionError(
                f"{where}: images must be float32 or float64 of shape (B, C, H, W), got {self.x.dtype} "
                f"{tuple(self.x.shape)}; for uint8 images divide by 255 first, half precision is too coarse for eps"
            )
        if self.index.shape != (b,) or self.index.is_floating_point():
            raise BastionError(
                f"{where}: index must be the examples' numbers, integers of shape ({b},), got {self.index.dtype} "
                f"{tuple(self.index.shape)}"
            )
        if self.y.ndim == 0 or len(self.y) != b:
            raise BastionError(f"{where}: {b} images, but labels of shape {tuple(self.y.shape)}")
        if b == 0:
            return self
        low, high = self.x.min().item(), self.x.max().item()
        if not (low >= 0.0 and high <= 1.0):  # false for NaN too
            bad = ~((self.x >= 0) & (self.x <= 1)).flatten(1).all(1)
            raise BastionError(
                f"{where}: image {int(self.index[bad][0])} has pixels outside [0, 1] or NaN (batch range {low:.4g} to "
                f"{high:.4g}); give raw pixels divided by 255: the model normalises by itself"
            )
        if self.y.ndim == 1:
            low_y, high_y = int(self.y.min()), int(self.y.max())
            if self.y.is_floating_point() or low_y < 0 or (num_classes and high_y >= num_classes):
                most = f" to {num_classes - 1}" if num_classes else ""
                raise BastionError(
                    f"{where}: labels must be integers from 0{most}, got {self.y.dtype} from {low_y} to "
                    f"{high_y}; does the model have the data set's number of classes?"
                )
            return self._replace(y=self.y.long())
        if self.y.ndim != 2 or not self.y.is_floating_point() or (num_classes and self.y.shape[1] != num_classes):
            raise BastionError(
                f"{where}: labels must be integers of shape ({b},), or soft labels, floating-point numbers of shape "
                f"({b}, {num_classes or 'classes'}), got {self.y.dtype} {tuple(self.y.shape)}"
            )
        if not ((self.y >= 0).all() and torch.allclose(self.y.sum(1), self.y.new_ones(()), atol=1e-3)):
            raise BastionError(f"{where}: soft labels must be shares of the classes, >= 0 and with the sum 1")
        return self


def hard(y: Tensor) -> Tensor:
    """Class numbers of hard or soft labels."""
    return y if y.ndim == 1 else y.argmax(1)


# What the softmaxed maps of a block are between; `class`: only the class token attends.
Attention = Literal["tokens", "windows", "channels", "class"]


@dataclass(frozen=True)
class Block:
    """One residual block of a backbone."""

    name: str
    module: nn.Module
    attention: Attention | None = None

    @property
    def attends(self) -> bool:
        """Self-attention: every token, or every channel, attends to others."""
        return self.attention not in (None, "class")


@dataclass
class Taps:
    """What a forward pass inside `tap` left behind, by block name; the latest pass replaces the one before."""

    blocks: dict[str, Tensor] = field(default_factory=dict)
    # Softmaxed, (B, heads, queries, keys); families with windows have B times the windows in the first place.
    # A block that attends more than once leaves its last map.
    attention: dict[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Tapped(Protocol):
    """A model that shows its blocks and attention maps on demand, as `bastion.models.Classifier` does."""

    def blocks(self) -> list[Block]: ...

    def tap(self, *what: str) -> AbstractContextManager[Taps]: ...


class Attack(ABC):
    """A frozen dataclass whose repr is its record. Returns images of the threat's set around batch.x."""

    version: ClassVar[int] = 1  # raised when the same settings give other results: stored facts are then made anew

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor: ...

    @property
    def eot(self) -> int:
        """Passes that a gradient is averaged over: more than one for models that draw random numbers."""
        return 1

    def named_members(self, norm: Norm) -> list[tuple[str, Attack]]:
        """The attacks that it runs one after another under a threat of this norm, if it is an ensemble."""
        return []

    def passes(self, norm: Norm) -> int:
        """How many times it runs the model on an image at most, by the settings that most attacks have; 0: not known.

        For progress bars, and to tell what is worth preparing for.
        """
        if members := self.named_members(norm):
            return sum(member.passes(norm) for _, member in members)
        length = getattr(self, "steps", getattr(self, "queries", -1))
        searches = getattr(self, "restarts", 1) * max(getattr(self, "targets", 1), 1)
        return int((length + 1) * searches * self.eot)

    def versions(self, norm: Norm) -> tuple[int, ...]:
        """Its own, or those of its members."""
        return tuple(version for _, member in self.named_members(norm) for version in member.versions(norm)) or (
            self.version,
        )

    def describe(self) -> str:
        """In short: its name, and the settings that are not as usual. `apgd-t(targets=5)`"""
        if not is_dataclass(self):
            return repr(self)
        name, usual = self.short_name()
        usual = {**{field.name: field.default for field in fields(self)}, **usual}
        values = {key: getattr(self, key) for key in usual}
        unusual = [f"{key}={value}" for key, value in values.items() if value != usual[key]]
        return name + (f"({', '.join(unusual)})" if unusual else "")

    def short_name(self) -> tuple[str, dict[str, Any]]:
        """What it is called, and the settings that the name stands for beside the defaults."""
        return type(self).__name__.lower(), {}


class Prepared(NamedTuple):
    """What an objective trains on: the batch as it came, the input found for it, and numbers for the log."""

    clean: Batch
    x: Tensor
    notes: dict[str, float]


class Losses(NamedTuple):
    total: Tensor  # what is minimised
    logits: Tensor  # on the input that was trained on, for the log
    terms: dict[str, Tensor]  # named parts of the total, for the log
    clean: Tensor | None = None  # logits on the images as they came, if they were needed anyway


@dataclass(frozen=True)
class TrainingContext:
    """What an objective may know of the training that it is set up for."""

    model: nn.Module  # to be looked at, not to be kept: its weights are not the objective's
    data: DataSet
    recipe: Recipe


class Objective:
    """An inner maximisation and an outer loss. A dataclass, whose fields are its settings.

    It may own networks, which `setup` makes, with an optimizer for them, and which `loss` uses: their gradients come
    from the same backward pass as the model's. The recipe's optimizer and schedule, its clipping, SAM and AWP do not
    touch them. Checkpoints hold them and their optimizer, and several processes average their gradients.
    """

    networks: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None  # of `networks`; None: they are not trained
    clip_grad: float | None = None  # largest norm of the gradient of all that `optimizer` trains

    def setup(self, context: TrainingContext) -> None:
        """Called once, when model and data are there, with torch seeded by the recipe. Refuses what it cannot train."""

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        """Find the input to train on. `progress` counts epochs: 2.5 is the middle of the third."""
        return Prepared(batch, batch.x, {})

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        raise NotImplementedError


class Logger(ABC):
    """Takes a training run's numbers as they come. A dataclass, whose fields are its settings.

    Of several processes one has loggers. What fails to be built refuses the run before anything is written.
    """

    client: Any = None  # of the tool behind it

    @abstractmethod
    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        """Called once: the run's folder, its resolved recipe, and the step it starts at, above 0 if it is resumed."""

    @abstractmethod
    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """`train/loss` and its like after some steps, `validation/val_clean` after epochs."""

    def flush(self) -> None:  # noqa: B027  (not every tool has something to do)
        """After each epoch."""

    def close(self) -> None:  # noqa: B027
        """At the end, and when the run is stopped."""


@dataclass(frozen=True)
class Description:
    """What a probe says of itself, for tables and reports."""

    threat: Threat | None = None
    members: tuple[str, ...] = ()  # the attacks of an ensemble, in their order
    versions: tuple[int, ...] = ()  # of the attacks that its facts depend on
    passes: int = 1  # on an example at most; for the progress bar


class Probe:
    """Maps a batch to facts, each with one row per example. Subclasses are frozen dataclasses of their settings.

    (B,) tensors are facts, and so are those with more dimensions that `facts` names, such as one value per block: keep
    them small. Other tensors with more dimensions are pictures, kept for the first few examples only.
    """

    role: ClassVar[Role] = "analysis"
    version: ClassVar[int] = 1  # raised when the facts change for the same settings: stored ones are then made anew
    facts: ClassVar[Mapping[str, str]] = {}  # what each column means

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def describe(self) -> Description:
        return Description()

    @property
    def batches(self) -> int:
        """So many usual batches are given to it at once: more than one, if most examples cost it little."""
        return 1


class Study:
    """Looks at a whole model. Subclasses are frozen dataclasses of their settings.

    A long study is cut into parts, which are computed, stored and resumed one by one; all parts return the same names
    and shapes. The report sees each name as one array, with the parts along its first axis.
    """

    version: ClassVar[int] = 1
    facts: ClassVar[Mapping[str, str]] = {}

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return 1

    def plan(self, model: nn.Module, data: DataSet) -> str:
        """What all parts take, told before the first of them; empty for a study of seconds."""
        return ""

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        raise NotImplementedError


class Split(Protocol):
    """Labelled images in a fixed order."""

    index: Tensor  # int64 (N,): numbers that stay with the examples, whatever part of them is looked at
    labels: Tensor  # int64 (N,)

    def __len__(self) -> int: ...

    def image(self, position: int) -> Image:
        """The stored picture, for augmentation."""
        ...

    def batch(self, positions: Sequence[int]) -> Batch:
        """The pictures as a model sees them when it is measured: no augmentation, one size, in [0, 1]."""
        ...

    def digest(self) -> str:
        """SHA-256 of what is stored of the images: facts are of them alone."""
        ...

    def subset(self, positions: Sequence[int]) -> Split: ...


@dataclass(frozen=True)
class DataSet:
    """Three disjoint splits and what belongs to the data and not to a model.

    `val` is carved out of the official training images and is for choosing; `test` is only measured.
    `columns` are for models of more classes, such as ImageNet's: measuring takes their logits of these classes alone,
    before the prediction and before any attack, to which the other classes do not exist.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # (C, H, W) of a measured image
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    val: Split
    test: Split
    fingerprint: str  # changes with images, labels or their order; a folder's with its paths and sizes
    columns: tuple[int, ...] | None = None  # which of such a model's outputs the classes are, in their order

    def __post_init__(self) -> None:
        if self.columns is None:
            return
        if len(self.columns) != len(self.classes) or min(self.columns) < 0:
            raise BastionError(
                f"data set '{self.name}': columns must be {len(self.classes)} numbers from 0, one of each class, got "
                f"{len(self.columns)}, the least {min(self.columns, default=None)}"
            )
        if twice := [column for column in self.columns if self.columns.count(column) > 1]:
            names = [name for name, column in zip(self.classes, self.columns, strict=True) if column == twice[0]]
            raise BastionError(
                f"data set '{self.name}': classes {' and '.join(names)} are both column {twice[0]}; each needs its own"
            )

    def split(self, name: str) -> Split:
        """`train`, `val` or `test`."""
        split: Split = getattr(self, name)
        return split

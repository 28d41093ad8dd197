"""Contracts between the packages: the data they exchange, and the base classes of plug-ins."""

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
from bastion.suite import FactKind, Role

if TYPE_CHECKING:
    from PIL.Image import Image

    from bastion.recipe import Recipe
    from bastion.threat import Norm, Threat


class Batch(NamedTuple):
    """Examples for a model: pixels in [0, 1], in any memory format."""

    # int64 (B,): the example's number in its data set, which determines all its randomness
    index: Tensor  # type: ignore[assignment]
    x: Tensor  # float (B, C, H, W)
    y: Tensor  # int64 (B,), or soft labels (B, K)
    logits: Tensor | None = None  # (B, K) of the model under attack at x, if known

    def select(self, which: Tensor) -> Batch:
        """Return the examples of a bool mask or of positions."""
        logits = None if self.logits is None else self.logits[which]
        return Batch(self.index[which], self.x[which], self.y[which], logits)

    def at(self, x: Tensor) -> Batch:
        """Return the same examples with other images, without logits."""
        return Batch(self.index, x, self.y)

    def to(self, device: torch.device | str) -> Batch:
        logits = None if self.logits is None else self.logits.to(device)
        return Batch(self.index.to(device), self.x.to(device), self.y.to(device), logits)

    def chunk(self, count: int) -> list[Batch]:
        """Split into `count` parts, the last perhaps smaller, without logits."""
        parts = zip(*(part.chunk(count) for part in self[:3]), strict=True)
        return [Batch(*part) for part in parts]

    @staticmethod
    def cat(batches: Sequence[Batch]) -> Batch:
        """Concatenate batches, without logits."""
        return Batch(*(torch.cat(parts) for parts in zip(*(batch[:3] for batch in batches), strict=True)))

    def check(self, num_classes: int | None, where: str) -> Batch:
        """Return this batch with int64 labels; raise if pixels or labels are not what models and attacks expect.

        `num_classes` None: any number of classes.
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
    """Return class numbers of hard or soft labels."""
    return y if y.ndim == 1 else y.argmax(1)


# What the attention maps of a block are between; `class`: only the class token attends.
Attention = Literal["tokens", "windows", "channels", "class"]


@dataclass(frozen=True)
class Block:
    """One residual block of a backbone."""

    name: str
    module: nn.Module
    attention: Attention | None = None
    map_to: nn.Module | None = None  # the part that is called with the attention map, if softmax does not make the map

    @property
    def attends(self) -> bool:
        """Whether it has self-attention: every token, or every channel, attends to others."""
        return self.attention not in (None, "class")


@dataclass
class Taps:
    """Outputs and attention maps of the latest forward pass inside `tap`, by block name."""

    blocks: dict[str, Tensor] = field(default_factory=dict)
    # After softmax, (B, heads, queries, keys); models with windows have B times the number of windows first.
    # Of a block that attends more than once, the last map.
    attention: dict[str, Tensor] = field(default_factory=dict)


@runtime_checkable
class Tapped(Protocol):
    """A model that shows its blocks and attention maps on demand, as `bastion.models.Classifier` does."""

    def blocks(self) -> list[Block]: ...

    def tap(self, *what: str) -> AbstractContextManager[Taps]: ...


def tapped(model: nn.Module, where: str) -> Tapped:
    """Return the model; raise an error if it does not show its blocks."""
    if not isinstance(model, Tapped):
        raise BastionError(
            f"{where}: which modules of {type(model).__name__} are residual blocks is not known; give a bastion "
            "Classifier, or bastion.wrap(network, blocks=…, attention=…)"
        )
    return model


class Attack(ABC):
    """Returns images of the threat's set around batch.x. Subclasses are frozen dataclasses of their settings."""

    revision: ClassVar[int] = 1  # raised when the same settings give other results: facts are then measured again

    @abstractmethod
    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor: ...

    @property
    def eot(self) -> int:
        """Number of passes that a gradient is averaged over; above one for randomised models."""
        return 1

    def named_members(self, norm: Norm) -> list[tuple[str, Attack]]:
        """Return the attacks of an ensemble, in order, under a threat of this norm."""
        return []

    def passes(self, norm: Norm) -> int:
        """Return the most forward passes per image, besides one on the clean image; 0: not known.

        For progress bars, and to decide whether preparing an accelerated copy is worth it.
        """
        return sum(member.passes(norm) for _, member in self.named_members(norm))

    def revisions(self, norm: Norm) -> tuple[int, ...]:
        """Return its revision, with those of attacks that it is made of, or those of its members."""
        return tuple(each for _, member in self.named_members(norm) for each in member.revisions(norm)) or (
            self.revision,
        )

    def describe(self) -> str:
        """Return its name with the settings that differ from the defaults: `apgd-t(targets=5)`."""
        if not is_dataclass(self):
            return repr(self)
        name, usual = self.short_name()
        usual = {**{field.name: field.default for field in fields(self)}, **usual}
        values = {key: getattr(self, key) for key in usual}
        unusual = [f"{key}={value}" for key, value in values.items() if value != usual[key]]
        return name + (f"({', '.join(unusual)})" if unusual else "")

    def short_name(self) -> tuple[str, dict[str, Any]]:
        """Return its name, and the settings that the name implies besides the defaults."""
        return type(self).__name__.lower(), {}


class Prepared(NamedTuple):
    """Input of an objective's loss: the clean batch, the input found for it, and numbers for the log."""

    clean: Batch
    x: Tensor
    notes: dict[str, float]


class Losses(NamedTuple):
    total: Tensor  # what is minimised
    logits: Tensor  # on the training input, for the log
    terms: dict[str, Tensor]  # named parts of the total, for the log
    clean: Tensor | None = None  # logits on the clean images, if they were computed anyway


@dataclass(frozen=True)
class TrainingContext:
    """Model, data and recipe that an objective is set up for."""

    model: nn.Module  # to inspect, not to keep: its weights are not the objective's
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
    clip_grad: float | None = None  # largest norm of the gradient of `networks`

    def setup(self, context: TrainingContext) -> None:
        """Called once, after model and data are built, with torch seeded by the recipe. Raises if it cannot train."""

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        """Find the input to train on. `progress` counts epochs: 2.5 is the middle of the third."""
        return Prepared(batch, batch.x, {})

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        raise NotImplementedError


class Logger(ABC):
    """Receives a training run's numbers. A dataclass, whose fields are its settings.

    Only one of several processes has loggers. If building one fails, the run is refused before anything is written.
    """

    client: Any = None  # of the tool behind it

    @abstractmethod
    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        """Called once: the run's folder, its resolved recipe, and the step it starts at, above 0 if it is resumed."""

    @abstractmethod
    def write(self, numbers: Mapping[str, float], step: int) -> None:
        """Called with `train/loss` etc. after some steps, `validation/val_clean` etc. after epochs."""

    def flush(self) -> None:  # noqa: B027  (not every tool has something to do)
        """Called after each epoch."""

    def close(self) -> None:  # noqa: B027
        """Called at the end, and when the run is stopped."""


@dataclass(frozen=True)
class Description:
    """Description of a probe for tables and reports."""

    threat: Threat | None = None
    members: tuple[str, ...] = ()  # the attacks of an ensemble, in their order
    revisions: tuple[int, ...] = ()  # of the attacks that its facts depend on
    passes: int = 1  # forward passes on an example that nothing fools; for the progress bar


@dataclass(frozen=True)
class Fact:
    """A column of facts whose values are not just numbers. Tables, intervals and curves go by its kind."""

    meaning: str
    kind: FactKind

    def __str__(self) -> str:
        return self.meaning


def fact_kinds(facts: Mapping[str, str | Fact]) -> dict[str, FactKind]:
    """Return the kinds of the columns that declare one."""
    return {name: each.kind for name, each in facts.items() if isinstance(each, Fact)}


class Probe:
    """Maps a batch to facts, each with one row per example. Subclasses are frozen dataclasses of their settings.

    (B,) tensors are facts, and so are those with more dimensions that `facts` names, such as one value per block: keep
    them small. Other tensors with more dimensions are pictures, kept for the first few examples only.
    """

    role: ClassVar[Role] = "analysis"
    revision: ClassVar[int] = 1  # raised when the same settings give other facts, which are then measured again
    facts: ClassVar[Mapping[str, str | Fact]] = {}  # what each column means, and its kind if it is not just a number
    makes_pictures: ClassVar[bool] = False  # of every example, so `keep="all"` measures again where there are none

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def describe(self) -> Description:
        return Description()

    def revisions(self, model: nn.Module) -> tuple[int, ...]:
        """Return the revisions of what its facts of this model depend on, besides its own."""
        return self.describe().revisions

    @property
    def batches(self) -> int:
        """Number of usual batches that it gets at once; above one if most examples are cheap."""
        return 1


class Study:
    """Looks at a whole model. Subclasses are frozen dataclasses of their settings.

    A long study is cut into parts, which are computed, stored and resumed one by one; all parts return the same names
    and shapes. The report sees each name as one array, with the parts along its first axis.
    """

    revision: ClassVar[int] = 1
    facts: ClassVar[Mapping[str, str]] = {}

    @property
    def revisions(self) -> tuple[int, ...]:
        """Revisions that its facts depend on besides those of its settings."""
        return ()

    @property
    def reads(self) -> Mapping[str, int | None]:
        """How many images it reads of which splits, the first ones; None: all. Facts are of their contents."""
        return {"train": None, "val": None, "test": None}

    def parts(self, model: nn.Module, data: DataSet) -> int:
        return 1

    def cost(self, model: nn.Module, data: DataSet) -> str:
        """Describe the work of all parts, shown before the first; empty for a study of seconds."""
        return ""

    def __call__(self, model: nn.Module, data: DataSet, part: int, *, seed: int) -> dict[str, Tensor]:
        raise NotImplementedError


class Split(Protocol):
    """Labelled images in a fixed order."""

    index: Tensor  # int64 (N,): numbers of the examples, which subsets keep
    labels: Tensor  # int64 (N,)

    def __len__(self) -> int:
        return len(self.index)

    def image(self, position: int) -> Image:
        """Return the stored picture, for augmentation."""
        ...

    def batch(self, positions: Sequence[int]) -> Batch:
        """Return the images as for measuring: no augmentation, one size, in [0, 1]."""
        ...

    def digest(self) -> str:
        """Return the SHA-256 of the stored images, which facts depend on."""
        ...

    def subset(self, positions: Sequence[int]) -> Split: ...


@dataclass(frozen=True)
class DataSet:
    """Three disjoint splits and the metadata of a data set.

    `val` is taken from the official training images and is for model selection; `test` is for measuring only.
    `columns` are for models of more classes, such as ImageNet's: measuring uses only their logits of these classes, for
    predictions and for attacks.
    """

    name: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]  # (C, H, W) of a measured image
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train: Split
    val: Split
    test: Split
    fingerprint: str  # of images, labels and their order; of a folder's paths and sizes
    columns: tuple[int, ...] | None = None  # the outputs of such a model for the classes, in order
    skipped: tuple[str, ...] = ()  # paths of pictures that are left out because they cannot be read
    preprocessing: str = ""  # how its pictures are made images of one size, where they are not

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

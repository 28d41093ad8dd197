"""Recipes: everything that determines a run, as checked and hashed data. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from bastion import storage
from bastion.errors import BastionError
from bastion.files import is_folder
from bastion.plugins import headlines
from bastion.recipe_files import Changes, Files, Kind, merge, parse_changes
from bastion.recipe_yaml import read_fractions, read_spec
from bastion.registry import canonical
from bastion.settings import (
    REGISTRY,
    AtLeastOne,
    Count,
    NotNegative,
    Positive,
    Probability,
    SettingsError,
    Share,
    Smoothing,
    explain,
    make_strict,
)

NON_HASHED = {"about", "expect", "checkpoint", "log_every", "loggers", "workers"}  # keys that do not affect the weights


def _ascending(pair: tuple[float, float]) -> tuple[float, float]:
    if not 0 < pair[0] <= pair[1]:
        raise ValueError("must be two numbers above 0, the smaller one first")
    return pair


def _parts(pair: tuple[float, float]) -> tuple[float, float]:
    if pair[1] > 1:
        raise ValueError("must be parts of a patch, at most 1")
    return pair


ProperShare = Annotated[float, Gt(0), Lt(1)]  # neither nothing nor all
Range = Annotated[tuple[float, float], AfterValidator(_ascending)]


class Section(BaseModel):
    """A recipe, a suite or a part of one: its values are checked as strictly as settings of plug-ins."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        make_strict(cls)
        super().__init_subclass__(**kwargs)


class Spec(BaseModel):
    """A plug-in by name with its parameters: `{name: pgd, steps: 20}`, `pgd:steps=20`, or just `pgd`.

    Its registry checks the rest.

    In Python also the plug-in itself, which is identified by its settings.
    """

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str
    _made: Any = PrivateAttr(None)

    @model_validator(mode="wrap")
    @classmethod
    def _from_name_or_object(cls, value: Any, build: ModelWrapValidatorHandler[Self]) -> Self:
        if isinstance(value, str):
            return build(read_spec(value))
        if isinstance(value, type):
            raise SettingsError("", (), f"give {value.__name__}(), not the class")
        if isinstance(value, Mapping | BaseModel) or type(value).__module__ == "builtins":
            return build(value)
        spec = build({"name": type(value).__name__.lower(), **canonical(value)})
        spec._made = value
        return spec

    def plain(self) -> Any:
        """Return the spec as a dict, or the plug-in itself if one was given."""
        return {"name": self.name, **(self.model_extra or {})} if self._made is None else self._made


def plugin(kind: str) -> Any:
    """Mark a spec's registry in the JSON schema."""
    return Field(json_schema_extra={REGISTRY: kind})


def named_data(text: str) -> dict[str, Any]:
    """Parse `cifar10`, `imagefolder:root=/data/cats,size=160`, or the path of a folder of class folders."""
    if is_folder(text) or ("/" in text.partition(":")[0] and not _is_family(text.partition("/")[0])):
        return {"name": "imagefolder", "root": text}
    return read_spec(text)


def _is_family(name: str) -> bool:
    """Whether names of data sets begin with this, as `family/member`."""
    return any(known.startswith(f"{name}/") for known, _ in headlines("datasets"))


def _data(value: Any) -> Any:
    return named_data(value) if isinstance(value, str) else value


DataSpec = Annotated[Spec, plugin("data set"), BeforeValidator(_data)]


class Normalisation(Section):
    mean: tuple[float, ...]  # one for each channel, of pixels from 0 to 1
    std: tuple[float, ...]  # likewise


class Patchwise(Section):
    """Patch-wise augmentation (RVT, Mao et al. 2022); `crop`, `noise` and `hflip` are shares of patches."""

    size: Annotated[int, Ge(2)] | None = None  # pixels; None: 16, or less so that there are at least 7 a side
    prob: Probability = 0.5  # of an image to be changed: half of a step is of images that are not
    crop: Probability = 0.1  # of patches: a square of `scale` of its area is blown up to the patch
    scale: Annotated[Range, AfterValidator(_parts)] = (0.85, 1.0)  # least and greatest
    noise: Probability = 0.1  # of patches: Gaussian noise is added
    sigma: NotNegative = 0.01  # of Gaussian noise, in pixels from 0 to 1
    hflip: Probability = 0.1  # of patches: mirrored


class Augment(Section):
    """Augmentation of training images, by timm and torchvision; the names are theirs."""

    crop: Literal["pad", "resized", "none"] = "pad"  # shift by up to `padding`; random resized crop; or neither
    padding: Annotated[int, Ge(0), Le(1024)] = 4  # pixels
    scale: Range = (0.08, 1.0)  # of a resized crop: the least and greatest share of the area
    ratio: Range = (0.75, 4 / 3)  # of a resized crop: its width over its height
    hflip: Probability = 0.5  # probability of a mirror image
    color_jitter: NotNegative = 0.0  # strength of changes of brightness, contrast and saturation
    auto_augment: str | None = None  # cifar10, or a timm policy such as rand-m9-mstd0.5-inc1; no color_jitter beside it
    erasing: Probability = 0.0  # probability that a rectangle is erased
    patchwise: Patchwise | None = None  # patch by patch
    mixup: NotNegative = 0.0  # alpha of mixup; 0: none
    cutmix: NotNegative = 0.0  # alpha of CutMix; 0: none
    mix_prob: Probability = 1.0  # that a batch is mixed at all
    switch_prob: Probability = 0.5  # of CutMix, where both are on
    repeats: AtLeastOne = 1  # differently augmented copies of each image in a batch
    progressive: NotNegative = 0.0  # epochs in which all but crop and flip grow from nothing to full strength


class Extra(Section):
    """More training images, of the same classes: synthetic ones with pseudo-labels, pre-distorted copies."""

    data: DataSpec  # its training images
    share: ProperShare | None = None  # of each batch; None: they join the others, and an epoch is longer


def _listed(value: Any) -> Any:
    """Accept one or several: `{…}` or `[{…}, {…}]`."""
    return [value] if isinstance(value, Mapping | Extra) else value or []


def _named(value: Any) -> Any:
    """Accept one or several: `wandb`, `{name: wandb, …}` or a list of them."""
    return value if isinstance(value, list | tuple) else [] if value is None else [value]


class Init(Section):
    """Weights to start from: a bastion model of the same family.

    Position embeddings are resized; the head is initialised at random if the number of classes differs. All else must
    fit, except the parts of the network that `new` names, which are initialised at random.
    """

    from_: str = Field(alias="from")  # a run, a model folder or zoo/NAME
    new: tuple[str, ...] = ()  # such as [patch_embed] for a new stem, or [head]


class Perturb(Section):
    """Train at adversarially perturbed weights: two gradient passes per step.

    `sam` (Foret et al. 2021): all weights move along the gradient by `size` together. `awp` (Wu et al. 2020): each
    matrix and filter bank moves by `size` of its own length.
    """

    name: Literal["sam", "awp"]  # which of the two
    size: Positive  # how far the weights move
    after: NotNegative = 0.0  # epochs without it first


class Optimizer(Section):
    name: Literal["adamw", "sgd"] = "adamw"  # torch's own
    lr: Positive = 1e-3  # the highest
    lr_rule: Literal["none", "linear", "sqrt"] = "none"  # `lr` is that for a batch of `lr_batch`, and grows with it
    lr_batch: AtLeastOne = 512  # of `lr_rule`
    weight_decay: NotNegative = 0.05  # not on norms, biases and position embeddings
    betas: tuple[Smoothing, Smoothing] = (0.9, 0.999)  # adamw
    momentum: Smoothing = 0.9  # sgd
    nesterov: bool = True  # sgd
    clip_grad: Positive | None = None  # largest norm of the whole gradient
    l1: NotNegative = 0.0  # times the sum of all weights' absolute values, added to the loss
    perturb: Perturb | None = None  # SAM or AWP

    def peak(self, batch: int) -> float:
        """The highest learning rate for this batch size."""
        power = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}[self.lr_rule]
        return self.lr * math.pow(batch / self.lr_batch, power)


class Schedule(Section):
    """The learning rate, step by step.

    `cosine`, `steps` and `constant` start with a linear warm-up and end with `cooldown_epochs` at the last rate;
    `steps` multiplies by `decay` every `decay_epochs`. `one-cycle` (Smith and Topin 2018) rises for `rise` of the run
    from a 25th of the rate, then falls to its 250,000th, and moves momentum the other way.
    """

    name: Literal["cosine", "steps", "constant", "one-cycle"] = "cosine"  # the form
    epochs: AtLeastOne = 10  # passes over the training images
    warmup_epochs: NotNegative = 0.0  # in which the rate grows from `warmup_lr`
    warmup_lr: NotNegative = 1e-6  # where the warm-up starts
    cooldown_epochs: NotNegative = 0.0  # at the end, counted in `epochs`
    min_lr: NotNegative = 1e-5  # cosine: where it ends
    decay: Share = 0.1  # steps: the factor
    decay_epochs: Positive = 30.0  # steps: how often
    rise: ProperShare = 0.3  # one-cycle: share of the run in which the rate rises
    momentum_range: tuple[Smoothing, Smoothing] = (0.85, 0.95)  # one-cycle: momentum's least and greatest

    @model_validator(mode="after")
    def _check_epochs(self) -> Schedule:
        if self.warmup_epochs + self.cooldown_epochs >= self.epochs:
            raise ValueError(
                f"warmup_epochs ({self.warmup_epochs:g}) and cooldown_epochs ({self.cooldown_epochs:g}) must be less "
                f"than epochs ({self.epochs})"
            )
        if self.name == "one-cycle" and (self.warmup_epochs or self.cooldown_epochs):
            raise ValueError("one-cycle has its own warm-up (`rise`); set warmup_epochs and cooldown_epochs to 0")
        return self


class Validate(Section):
    """What is measured after each epoch on held-out images, and which epoch's model is kept."""

    every: AtLeastOne = 1  # epochs
    when: Literal["epochs", "end"] = "epochs"  # end: models are kept in `epochs/`, and measured after training
    limit: AtLeastOne | None = None  # held-out images to measure at most
    train: Count = 0  # training images to measure too: the gap shows robust over-fitting
    attack: Annotated[Spec, plugin("attack")] | None = None  # with the objective's threat, or the one given here
    threat: dict[str, Any] | None = None  # {norm: …, eps: …}, if not the objective's
    choose: Literal["last", "best"] = "last"  # best: by robust accuracy if there is an attack, else by clean


class Checkpoint(Section):
    minutes: Positive = 10.0  # besides one at the end of each epoch
    keep: AtLeastOne = 2  # latest checkpoints to keep


class Recipe(Section):
    about: str = ""  # its first line is what `bastion list recipes` says
    expect: dict[str, Any] = Field(default_factory=dict)  # what this recipe should reach
    seed: int = 0  # of weights, batches, augmentation and attacks
    data: DataSpec  # to train on
    train_limit: AtLeastOne | None = None  # use only this many training images of `data`
    extra: Annotated[tuple[Extra, ...], BeforeValidator(_listed)] = ()  # more training images
    model: Annotated[Spec, plugin("model")]  # the architecture
    normalize: Literal["data", "none"] | Normalisation = "data"  # "none": the network sees raw pixels
    resize: Literal["bilinear", "bicubic"] | None = None  # bring images to the network's size, inside the model
    init: Init | None = None  # weights to start from
    objective: Annotated[Spec, plugin("objective")]  # what is minimised, on which inputs
    augment: Augment = Augment()  # how training images are changed
    optimizer: Optimizer = Optimizer()  # how weights follow the gradient
    schedule: Schedule = Schedule()  # epochs and learning rate
    batch: AtLeastOne = 128  # images per step, over all processes
    accumulate: AtLeastOne = 1  # split the batch into this many parts, to save memory
    sync_batchnorm: bool = True  # statistics over the batch of all processes
    parallel: Literal["ddp", "fsdp"] = "ddp"  # several processes: each has all weights, or its part of them
    precision: Literal["fp32", "bf16"] = "fp32"  # bf16: passes of training under autocast
    channels_last: bool = False  # faster for most CNNs; changes results by rounding only
    ema: ProperShare | None = None  # decay of an average of the weights, which is then what is kept
    validate_: Validate = Field(Validate(), alias="validate")  # what is measured while training
    checkpoint: Checkpoint = Checkpoint()  # from which a stopped run resumes
    log_every: AtLeastOne = 10  # steps
    loggers: Annotated[tuple[Annotated[Spec, plugin("logger")], ...], BeforeValidator(_named)] = (
        Spec(name="tensorboard"),
    )  # where the numbers go, besides log.jsonl
    workers: Annotated[int, Ge(0), Le(1024)] = 0  # data loading processes

    @model_validator(mode="after")
    def _check_parts(self) -> Recipe:
        if self.batch % self.accumulate:
            raise ValueError(f"accumulate: {self.batch} images cannot be cut into {self.accumulate} equal parts")
        return self

    @model_validator(mode="after")
    def _check_rates(self) -> Recipe:
        peak, least = self.optimizer.peak(self.batch), self.schedule.min_lr
        if self.schedule.name == "cosine" and least > peak:
            raise ValueError(f"schedule.min_lr: {least:g} is above the highest rate, {peak:g}; make it smaller")
        return self

    def resolved(self) -> dict[str, Any]:
        return self.model_dump(mode="json", by_alias=True)

    def hashed_fields(self) -> dict[str, Any]:
        """Return the fields that determine the weights; recipes with equal ones are the same run."""
        return {key: value for key, value in self.resolved().items() if key not in NON_HASHED}

    def hash(self) -> str:
        """Hash the fields that differ from the defaults, so that new keys do not change old hashes."""
        changed = self.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude=NON_HASHED)
        return storage.fingerprint(changed)


S = TypeVar("S", bound=BaseModel)


def load_recipe(
    name: str | Path | Mapping[str, Any], changes: Changes = (), parts: Mapping[str, Any] | None = None
) -> Recipe:
    """Load a recipe by its shipped name (`tiny/demo-robust`), its file, or its content.

    `parts`, in the format of a file, and then `a.b=c` changes override it.
    """

    def on_top(content: Mapping[str, Any]) -> dict[str, Any]:
        return merge(merge(content, parts or {}, Recipe), parse_changes(changes, Recipe), Recipe)

    return load_yaml(Recipe, "recipe", name, on_top)


def load_yaml(
    schema: type[S],
    kind: Kind,
    name: str | Path | Mapping[str, Any],
    change: Callable[[Mapping[str, Any]], Mapping[str, Any]],
) -> S:
    """Load a shipped file, a file or a mapping with what it extends, apply changes and validate it."""
    files = Files(kind, schema)
    where = kind if isinstance(name, Mapping) else name
    try:
        content = (
            files.extended(read_fractions(name), Path(kind)) if isinstance(name, Mapping) else files.named(str(name))
        )
        return schema.model_validate(change(content))
    except ValidationError as error:
        mistake = explain(error, "", schema.model_json_schema, ["extends"])
        raise BastionError(f"{where}: {mistake}") from error
    except (ArithmeticError, RecursionError) as error:
        raise BastionError(f"{where}: numbers too large, or sections too deep in each other ({error})") from error


def differences(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> list[str]:
    """Return `a.b: 1 -> 2` for every value that differs."""
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{path}{key}.")
        elif before != after:
            lines.append(f"{path}{key}: {before!r} -> {after!r}")
    return lines

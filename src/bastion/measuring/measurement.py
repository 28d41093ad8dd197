"""`Measurement`: the stored description of a measurement (model, data, cases, aggregates, summary). No torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bastion.measuring.intervals import Estimate
from bastion.measuring.order import measured_positions
from bastion.measuring.store import Column
from bastion.suite import CORRECT, SHARES, FactKind, Role, written

PHASES = ("survived", "sampled", "lost")  # the columns of a probe in two phases
# Kinds by the names of columns, for measurements from before probes declared them.
KINDS_BY_NAME: dict[str, FactKind] = {
    CORRECT: "accuracy",
    "share_right": "accuracy",
    "flip_rate": "error rate",
    "confidence": "share",
    "distance": "distance",
    **dict.fromkeys(PHASES, "phase"),
}
TWO_PHASE = "two-phase estimate"
MOST = 50_000_000  # examples, three times ImageNet-21k
Finite = Annotated[float, Field(allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
NORM_SIGNS = {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


def _check_origin(origin: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(origin.get("versions", {}), dict):
        raise ValueError("versions must be keys and values")
    return origin


Origin = Annotated[dict[str, Any], AfterValidator(_check_origin)]


class MeasuredThreat(_Part):
    norm: str
    eps: NotNegative

    def __str__(self) -> str:
        return f"{NORM_SIGNS.get(self.norm, self.norm)} ≤ {written(self.eps)}"


class MeasuredCase(_Part):
    """A probe on one variant of the data, or a study."""

    label: str
    kind: str
    role: Role
    store: str  # its folder in `facts/`
    key: str = ""  # hash of settings, versions and variant of the data, not of the seed; older ones have none
    n: int = Field(ge=1, le=MOST)  # examples; parts of a study
    spec: dict[str, Any]
    at: dict[str, Any] = {}  # the values of the suite's axes
    data: dict[str, Any] = {}  # changes to the settings of the data set
    threat: MeasuredThreat | None = None
    radii: tuple[NotNegative, ...] = ()  # of its security curve
    adapted_to: int | None = Field(None, ge=1)  # image size that the model's position embeddings were interpolated for
    members: tuple[str, ...] = ()  # of an ensemble of attacks
    columns: tuple[str, ...]
    meanings: dict[str, str] = {}
    kinds: dict[str, FactKind] | None = None  # of columns that are not just numbers; None: see KINDS_BY_NAME

    def kind_of(self, column: str) -> FactKind:
        """Return what a column is, as the probe declared it."""
        return (KINDS_BY_NAME if self.kinds is None else self.kinds).get(column, "number")

    @property
    def has_accuracy(self) -> bool:
        return self.kind == "probes" and CORRECT in self.columns

    @property
    def is_two_phase(self) -> bool:
        return all(name in self.columns and self.kind_of(name) == "phase" for name in PHASES)

    @property
    def minimal_distance(self) -> str | None:
        """The column of distances to the nearest adversarial example, if no eps bounds them: there is no accuracy."""
        if self.kind != "probes" or self.has_accuracy:
            return None
        return next((name for name in self.columns if self.kind_of(name) == "distance"), None)

    @property
    def qualifier(self) -> str:
        """`two-phase estimate` if it is one and the label does not say so, else empty."""
        return TWO_PHASE if self.is_two_phase and "two-phase" not in self.label else ""


class MeasuredAggregate(_Part):
    kind: str  # worst, mean, errors or sum
    members: dict[str, Finite]  # labels of cases and their weights
    column: str = CORRECT
    column_kind: FactKind | None = None  # None: see KINDS_BY_NAME

    @property
    def kind_of_column(self) -> FactKind:
        """What its column is, as the members' probes declared it."""
        return self.column_kind or KINDS_BY_NAME.get(self.column, "number")

    @property
    def is_accuracy(self) -> bool:
        return self.kind in ("worst", "mean") and self.kind_of_column == "accuracy"

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of an example's value, if the column lies in [0, 1]."""
        if self.kind_of_column not in SHARES:
            return None
        weights = self.members.values() if self.kind in ("errors", "sum") else [1.0]
        return sum(each for each in weights if each < 0), sum(each for each in weights if each > 0)


class Published(_Part):
    """Numbers that a paper reports for the run's recipe."""

    numbers: dict[str, Finite]  # by label, as fractions
    source: str  # `Table 1 of Tang et al. 2022`
    note: str = ""  # such as why a correct attack cannot reproduce them

    def __str__(self) -> str:
        return "; ".join(filter(None, [self.source, self.note]))


class Measurement(_Part):
    """Content of `measurements/*.json`."""

    created: str
    command: str
    seed: int
    versions: dict[str, str]
    machine: dict[str, Any]
    model: str
    weights: str
    source: str = ""  # of a network that a function in a file returns: `path.py:function`, resolved
    data: dict[str, str]  # name, split, fingerprint and digest of its images
    classes: tuple[str, ...]
    suite: str
    n: int = Field(ge=1, le=MOST)
    # If measuring stopped early: the n examples are the first in random order of this many. None: the first n.
    population: int | None = Field(None, ge=1, le=MOST)
    cases: tuple[MeasuredCase, ...] = Field(min_length=1)
    aggregates: dict[str, MeasuredAggregate] = {}
    published: Published | None = None
    notes: tuple[str, ...] = ()  # on what the suite has that is not for these data
    # Several if versions, devices or machines are mixed.
    origins: tuple[Origin, ...] = ()
    parameters: int | None = Field(None, ge=0, le=10**15)  # None: measured before they were counted
    macs: int | None = Field(None, ge=0, le=10**18)  # multiply-accumulates per image; None: not known
    category: str = ""  # CNN, Transformer or hybrid, where the model's family declares it
    blocks: tuple[str, ...] = ()  # names of its residual blocks, where they are known
    summary: dict[str, Estimate] = {}  # `Facts.numbers`, so that leaderboards need not read facts
    scalars: dict[str, Finite] = {}  # single numbers of studies by label/name, for leaderboards
    doubts: tuple[str, ...] = ()  # codes of the sanity checks that warn
    # Of one worker per example, or part of a study, by label; of what the command that wrote this has measured.
    seconds: dict[str, NotNegative] = {}
    skipped: tuple[str, ...] = ()  # paths of the data set's pictures that could not be read, and are in no split
    preprocessing: str = ""  # of pictures of a folder, such as "224 pixels, crop 0.875, bicubic"

    def bounds(self, label: str) -> tuple[float, float] | None:
        """Return the bounds of an example's value in an aggregate; None if it has none, and for a probe."""
        return self.aggregates[label].bounds if label in self.aggregates else None

    @property
    def probes(self) -> list[MeasuredCase]:
        return [case for case in self.cases if case.kind == "probes"]

    @property
    def studies(self) -> list[MeasuredCase]:
        return [case for case in self.cases if case.kind == "studies"]

    @property
    def identity(self) -> str:
        """The folder in `facts/` of this model on this data: the same for all cases."""
        return self.cases[0].store.partition("/")[0]

    @model_validator(mode="after")
    def _check_names(self) -> Measurement:
        if missing := {"name", "split", "fingerprint"} - self.data.keys():
            raise ValueError(f"data: has no {min(missing)}")
        labels = {case.label for case in self.cases}
        for name, aggregate in self.aggregates.items():
            if not aggregate.members or not aggregate.members.keys() <= labels:
                raise ValueError(f"aggregates.{name}: its members are not labels of cases")
        if self.population is not None and self.population < self.n:
            raise ValueError(f"population: less than n, {self.n}")
        return self

    @model_validator(mode="after")
    def _check_summary(self) -> Measurement:
        shares = {case.label for case in self.cases}
        shares |= {name for name, aggregate in self.aggregates.items() if aggregate.is_accuracy}
        for name, each in self.summary.items():
            if each.n < 0 or (name in shares and (each.value < 0 or each.value > 1)):  # NaN: nobody was sampled
                raise ValueError(f"summary.{name}: out of bounds")
        return self

    def positions(self, case: MeasuredCase) -> Column:
        """Return the positions of a probe's examples, or the numbers of a study's parts."""
        return measured_positions(case.n, self.population if case.kind == "probes" else None)


def is_of_earlier_code(about: Measurement, others: Iterable[Measurement]) -> bool:
    """Whether the newest measurement of this model (its name and weights, on this data) found it to be another one.

    Its code or attributes were changed in between. Several identities with other names or weights are several models.
    """

    def model(each: Measurement) -> tuple[object, ...]:
        return each.model, each.weights, each.data, each.preprocessing

    same = [about, *(each for each in others if model(each) == model(about))]
    return max(same, key=lambda each: each.created).identity != about.identity


def adaptation(about: Measurement) -> str:
    """Return a note on the image sizes that the model was adapted to; empty if it was not."""
    sizes = sorted({case.adapted_to for case in about.cases if case.adapted_to})
    return f"position embeddings were interpolated for images of {', '.join(map(str, sizes))} pixels" if sizes else ""


def unreadable(about: Measurement) -> str:
    """Return a note on pictures that were left out because they cannot be read; empty if there are none."""
    some = ", ".join(about.skipped[:3]) + (" …" if about.skipped[3:] else "")
    return f"{len(about.skipped)} pictures of the data set cannot be read and are left out: {some}" if some else ""


def mixture(about: Measurement) -> str:
    """Return a note on how the facts' origins differ, such as `torch 2.12.0 and 2.13.0`; empty if they do not."""
    flat = [{**origin, **origin.get("versions", {})} for origin in about.origins]
    keys = [key for key in (flat[0] if flat else {}) if key != "versions"]
    differing = []
    for key in keys:
        values = sorted({str(origin.get(key)) for origin in flat})
        if len(values) > 1:
            differing.append(f"{key.replace('_', ' ')} {' and '.join(values)}")
    return f"the facts were measured with different {', '.join(differing)}" if differing else ""

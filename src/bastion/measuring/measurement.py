"""`Measurement`: the stored description of a measurement (model, data, cases, aggregates, summary). No torch."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from bastion.measuring.intervals import Estimate
from bastion.measuring.order import measured_positions
from bastion.measuring.store import Column
from bastion.suite import CORRECT, SHARE_RIGHT, SHARES, Role, written

DISTANCE = "distance"  # of an adversarial example: the column of `distortion`
PHASES = ("survived", "sampled", "lost")  # the columns of a probe in two phases
TWO_PHASE = "two-phase estimate"
MOST = 50_000_000  # examples, three times ImageNet-21k
NORMS = {"linf": "ℓ∞", "l2": "ℓ2", "l1": "ℓ1"}


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MeasuredThreat(_Part):
    norm: str
    eps: float

    def __str__(self) -> str:
        return f"{NORMS.get(self.norm, self.norm)} ≤ {written(self.eps)}"


class MeasuredCase(_Part):
    """A probe on one variant of the data, or a study."""

    label: str
    kind: str
    role: Role
    store: str  # its folder in `facts/`
    n: int = Field(ge=1, le=MOST)  # examples; parts of a study
    spec: dict[str, Any]
    at: dict[str, Any] = {}  # the values of the suite's axes
    data: dict[str, Any] = {}  # changes to the settings of the data set
    threat: MeasuredThreat | None = None
    radii: tuple[float, ...] = ()  # of its security curve
    adapted_to: int | None = None  # image size that the model's position embeddings were interpolated for
    members: tuple[str, ...] = ()  # of an ensemble of attacks
    columns: tuple[str, ...]
    meanings: dict[str, str] = {}

    @property
    def is_two_phase(self) -> bool:
        return {*PHASES} <= {*self.columns}

    @property
    def mark(self) -> str:
        """`two-phase estimate` if it is one and the label does not say so, else empty."""
        return TWO_PHASE if self.is_two_phase and "two-phase" not in self.label else ""


class MeasuredAggregate(_Part):
    kind: str  # worst, mean, errors or sum
    members: dict[str, float]  # labels of cases and their weights
    column: str = CORRECT

    @property
    def is_accuracy(self) -> bool:
        return self.kind in ("worst", "mean") and self.column in (CORRECT, SHARE_RIGHT)

    @property
    def bounds(self) -> tuple[float, float] | None:
        """Bounds of an example's value, if the column lies in [0, 1]."""
        if self.column not in SHARES:
            return None
        weights = self.members.values() if self.kind in ("errors", "sum") else [1.0]
        return sum(each for each in weights if each < 0), sum(each for each in weights if each > 0)


class Published(_Part):
    """Numbers that a paper reports for the run's recipe."""

    numbers: dict[str, float]  # by label, as fractions
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
    cases: tuple[MeasuredCase, ...]
    aggregates: dict[str, MeasuredAggregate] = {}
    published: Published | None = None
    origins: tuple[dict[str, Any], ...] = ()  # several if versions, devices or machines are mixed
    parameters: int | None = None  # of the model; None: measured before they were counted
    category: str = ""  # CNN, Transformer or hybrid, where the model's family declares it
    blocks: tuple[str, ...] = ()  # names of its residual blocks, where they are known
    summary: dict[str, Estimate] = {}  # `Facts.numbers`, so that leaderboards need not read facts
    scalars: dict[str, float] = {}  # single numbers of studies by label/name, for leaderboards
    doubts: tuple[str, ...] = ()  # codes of the sanity checks that warn
    # Of one worker per example, or part of a study, by label; of what the command that wrote this has measured.
    seconds: dict[str, float] = {}
    skipped: tuple[str, ...] = ()  # paths of the data set's pictures that could not be read, and are in no split
    preprocessing: str = ""  # of pictures of a folder, such as "224 pixels, crop 0.875, bicubic"

    def positions(self, case: MeasuredCase) -> Column:
        """Return the positions of a probe's examples, or the numbers of a study's parts."""
        return measured_positions(case.n, self.population if case.kind == "probes" else None)


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

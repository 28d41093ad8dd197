"""The record of a measurement: what its numbers are of, for people and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from bastion import rng
from bastion.errors import BastionError
from bastion.measuring.find import function_path
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.measuring.order import measured_positions
from bastion.measuring.plan import Plan, suite_name
from bastion.measuring.published import published
from bastion.measuring.worker import BuiltCase, Worker
from bastion.models import complexity
from bastion.models.load import is_function
from bastion.registry import canonical
from bastion.run import environment
from bastion.suite import CORRECT, SHARES, Aggregate, FactKind, Suite, written
from bastion.types import DataSet, Description, Probe, Tapped, fact_kinds


def record(plan: Plan, n: int, seconds: dict[str, float]) -> Measurement:
    """Describe the measurement of the first n examples of the plan's order."""
    worker, suite = plan.worker, plan.worker.job.suite
    population = len(plan.order) if n < len(plan.order) else None
    examples, origins, cases = measured_positions(n, population), [], []
    for case in worker.cases:
        positions = examples if isinstance(case.built, Probe) else np.arange(worker.parts(case))
        cases.append(_case(worker, case, len(positions)))
        origins += [origin for origin in worker.store(case).origins(positions) if origin not in origins]
    model, data, given = worker.model.original, worker.data(worker.cases[0]), plan.request.model
    return Measurement(
        **environment(worker.job.seed),
        model=plan.name,
        weights=plan.identity.weights,
        source=function_path(given) if isinstance(given, str | Path) and is_function(given) else "",
        parameters=complexity.parameters(model),
        macs=_macs(model, data.shape),
        category=getattr(model, "category", None) or "",
        blocks=_block_names(model),
        data=plan.identity.data,
        classes=data.classes,
        suite=suite_name(plan.request.suite),
        n=n,
        population=population,
        cases=tuple(cases),
        aggregates={
            name: _aggregate(each, suite.members(name), cases)
            for name, each in suite.aggregates_on(plan.data.name).items()
        },
        published=published(plan.run.recipe(), suite, plan.unchanged, cases, plan.data, plan.request.split),
        notes=tuple(_notes(suite, plan.data)),
        origins=tuple(origins),
        seconds=seconds,
        skipped=data.skipped,
        preprocessing=data.preprocessing,
    )


def _macs(model: nn.Module, shape: tuple[int, int, int]) -> int | None:
    """Return the multiply-accumulates per image; None for a network that does not run as they are counted."""
    try:
        with rng.preserved():
            return complexity.macs(model, shape)
    except Exception:  # a user's network may raise anything
        return None


def _notes(suite: Suite, data: DataSet) -> Iterator[str]:
    """Yield what is not for these data: aggregates that are left out, values of axes for images of another size."""
    omitted = [name for name in suite.aggregates if name not in suite.aggregates_on(data.name)]
    if omitted:
        names = sorted({name for each in omitted for name in suite.aggregates[each].only_for})
        yield f"left out: {', '.join(omitted)} (only for {' or '.join(names)})"
    side = max(data.shape[1:])
    for name, axis in suite.axes.items():
        if axis.image_size not in (None, side):
            values = ", ".join(map(written, axis.to))
            yield (
                f"{name} = {values} is for images of {axis.image_size} pixels, and these have {side}; give another "
                f"value with --set {name}=…"
            )


def _case(worker: Worker, case: BuiltCase, n: int) -> MeasuredCase:
    built, store = case.built, worker.store(case)
    described = built.describe() if isinstance(built, Probe) else Description()
    columns = tuple(store.columns())
    kinds: dict[str, FactKind] = {CORRECT: "accuracy", **fact_kinds(built.facts)}
    return MeasuredCase(
        label=case.label,
        kind=case.kind,
        role=case.role or (built.role if isinstance(built, Probe) else "analysis"),
        store=store.name,
        key=worker.key(case),
        n=n,
        spec=canonical(built),
        at=case.at,
        data=case.data,
        threat=MeasuredThreat(**asdict(described.threat)) if described.threat else None,
        radii=worker.job.suite.curves.get(case.base, ()),
        adapted_to=None if worker.model_for(case) is worker.model else worker.data(case).shape[1],
        members=described.members,
        columns=columns,
        meanings={name: str(each) for name, each in built.facts.items()},
        kinds={name: kind for name, kind in kinds.items() if name in columns},
    )


def _aggregate(given: Aggregate, members: dict[str, float], cases: Sequence[MeasuredCase]) -> MeasuredAggregate:
    kinds = {case.kind_of(given.column) for case in cases if case.label in members}
    if len(kinds) > 1:
        kinds = {"share" if kinds <= {*SHARES} else "number"}
    return MeasuredAggregate(kind=given.kind, members=members, column=given.column, column_kind=kinds.pop())


def _block_names(model: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(block.name for block in model.blocks()) if isinstance(model, Tapped) else ()
    except BastionError:  # the family does not declare them
        return ()

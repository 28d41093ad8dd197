"""The record of a measurement: what its numbers are of, for people and for reports."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
from torch import nn

from bastion.errors import BastionError
from bastion.measuring.find import function_path
from bastion.measuring.measurement import MeasuredAggregate, MeasuredCase, MeasuredThreat, Measurement
from bastion.measuring.order import measured_positions
from bastion.measuring.plan import Plan, suite_name
from bastion.measuring.published import published
from bastion.measuring.worker import Worker
from bastion.models.complexity import parameters
from bastion.models.load import is_function
from bastion.registry import canonical
from bastion.run import environment
from bastion.suite import Case
from bastion.types import Description, Probe, Study, Tapped


def record(plan: Plan, n: int, seconds: dict[str, float]) -> Measurement:
    """Describe the measurement of the first n examples of the plan's order."""
    worker, suite = plan.worker, plan.worker.job.suite
    population = len(plan.order) if n < len(plan.order) else None
    examples, origins, cases = measured_positions(n, population), [], []
    for case, built in zip(worker.cases, worker.built, strict=True):
        positions = examples if isinstance(built, Probe) else np.arange(worker.parts(case))
        cases.append(_case(worker, case, built, len(positions)))
        origins += [origin for origin in worker.store(case).origins(positions) if origin not in origins]
    model, data, given = worker.model.given, worker.data(worker.cases[0]), plan.request.model
    return Measurement(
        **environment(worker.job.seed),
        model=plan.name,
        weights=plan.identity.weights,
        source=function_path(given) if isinstance(given, str | Path) and is_function(given) else "",
        parameters=parameters(model),
        category=getattr(model, "category", None) or "",
        blocks=_block_names(model),
        data=plan.identity.data,
        classes=data.classes,
        suite=suite_name(plan.request.suite),
        n=n,
        population=population,
        cases=tuple(cases),
        aggregates={
            name: MeasuredAggregate(kind=each.kind, members=suite.members(name), column=each.column)
            for name, each in suite.aggregates.items()
        },
        published=published(plan.run.recipe(), suite, cases, plan.identity.data),
        origins=tuple(origins),
        seconds=seconds,
        skipped=data.skipped,
        preprocessing=data.preprocessing,
    )


def _case(worker: Worker, case: Case, built: Probe | Study, n: int) -> MeasuredCase:
    described = built.describe() if isinstance(built, Probe) else Description()
    store = worker.store(case)
    return MeasuredCase(
        label=case.label,
        kind=case.kind,
        role=case.role or (built.role if isinstance(built, Probe) else "analysis"),
        store=store.name,
        n=n,
        spec=canonical(built),
        at=case.at,
        data=case.data,
        threat=MeasuredThreat(**asdict(described.threat)) if described.threat else None,
        radii=worker.job.suite.curves.get(case.base, ()),
        adapted_to=None if worker.model_for(case) is worker.model else worker.data(case).shape[1],
        members=described.members,
        columns=tuple(store.columns()),
        meanings=dict(built.facts),
    )


def _block_names(model: nn.Module) -> tuple[str, ...]:
    try:
        return tuple(block.name for block in model.blocks()) if isinstance(model, Tapped) else ()
    except BastionError:  # the family does not declare them
        return ()

"""Numbers that a paper reports for a run's recipe, matched to a measurement by the paper's suite. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bastion.measuring.measurement import MeasuredCase, Published
from bastion.suite import Suite


def published(
    recipe: Mapping[str, Any] | None, suite: Suite, cases: Sequence[MeasuredCase], data: Mapping[str, str]
) -> Published | None:
    """Return the paper's numbers by label; None if the run is not of the suite's paper, or measured on other data.

    A paper attacks with the radius of training, so its numbers are left out where the measured radius differs.
    """
    expect: Mapping[str, Any] = (recipe or {}).get("expect") or {}
    source = str(expect.get("source", ""))
    papers = (suite.paper,) if isinstance(suite.paper, str) else suite.paper
    if recipe is None or not any(source.endswith(f" of {paper}") for paper in papers):
        return None
    if data["split"] != "test" or recipe["data"]["name"] != data["name"].removesuffix("-c"):  # as in cifar10-c
        return None
    trained = recipe["objective"].get("threat")
    labels = [case.label for case in cases if trained is None or _is_at(case, trained)]
    labels += [name for name in suite.aggregates if suite.members(name).keys() <= set(labels)]
    numbers = {label: float(expect[label]) for label in labels if label in expect}
    return Published(numbers=numbers, source=source, note=str(expect.get("note", ""))) if numbers else None


def _is_at(case: MeasuredCase, trained: Mapping[str, Any]) -> bool:
    """Whether the case has the radius of training, another norm, or no threat."""
    return case.threat is None or case.threat.norm != trained["norm"] or case.threat.eps == trained["eps"]

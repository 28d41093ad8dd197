"""What a paper printed for the recipe that a run was trained with, for measurements by the paper's suite. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bastion.measuring.measurement import MeasuredCase, Published
from bastion.suite import Suite


def published(
    recipe: Mapping[str, Any] | None, suite: Suite, cases: Sequence[MeasuredCase], data: Mapping[str, str]
) -> Published | None:
    """By labels of the suite; None where the run is not of the suite's paper, or measured on other data.

    A paper attacks with the radius that it trains with. Measured at another one, its number has no place.
    """
    expect: Mapping[str, Any] = (recipe or {}).get("expect") or {}
    source = str(expect.get("source", ""))
    if recipe is None or not suite.paper or not source.endswith(f" of {suite.paper}"):
        return None
    if (recipe["data"]["name"], "test") != (data["name"], data["split"]):
        return None
    trained = recipe["objective"].get("threat")
    labels = [case.label for case in cases if trained is None or _is_at(case, trained)]
    labels += [name for name in suite.aggregates if suite.members(name).keys() <= set(labels)]
    numbers = {label: float(expect[label]) for label in labels if label in expect}
    return Published(numbers=numbers, source=source, note=str(expect.get("note", ""))) if numbers else None


def _is_at(case: MeasuredCase, trained: Mapping[str, Any]) -> bool:
    """The radius is the one of training, or of another norm."""
    return case.threat is None or case.threat.norm != trained["norm"] or case.threat.eps == trained["eps"]

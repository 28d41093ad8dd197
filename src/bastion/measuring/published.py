"""Numbers that a paper reports for a run's recipe, matched to a measurement by the paper's suite. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bastion.measuring.measurement import MeasuredCase, Published
from bastion.suite import Suite

if TYPE_CHECKING:
    from bastion.types import DataSet

IMAGENET_CLASSES = 1000


def published(
    recipe: Mapping[str, Any] | None,
    suite: Suite,
    unchanged: Suite,
    cases: Sequence[MeasuredCase],
    data: DataSet,
    split: str,
) -> Published | None:
    """Return the paper's numbers by label; None if the run is not of the suite's paper, or measured on other data.

    `unchanged` is the suite without changes to its axes: what was measured with other values is not the paper's.
    """
    expect: Mapping[str, Any] = (recipe or {}).get("expect") or {}
    source = str(expect.get("source", ""))
    papers = (suite.paper,) if isinstance(suite.paper, str) else suite.paper
    if recipe is None or not any(source.endswith(f" of {paper}") for paper in papers):
        return None
    if split != "test" or data.name not in (suite.paper_data or (data.name,)):
        return None
    if data.name in expect:  # a natural shift, whose accuracy is a column of its own
        numbers = {"clean": float(expect[data.name])}
    elif recipe["data"]["name"] == _name_in_recipes(data):
        trained = recipe["objective"].get("threat")
        labels = [each.label for each in cases if _is_the_papers(each, unchanged, trained, max(data.shape[1:]))]
        labels += [name for name in suite.aggregates_on(data.name) if suite.members(name).keys() <= set(labels)]
        numbers = {label: float(expect[label]) for label in labels if label in expect}
    else:
        return None
    return Published(numbers=numbers, source=source, note=str(expect.get("note", ""))) if numbers else None


def _name_in_recipes(data: DataSet) -> str:
    """Return the name of the data set whose test images these are."""
    if data.name == "imagenet-val" and len(data.classes) == IMAGENET_CLASSES:
        return "imagenet"
    return data.name.removesuffix("-c")  # whose clean images these are, as of cifar10-c


def _is_the_papers(case: MeasuredCase, unchanged: Suite, trained: Mapping[str, Any] | None, side: int) -> bool:
    """Whether the case has the axes' own values, for images of this size; its radius may be that of training.

    A paper attacks with the radius of training, so in that norm no other radius is its own.
    """
    axes = unchanged.axes
    if any(axes[name].image_size not in (None, side) for name in case.at):
        return False
    own = {each.label: each.at for each in unchanged.cases()}.get(case.label, {})
    changed = [name for name, value in case.at.items() if value != own.get(name)]
    if trained is None or case.threat is None or case.threat.norm != trained["norm"]:
        return not changed
    is_radius = (path.endswith(".threat.eps") for name in changed for path in axes[name].set)
    return case.threat.eps == trained["eps"] and all(is_radius)

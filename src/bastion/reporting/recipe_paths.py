"""Plots over a setting of the recipe, of runs that differ in nothing else (Fig. 3 of Tang et al. 2022). No torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from pydantic import ValidationError

from bastion import storage
from bastion.errors import BastionError
from bastion.recipe import Recipe
from bastion.reporting import svg
from bastion.reporting.boards import Board, Entry, LeaderboardColumn
from bastion.reporting.figures import Figure
from bastion.run import Run

_IGNORED = {"seed"}  # may differ between the runs of a line: several seeds are several points


class Point(NamedTuple):
    value: float  # of the setting
    entry: Entry


def path_figure(board: Board, setting: str) -> Figure | None:
    """Plot clean accuracy and the column that the board is sorted by over a setting such as `optimizer.l1`."""
    groups: dict[str, list[Point]] = {}
    for entry in board.entries:
        recipe = _recipe(entry)
        if recipe is not None:
            value, rest = _split_setting(recipe, setting, entry)
            groups.setdefault(rest, []).append(Point(value, entry))
    several = [group for group in groups.values() if len({point.value for point in group}) > 1]
    paths = [sorted(group, key=lambda point: point.value) for group in several]
    columns = dict.fromkeys([*board.columns_of("clean")[:1], board.sorted_by])
    panels = [_panel(paths, column, setting) for column in columns]
    caption = (
        f"Each line joins runs whose recipes differ in {setting} only; where there are several seeds, it goes through "
        "their mean. Bars are 95 % intervals over images."
    )
    return Figure(f"Over {setting}", panels, caption, legend=False) if paths else None


def _recipe(entry: Entry) -> dict[str, Any] | None:
    """Return the fields that determine the weights, with defaults; None if the run was not trained here."""
    stored = Run(entry.folder).recipe()
    if stored is None:
        return None
    try:
        return Recipe.model_validate(stored).hashed_fields()
    except ValidationError as error:
        raise BastionError(f"{entry.folder}/recipe.yaml: not a recipe that this version reads") from error


def _split_setting(recipe: Mapping[str, Any], setting: str, entry: Entry) -> tuple[float, str]:
    """Return the setting's value, and a hash of the rest of the recipe."""
    *above, name = setting.split(".")
    inner: Any = copy.deepcopy({key: each for key, each in recipe.items() if key not in _IGNORED})
    rest = inner
    for part in above:
        inner = inner.get(part) if isinstance(inner, dict) else None
    value = inner.pop(name, None) if isinstance(inner, dict) else None
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise BastionError(
            f"over: {setting} of the recipe in {entry.folder} is {value!r}; expected a setting that is a number, such "
            "as optimizer.l1"
        )
    return float(value), storage.fingerprint(rest)


def _panel(paths: Sequence[Sequence[Point]], column: LeaderboardColumn, setting: str) -> Markup:
    with svg.panel(420, 280, left=44, right=14) as axes:
        axes.set(title=f"{column.short} (%)", xlabel=setting)
        for number, path in enumerate(paths):
            _draw(axes, [point for point in path if point.entry.value(column) is not None], column, number)
        _scale(axes, sorted({point.value for path in paths for point in path}))
        axes.set_ylim(bottom=0)
        return svg.inline(axes, f"{column.short} over {setting}", styled=False)


def _draw(axes: Axes, path: Sequence[Point], column: LeaderboardColumn, number: int) -> None:
    paint = svg.colour(number)
    by_value: dict[float, list[float]] = {}
    for value, entry in path:
        found = entry.numbers[column.key]
        by_value.setdefault(value, []).append(100 * found.value)
        axes.plot([value, value], [100 * found.low, 100 * found.high], color=paint, alpha=0.45, linewidth=4)
        axes.plot(value, 100 * found.value, linestyle="", **svg.line_style(number))
    axes.plot(list(by_value), [float(np.mean(each)) for each in by_value.values()], color=paint, linewidth=1.6)


def _scale(axes: Axes, values: Sequence[float]) -> None:
    """Use a symmetric log scale if the values span a factor of 20 or more."""
    positive = [value for value in values if value > 0]
    if len(positive) > 1 and positive[-1] >= 20 * positive[0] and values[0] >= 0:
        axes.set_xscale("symlog", linthresh=positive[0], linscale=0.5)
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.minorticks_off()

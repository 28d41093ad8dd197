"""Published rows of a leaderboard, from RobustBench's JSON files of model information. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bastion import storage
from bastion.errors import BastionError
from bastion.measuring.intervals import Estimate, wilson
from bastion.recipe_yaml import read_value
from bastion.reporting.boards import Board, Entry, LeaderboardColumn, ranked

ROBUSTBENCH_NORMS = {"Linf": "linf", "L2": "l2"}  # RobustBench's names of folders
CORRUPTIONS = "corruptions"


class Listed(NamedTuple):
    """A data set of RobustBench."""

    n: int
    classes: int
    names: tuple[str, ...]  # in bastion
    radii: dict[str, float]  # of its leaderboards, by norm


DATA = {
    "cifar10": Listed(10_000, 10, ("cifar10", "cifar10-c"), {"linf": 8 / 255, "l2": 0.5}),
    "cifar100": Listed(10_000, 100, ("cifar100", "cifar100-c"), {"linf": 8 / 255}),
    "imagenet": Listed(5_000, 1000, ("imagenet-val", "imagenet-c"), {"linf": 4 / 255}),
}


def with_published(boards: Sequence[Board], folder: Path) -> tuple[list[Board], list[str]]:
    """Add the models of `folder/DATA/Linf/MODEL.json` and so on to the boards; also return what was left out.

    A model is added, and marked, to the boards of its data set that have AutoAttack with its norm and radius, or the
    mean over the published corruptions.
    """
    files = sorted(path for threat in (*ROBUSTBENCH_NORMS, CORRUPTIONS) for path in folder.glob(f"**/{threat}/*.json"))
    if not files:
        raise BastionError(f"published: no file {folder}/DATA/Linf/MODEL.json, as RobustBench's folder model_info has")
    infos, problems = [], []
    for path in files:
        try:
            infos.append(_Info(path))
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, BastionError) as error:
            problems.append(f"{path}: not a JSON file of RobustBench ({error})")
    added = [list(_entries(board, infos)) for board in boards]
    matched = {info.path for entries in added for info, _ in entries}
    if len(matched) < len(infos):
        problems.append(
            f"{len(infos) - len(matched)} of {len(files)} files of {folder} match no column (other eps, norm or data)"
        )
    together = [[*board.entries, *(entry for _, entry in own)] for board, own in zip(boards, added, strict=True)]
    return [ranked(replace(board, entries=each)) for board, each in zip(boards, together, strict=True)], problems


class _Info:
    """Content of a model's file."""

    def __init__(self, path: Path) -> None:
        content: dict[str, Any] = json.loads(storage.read_text(path))
        self.path, self.norm = path, ROBUSTBENCH_NORMS.get(path.parent.name)  # None: corruptions
        self.dataset = str(content.get("dataset") or path.parent.parent.name)
        self.eps = None if self.norm is None else float(read_value(str(content.get("eps")), "eps"))
        self.n = content.get("n")  # in bastion's own files
        if self.n is not None and (type(self.n) is not int or self.n < 1):
            raise ValueError(f"n: expected a number of images, got {self.n!r}")
        # Of AutoAttack and an external evaluation the lower accuracy counts, as in RobustBench's tables.
        fields = ("corruptions_acc",) if self.norm is None else ("autoattack_acc", "external")
        self.clean = _share(content, "clean_acc")
        self.robust = min((_share(content, key) for key in fields if content.get(key)), default=math.nan)
        self.architecture, self.unreliable = content.get("architecture"), bool(content.get("unreliable"))
        if not isinstance(self.architecture, str | None):
            raise ValueError("architecture: expected text")

    def matches(self, column: LeaderboardColumn) -> bool:
        if self.norm is None:
            return column.is_published_corruptions
        return column.is_autoattack and column.norms == (self.norm,) and same_radius(column.eps, self.eps)

    def entry(self, clean: Sequence[LeaderboardColumn], attacked: LeaderboardColumn) -> Entry:
        n = self.n or DATA[self.dataset].n
        numbers = {attacked.key: _estimate(self.robust, n)} | {each.key: _estimate(self.clean, n) for each in clean[:1]}
        return Entry(
            model=f"{self.path.stem} (published)",
            weights="",
            folder=self.path.parent,
            architecture=self.architecture,
            doubts={"unreliable, says RobustBench"} if self.unreliable else set(),
            numbers={key: number for key, number in numbers.items() if math.isfinite(number.value)},
            published=True,
        )


def _share(content: Mapping[str, Any], key: str) -> float:
    """Return a percentage as a share, NaN if there is none."""
    value = content.get(key)
    share = float(value) / 100 if value not in (None, "") else math.nan
    if not (math.isnan(share) or 0 <= share <= 1):
        raise ValueError(f"{key}: expected 0 to 100")
    return share


def _estimate(share: float, n: int) -> Estimate:
    return wilson(round(share * n), n) if math.isfinite(share) else Estimate(share, share, share, n)


def _entries(board: Board, infos: Sequence[_Info]) -> Iterator[tuple[_Info, Entry]]:
    for info in infos:
        if board.data["split"] != "test" or info.dataset not in DATA or robustbench_name(board) != info.dataset:
            continue
        if not has_all_classes(board):
            continue
        column = next(filter(info.matches, board.columns), None)
        if column is not None and math.isfinite(info.robust):
            yield info, info.entry(board.columns_of("clean"), column)


def robustbench_name(board: Board) -> str:
    """Return RobustBench's name of the board's data set; bastion's if RobustBench does not have it."""
    name = board.data["name"]
    return next((theirs for theirs, listed in DATA.items() if name in listed.names), name)


def has_all_classes(board: Board) -> bool:
    """Whether it has as many classes as RobustBench's data set, if that is one: few are easier to tell apart."""
    listed = DATA.get(robustbench_name(board))
    return listed is None or board.classes == listed.classes


def same_radius(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-4)

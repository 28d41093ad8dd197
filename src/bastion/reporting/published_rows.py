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
from bastion.reporting.boards import Board, Column, Entry, ranked

NORMS = {"Linf": "linf", "L2": "l2"}  # RobustBench's names of folders


class Listed(NamedTuple):
    """A data set of RobustBench."""

    n: int
    names: tuple[str, ...]  # in bastion
    radii: dict[str, float]  # of its leaderboards, by norm


DATA = {
    "cifar10": Listed(10_000, ("cifar10", "cifar10-c"), {"linf": 8 / 255, "l2": 0.5}),
    "cifar100": Listed(10_000, ("cifar100", "cifar100-c"), {"linf": 8 / 255}),
    "imagenet": Listed(5_000, ("imagenet-val", "imagenet-c"), {"linf": 4 / 255}),
}


def with_published(boards: Sequence[Board], folder: Path) -> tuple[list[Board], list[str]]:
    """Add the models of `folder/DATA/Linf/MODEL.json` and so on to the boards; also return what could not be read.

    A model is added to the boards of its data set that have AutoAttack with its norm and radius, and is marked.
    """
    files = sorted(path for norm in NORMS for path in folder.glob(f"**/{norm}/*.json"))
    if not files:
        raise BastionError(f"published: no file {folder}/DATA/Linf/MODEL.json, as RobustBench's folder model_info has")
    infos, problems = [], []
    for path in files:
        try:
            infos.append(_Info(path))
        except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError, BastionError) as error:
            problems.append(f"{path}: not a JSON file of RobustBench ({error})")
    return [ranked(replace(board, entries=[*board.entries, *_entries(board, infos)])) for board in boards], problems


class _Info:
    """Content of a model's file."""

    def __init__(self, path: Path) -> None:
        content: dict[str, Any] = json.loads(storage.read_text(path))
        self.path, self.norm = path, NORMS[path.parent.name]
        self.dataset = str(content.get("dataset") or path.parent.parent.name)
        self.eps = float(read_value(str(content.get("eps")), "eps"))
        self.clean, self.robust = (_share(content, key) for key in ("clean_acc", "autoattack_acc"))
        self.architecture, self.unreliable = content.get("architecture"), bool(content.get("unreliable"))
        if not isinstance(self.architecture, str | None):
            raise ValueError("architecture: expected text")

    def entry(self, clean: Sequence[Column], attacked: Column) -> Entry:
        n = DATA[self.dataset].n
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


def _entries(board: Board, infos: Sequence[_Info]) -> Iterator[Entry]:
    for info in infos:
        if board.data["split"] != "test" or info.dataset not in DATA or robustbench_name(board) != info.dataset:
            continue
        for column in board.columns_of("attack"):
            same = column.norms == (info.norm,) and same_radius(column.eps, info.eps)
            if column.is_autoattack and same and math.isfinite(info.robust):
                yield info.entry(board.columns_of("clean"), column)
                break


def robustbench_name(board: Board) -> str:
    """Return RobustBench's name of the board's data set; bastion's if RobustBench does not have it."""
    name = board.data["name"]
    return next((theirs for theirs, listed in DATA.items() if name in listed.names), name)


def same_radius(one: float | None, other: float | None) -> bool:
    return one is not None and other is not None and math.isclose(one, other, rel_tol=1e-4)

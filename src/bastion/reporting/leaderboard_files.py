"""Exports of a leaderboard: CSV, and the JSON files of RobustBench (Croce et al. 2021). No torch."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.errors import BastionError
from bastion.reporting.boards import Board, Entry, LeaderboardColumn, cell
from bastion.reporting.published_rows import (
    CORRUPTIONS,
    DATA,
    ROBUSTBENCH_NORMS,
    has_all_classes,
    robustbench_name,
    same_radius,
)
from bastion.suite import written

_UNKNOWN = ("link", "name", "authors", "additional_data", "number_forward_passes", "dataset", "venue", "architecture",
            "eps", "clean_acc", "reported")  # fmt: skip


def write_csv(boards: Sequence[Board], path: Path) -> None:
    """Write one line per model and data set; each number with its 95 % interval and n."""
    columns = list({column.name: column for board in boards for column in board.columns}.values())
    head = ["model", "data", "split", "preprocessing", "digest", "weights", "category", "parameters", "warnings"]
    for column in columns:
        head += [column.name, *(f"{column.name} {part}" for part in ("low", "high", "n", "population"))]
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(map(plain, head))
    for board in boards:
        for entry in board.entries:
            own: list[Any] = [entry.model, board.data["name"], board.data["split"], board.preprocessing]
            own += [board.digest, entry.weights, entry.category, entry.parameters or "", " ".join(sorted(entry.doubts))]
            lines.writerow([*map(plain, own), *_numbers(board, entry, columns)])
    storage.write_text(path, file.getvalue())


def _numbers(board: Board, entry: Entry, columns: Sequence[LeaderboardColumn]) -> list[Any]:
    own = {column.name: column for column in board.columns}
    cells = [cell(entry, own[column.name]) if column.name in own else {} for column in columns]
    return [each.get(part, "") for each in cells for part in ("value", "low", "high", "n", "population")]


def plain(text: Any) -> Any:
    """Prefix an apostrophe to text that a spreadsheet would read as a formula."""
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def write_robustbench(boards: Sequence[Board], folder: Path) -> list[Path]:
    """Write `DATA/Linf/MODEL.json` of models with AutoAttack, `DATA/corruptions/MODEL.json` with CIFAR-10-C's mean.

    Only numbers on test images are written, and none of a corrupted data set or of some of its classes. Fields that
    only the authors know are null. Other fields of an existing file are kept.
    """
    found: dict[tuple[str, str, str], tuple[int, dict[str, Any]]] = {}
    for board in (each for each in boards if each.data["split"] == "test" and _is_whole(each)):
        for entry in (each for each in board.entries if not each.published):
            for threat, column in _robustbench_columns(board, entry).items():
                key, n = (robustbench_name(board), threat, entry.model), entry.numbers[column.key].n
                if key not in found or n > found[key][0]:  # measured on other images of the data set too
                    found[key] = n, _model_info(board, entry, column)
    return [write_model_info(folder, *key, content) for key, (_, content) in found.items()]


def _is_whole(board: Board) -> bool:
    """Whether its images are not corrupted, and of all classes that RobustBench has."""
    return not board.is_corrupted and has_all_classes(board)


def write_model_info(folder: Path, data: str, threat: str, model: str, known: Mapping[str, Any]) -> Path:
    """Write one file of RobustBench; return its path."""
    path = folder / _file_name(data) / threat / f"{_file_name(model)}.json"
    content = _updated(path, dict.fromkeys(_UNKNOWN) | dict(known))
    storage.write_text(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")
    return path


def _robustbench_columns(board: Board, entry: Entry) -> dict[str, LeaderboardColumn]:
    """Return the columns to write by RobustBench's name of the threat.

    Of several radii it is the one that RobustBench lists, else the smallest.
    """
    columns = [column for column in board.columns if column.key in entry.numbers]

    def order(column: LeaderboardColumn) -> tuple[bool, float, int]:
        return not same_radius(column.eps, _listed_radius(board, column)), column.eps or 0, -entry.numbers[column.key].n

    found = {}
    for threat, norm in ROBUSTBENCH_NORMS.items():
        if attacked := [column for column in columns if column.is_autoattack and column.norms == (norm,)]:
            found[threat] = min(attacked, key=order)
    if corrupted := [column for column in columns if column.is_published_corruptions]:
        found[CORRUPTIONS] = min(corrupted, key=order)
    return found


def _listed_radius(board: Board, column: LeaderboardColumn) -> float | None:
    """Return the radius of RobustBench's leaderboard for this data set and norm, if it has one."""
    listed = DATA.get(robustbench_name(board))
    return listed.radii.get(column.norms[0]) if listed and column.norms else None


def _model_info(board: Board, entry: Entry, column: LeaderboardColumn) -> dict[str, Any]:
    number, clean = entry.numbers[column.key], entry.clean.get(column.key)
    listed = _listed_radius(board, column)
    other = listed is not None and not same_radius(column.eps, listed)
    made = f" ({board.preprocessing})" if board.preprocessing else ""
    images = f"{number.n} images"
    if population := entry.populations.get(column.key):
        images, made = f"{number.n:,} of {population:,} images", f", drawn at random{made}"
    footnote = f"Measured on {images} of the {board.data['split']} split{made}."
    return {
        "name": entry.model,
        "dataset": robustbench_name(board),
        "architecture": entry.architecture,
        "eps": written(column.eps) if column.eps is not None else None,
        "clean_acc": percent(clean.value) if clean else None,
        "autoattack_acc" if column.is_autoattack else "corruptions_acc": percent(number.value),
        "footnote": f"{footnote} RobustBench lists eps {written(listed)}." if other else footnote,
        "unreliable": bool(entry.doubts),
        "n": number.n,
    }


def percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def _updated(path: Path, content: dict[str, Any]) -> dict[str, Any]:
    if not storage.is_file(path):
        return content
    try:
        before = json.loads(storage.read_text(path))
        return {**content, **before, **{key: value for key, value in content.items() if value is not None}}
    except (ValueError, TypeError, RecursionError) as error:
        raise BastionError(f"{path}: not a JSON file of RobustBench ({error}); remove it") from error


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"

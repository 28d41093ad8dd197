"""Exports of a leaderboard: CSV, and the JSON files of RobustBench (Croce et al. 2021). No torch."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.errors import BastionError
from bastion.reporting.boards import Board, Column, Entry, cell
from bastion.suite import written

_THREATS = {"linf": "Linf", "l2": "L2"}  # those RobustBench has folders for
_UNKNOWN = ("link", "name", "authors", "additional_data", "number_forward_passes", "dataset", "venue", "architecture",
            "eps", "clean_acc", "reported")  # fmt: skip


def write_csv(boards: Sequence[Board], path: Path) -> None:
    """Write one line per model and data set; each number with its 95 % interval and n."""
    columns = list({column.name: column for board in boards for column in board.columns}.values())
    head = ["model", "data", "split", "digest", "weights", "category", "parameters", "warnings"]
    for column in columns:
        head += [column.name, *(f"{column.name} {part}" for part in ("low", "high", "n"))]
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(map(plain, head))
    for board in boards:
        for entry in board.entries:
            own: list[Any] = [entry.model, board.data["name"], board.data["split"], board.digest, entry.weights]
            own += [entry.category, entry.parameters or "", " ".join(sorted(entry.doubts))]
            lines.writerow([*map(plain, own), *_numbers(board, entry, columns)])
    storage.write_text(path, file.getvalue())


def _numbers(board: Board, entry: Entry, columns: Sequence[Column]) -> list[Any]:
    own = {column.name: column for column in board.columns}
    cells = [cell(entry, own[column.name]) if column.name in own else {} for column in columns]
    return [each.get(part, "") for each in cells for part in ("value", "low", "high", "n")]


def plain(text: Any) -> Any:
    """Prefix an apostrophe to text that a spreadsheet would read as a formula."""
    return f"'{text}" if isinstance(text, str) and text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def write_robustbench(boards: Sequence[Board], folder: Path) -> list[Path]:
    """Write `DATA/Linf/MODEL.json` of models with AutoAttack, `DATA/corruptions/MODEL.json` with a corruption mean.

    Fields that only the authors know are null. Other fields of an existing file are kept.
    """
    written_files = []
    for board in boards:
        for entry in (each for each in board.entries if not each.published):
            for threat, content in _model_infos(board, entry).items():
                path = folder / _file_name(board.data["name"]) / threat / f"{_file_name(entry.model)}.json"
                storage.write_text(path, json.dumps(_updated(path, content), indent=2, ensure_ascii=False) + "\n")
                written_files.append(path)
    return written_files


def _model_infos(board: Board, entry: Entry) -> dict[str, dict[str, Any]]:
    """Return the contents of the files by RobustBench's name of the threat."""
    infos = {}
    for column in board.columns_of("attack", "corruption"):
        number = entry.numbers.get(column.key)
        threat = _THREATS.get(column.norms[0]) if column.is_autoattack else None
        if number is None or not (threat or column.kind == "corruption"):
            continue
        field = "autoattack_acc" if threat else "corruptions_acc"
        infos[threat or "corruptions"] = _known(board, entry, column) | {
            field: _percent(number.value),
            "footnote": f"Measured on {number.n} images of the {board.data['split']} split.",
            "unreliable": bool(entry.doubts),
        }
    return infos


def _known(board: Board, entry: Entry, column: Column) -> dict[str, Any]:
    clean = entry.clean.get(column.key)
    known = {
        "name": entry.model,
        "dataset": board.data["name"],
        "architecture": entry.architecture,
        "eps": written(column.eps) if column.eps is not None else None,
        "clean_acc": _percent(clean.value) if clean else None,
    }
    return dict.fromkeys(_UNKNOWN) | known


def _percent(fraction: float) -> str:
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

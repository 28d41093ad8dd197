"""Storage of facts on disk, one row per example. No torch.

    facts/IDENTITY/identity.json        a model and the data it was measured on
    facts/IDENTITY/CASE/*.safetensors   facts of one probe or study; each file has some of the examples

A case is named by the probe's settings, revisions and seed, and the variant of the data. Workers write small files,
which are merged into larger ones later. Any number of processes may write and merge at once: files are whole or
absent, an example that is in two files has the same facts in both, and a file is removed only after its content is in
another one.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import numpy as np

from bastion import storage
from bastion.errors import BastionError

Column = np.ndarray[Any, Any]
P = ParamSpec("P")
R = TypeVar("R")
POSITION = "position"  # of the example in the split; of the part, in a study
ORIGIN = "provenance"  # the number of each row's entry in the file's list of origins
PICTURE = "picture."
WARNING = "warning."
_KINDS = {  # of numpy's types; other columns may be of any
    **dict.fromkeys((POSITION, ORIGIN, "index", "label", "prediction", "fooled_by"), "iu"),
    "before": "iuf",  # a prediction, or an activation
    **dict.fromkeys(("correct", "survived", "sampled", "lost", "in_budget"), "b"),
}
MERGED = 2048  # examples in a merged file: one damaged file costs no more than these


class _Vanished(Exception):
    """Raised if another process merged a file that was about to be read: list the files again."""


def _listing_again(method: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(method)
    def stable(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            with suppress(_Vanished):
                return method(*args, **kwargs)

    return stable


@dataclass(frozen=True)
class FactStore:
    """The facts of one case."""

    folder: Path

    @property
    def name(self) -> str:
        return f"{self.folder.parent.name}/{self.folder.name}"

    def missing(self, wanted: Sequence[int]) -> list[int]:
        """Return the positions that are not stored."""
        stored = set(self.stored([])[POSITION].tolist())
        return [position for position in wanted if position not in stored]

    def write(
        self,
        positions: Sequence[int],
        facts: Mapping[str, Column],
        pictures: Mapping[str, Column],
        origin: Mapping[str, Any],
    ) -> None:
        """Store `facts`, one row per position, and `pictures`, rows of some of them with their `position`."""
        rows = {POSITION: np.array(positions), ORIGIN: np.zeros(len(positions), np.int64), **facts}
        self._write(rows | {f"{PICTURE}{name}": column for name, column in pictures.items()}, [dict(origin)])

    @_listing_again
    def read(self, names: Collection[str], positions: Sequence[int] | Column) -> dict[str, Column]:
        """Return columns at these positions, which are ascending."""
        return self._table(names, positions)[0]

    @_listing_again
    def stored(self, names: Collection[str]) -> dict[str, Column]:
        """Return `position` and these columns of all stored rows, ordered by position; a column may be missing."""
        return self._union(self._files(), names)[0] if self._files() else {POSITION: np.zeros(0, np.int64)}

    @_listing_again
    def columns(self) -> list[str]:
        """Return the names of the facts, without pictures."""
        names = {name for path in self._files() for name in self._names(path)}
        return sorted(name for name in names if name not in (POSITION, ORIGIN) and not name.startswith(PICTURE))

    @_listing_again
    def pictures(self, positions: Sequence[int] | Column) -> dict[str, Column]:
        """Return the pictures at these positions, with their `position`."""
        parts = [self._read(path, None)[0] for path in self._files()]
        kept = [
            {name.removeprefix(PICTURE): column for name, column in part.items() if name.startswith(PICTURE)}
            for part in parts
            if PICTURE + POSITION in part
        ]
        return _rows(_concatenate(kept), positions) if kept else {}

    @_listing_again
    def origins(self, positions: Sequence[int] | Column) -> list[dict[str, Any]]:
        """Return the distinct versions, device, machine and batch size that these positions were measured with."""
        table, origins = self._table([ORIGIN], positions)
        return [origins[number] for number in np.unique(table[ORIGIN])]

    @_listing_again
    def merge(self) -> None:
        """Merge small files into one per window of positions."""
        windows = {path: set((self._read(path, [])[0][POSITION] // MERGED).tolist()) for path in self._files()}
        touching = Counter(window for each in windows.values() for window in each)
        scattered = [path for path, each in windows.items() if len(each) > 1 or touching[min(each)] > 1]
        if not scattered:
            return
        written = set()
        for window in sorted(set().union(*(windows[path] for path in scattered))):  # one in memory at a time
            written.add(
                self._write(*self._union([path for path in scattered if window in windows[path]], None, window))
            )
        for path in set(scattered) - written:
            storage.remove(path)

    def _files(self) -> list[Path]:
        return storage.files(self.folder, "*.safetensors")

    def _write(self, columns: Mapping[str, Column], origins: list[dict[str, Any]]) -> Path:
        positions = columns[POSITION]
        path = self.folder / f"{positions[0]:07d}-{positions[-1]:07d}-{storage.sha256(positions)[:8]}.safetensors"
        storage.write_arrays(path, columns, {"of": self.name, "origins": json.dumps(origins, sort_keys=True)})
        return path

    def _read(self, path: Path, names: Collection[str] | None) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        try:
            columns, metadata = storage.read_arrays(path, None if names is None else {POSITION, *names})
        except (BastionError, FileNotFoundError):
            if path.exists():
                raise
            raise _Vanished from None
        if metadata.get("of") != self.name:
            raise BastionError(f"{path}: holds facts of another measurement; remove it and measure again")
        try:
            origins = json.loads(metadata["origins"])
        except (KeyError, ValueError, RecursionError):
            origins = None
        if not _is_formed(columns, origins):
            raise BastionError(f"{path}: has not the form of facts; remove it and measure again")
        return columns, origins

    def _names(self, path: Path) -> list[str]:
        try:
            return storage.array_names(path)
        except (BastionError, FileNotFoundError):
            if path.exists():
                raise
            raise _Vanished from None

    def _union(
        self, paths: Iterable[Path], names: Collection[str] | None, window: int | None = None
    ) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        """Return all rows of these files, or those of a window, ordered by position, without duplicates."""
        parts, origins = [], []
        for path in paths:
            columns, own = self._read(path, names)
            if window is not None:
                columns = _rows(columns, range(MERGED * window, MERGED * (window + 1)))
            origins += [origin for origin in own if origin not in origins]
            if ORIGIN in columns:
                numbers = np.array([origins.index(origin) for origin in own])
                columns = columns | {ORIGIN: numbers[columns[ORIGIN]]}
            parts.append(columns)
        pictured = [
            {name: column for name, column in part.items() if name.startswith(PICTURE)}
            for part in parts
            if PICTURE + POSITION in part
        ]
        rows = [{name: column for name, column in part.items() if not name.startswith(PICTURE)} for part in parts]
        return _rows(_concatenate(rows) | (_concatenate(pictured) if pictured else {})), origins

    def _table(
        self, names: Collection[str], positions: Sequence[int] | Column
    ) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        n = len(positions)
        columns, origins = self._union(self._files(), names) if self._files() else ({POSITION: np.zeros(0)}, [])
        columns = _rows(columns, positions)
        if not np.array_equal(columns[POSITION], positions):
            raise BastionError(f"{self.folder}: {n - len(columns[POSITION])} of {n} facts are missing; measure again")
        lacking = [name for name in names if name not in columns and not name.startswith(WARNING)]
        if lacking:
            raise BastionError(f"{self.folder}: has no facts '{lacking[0]}'; remove it and measure again")
        return {name: columns.get(name, np.zeros(n, bool)) for name in names}, origins


def _is_formed(columns: Mapping[str, Column], origins: Any) -> bool:
    """Whether all columns have a row for each position, of the type that their names ask for."""
    if not isinstance(origins, list) or not all(isinstance(origin, dict) for origin in origins):
        return False
    for prefix in ("", PICTURE):
        own = {name: column for name, column in columns.items() if name.startswith(PICTURE) == bool(prefix)}
        lengths = {column.shape[0] if column.ndim else -1 for column in own.values()}
        if own and lengths != {len(own.get(prefix + POSITION, ()))}:
            return False
    typed = {name: "b" if name.startswith(WARNING) else _KINDS.get(name.rpartition(".")[2], "") for name in columns}
    if not all(columns[name].dtype.kind in kind and columns[name].ndim == 1 for name, kind in typed.items() if kind):
        return False
    return ORIGIN not in columns or bool(np.isin(columns[ORIGIN], range(len(origins))).all())


def _rows(columns: Mapping[str, Column], wanted: Sequence[int] | Column | None = None) -> dict[str, Column]:
    """Order rows by position, without duplicates, and keep the wanted ones; pictures have their own positions."""
    kept: dict[str, Column] = {}
    for prefix in ("", PICTURE):
        key = prefix + POSITION
        if key in columns:
            positions, rows = np.unique(columns[key], return_index=True)
            rows = rows if wanted is None else rows[np.isin(positions, wanted)]
            if len(rows) or not prefix:
                kept |= {name: columns[name][rows] for name in columns if name.startswith(PICTURE) == bool(prefix)}
    return kept


def _concatenate(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the parts' columns. A warning column that a part lacks is false there."""

    def column(part: Mapping[str, Column], name: str) -> Column:
        if name not in part and not name.startswith(WARNING):
            raise BastionError(f"facts: some files lack '{name}', which others have; remove them and measure again")
        return part[name] if name in part else np.zeros(len(part[POSITION]), bool)

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([column(part, name) for part in parts]) for name in names}

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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, TypeVar

import numpy as np

from bastion import storage
from bastion.errors import BastionError

Column = np.ndarray[Any, Any]
P = ParamSpec("P")
R = TypeVar("R")
POSITION = "position"  # of the example in the split; of the part, in a study
ORIGIN = "provenance"  # the number of each row's entry in the file's list of origins
PICTURE = "picture."  # before the names of pictures in a file
WARNING = "warning."
_KINDS = {  # of numpy's types; other columns may be of any
    **dict.fromkeys((POSITION, ORIGIN, "index", "label", "prediction", "fooled_by"), "iu"),
    "before": "iuf",  # a prediction, or an activation
    **dict.fromkeys(("correct", "survived", "sampled", "lost", "in_budget"), "b"),
}
MERGED = 2048  # examples in a merged file: one damaged file costs no more than these


class _Content(NamedTuple):
    """What one file has, or several."""

    rows: dict[str, Column]
    pictures: dict[str, Column]  # rows of some of them, with their own `position`; empty if there are none
    origins: list[dict[str, Any]]


class _Vanished(Exception):
    """Raised if another process merged a file that was about to be read: list the files again."""


def _listing_again(method: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(method)
    def stable(*args: P.args, **kwargs: P.kwargs) -> R:
        while True:
            with suppress(_Vanished):
                return method(*args, **kwargs)

    return stable


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (BastionError, FileNotFoundError):
        if path.exists():
            raise
        raise _Vanished from None


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
        self._write(_Content(rows, dict(pictures), [dict(origin)]))

    @_listing_again
    def read(self, names: Collection[str], positions: Sequence[int] | Column) -> dict[str, Column]:
        """Return columns at these positions, which are ascending."""
        return self._table(names, positions)[0]

    @_listing_again
    def stored(self, names: Collection[str]) -> dict[str, Column]:
        """Return `position` and these columns of all stored rows, ordered by position; a column may be missing."""
        return self._union(self._files(), names).rows

    @_listing_again
    def columns(self) -> list[str]:
        """Return the names of the facts, without pictures."""
        names = set[str]()
        for path in self._files():
            with _reading(path):
                names.update(storage.array_names(path))
        return sorted(name for name in names if name not in (POSITION, ORIGIN) and not name.startswith(PICTURE))

    @_listing_again
    def pictures(self, positions: Sequence[int] | Column) -> dict[str, Column]:
        """Return the pictures at these positions, with their `position`."""
        return _rows(_concatenate([self._read(path, None).pictures for path in self._files()]), positions)

    @_listing_again
    def pictured(self) -> Column:
        """Return the positions that have pictures."""
        return self._union(self._files(), [PICTURE + POSITION]).pictures.get(POSITION, np.zeros(0, np.int64))

    @_listing_again
    def origins(self, positions: Sequence[int] | Column) -> list[dict[str, Any]]:
        """Return the distinct versions, device, machine and batch size that these positions were measured with."""
        table, origins = self._table([ORIGIN], positions)
        return [origins[number] for number in np.unique(table[ORIGIN])]

    @_listing_again
    def merge(self) -> None:
        """Merge small files into one per window of positions."""
        windows = {path: set((self._read(path, []).rows[POSITION] // MERGED).tolist()) for path in self._files()}
        touching = Counter(window for each in windows.values() for window in each)
        scattered = [path for path, each in windows.items() if len(each) > 1 or touching[min(each)] > 1]
        if not scattered:
            return
        written = set()
        for window in sorted(set().union(*(windows[path] for path in scattered))):  # one in memory at a time
            paths = [path for path in scattered if window in windows[path]]
            wanted = range(MERGED * window, MERGED * (window + 1))
            written.add(self._write(self._union(paths, None, wanted)))
        for path in set(scattered) - written:
            storage.remove(path)

    def _files(self) -> list[Path]:
        return storage.files(self.folder, "*.safetensors")

    def _write(self, content: _Content) -> Path:
        positions, pictures = content.rows[POSITION], content.pictures.items()
        path = self.folder / f"{positions[0]:07d}-{positions[-1]:07d}-{storage.sha256(positions)[:8]}.safetensors"
        columns = content.rows | {f"{PICTURE}{name}": column for name, column in pictures}
        storage.write_arrays(path, columns, {"of": self.name, "origins": json.dumps(content.origins, sort_keys=True)})
        return path

    def _read(self, path: Path, names: Collection[str] | None) -> _Content:
        with _reading(path):
            arrays, metadata = storage.read_arrays(path, None if names is None else {POSITION, *names})
        if metadata.get("of") != self.name:
            raise BastionError(f"{path}: holds facts of another measurement; remove it and measure again")
        rows = {name: array for name, array in arrays.items() if not name.startswith(PICTURE)}
        pictures = {name.removeprefix(PICTURE): array for name, array in arrays.items() if name not in rows}
        try:
            origins = json.loads(metadata["origins"])
        except (KeyError, ValueError, RecursionError):
            origins = None
        content = _Content(rows, pictures, origins)
        if not _is_formed(content):
            raise BastionError(f"{path}: has not the form of facts; remove it and measure again")
        return content

    def _union(self, paths: Iterable[Path], names: Collection[str] | None, wanted: range | None = None) -> _Content:
        """Return all rows of these files, or the wanted ones, ordered by position, without duplicates."""
        tables, pictures, origins = [], [], list[dict[str, Any]]()
        for path in paths:
            content = self._read(path, names)
            rows = _rows(content.rows, wanted)
            origins += [origin for origin in content.origins if origin not in origins]
            if ORIGIN in rows:
                numbers = np.array([origins.index(origin) for origin in content.origins])
                rows[ORIGIN] = numbers[rows[ORIGIN]]
            tables.append(rows)
            pictures.append(_rows(content.pictures, wanted))
        nothing = {POSITION: np.zeros(0, np.int64)}
        return _Content(_rows(_concatenate(tables) or nothing), _rows(_concatenate(pictures)), origins)

    def _table(
        self, names: Collection[str], positions: Sequence[int] | Column
    ) -> tuple[dict[str, Column], list[dict[str, Any]]]:
        n = len(positions)
        content = self._union(self._files(), names)
        columns = _rows(content.rows, positions)
        if not np.array_equal(columns[POSITION], positions):
            raise BastionError(f"{self.folder}: {n - len(columns[POSITION])} of {n} facts are missing; measure again")
        lacking = [name for name in names if name not in columns and not name.startswith(WARNING)]
        if lacking:
            raise BastionError(f"{self.folder}: has no facts '{lacking[0]}'; remove it and measure again")
        return {name: columns.get(name, np.zeros(n, bool)) for name in names}, content.origins


def _is_formed(content: _Content) -> bool:
    rows, pictures, origins = content
    if not isinstance(origins, list) or not all(isinstance(origin, dict) for origin in origins):
        return False
    if not _is_table(rows) or (pictures and not _is_table(pictures)):
        return False
    return ORIGIN not in rows or bool(np.isin(rows[ORIGIN], range(len(origins))).all())


def _is_table(columns: Mapping[str, Column]) -> bool:
    """Whether all columns have a row for each position, of the type that their names ask for."""
    typed = {name: "b" if name.startswith(WARNING) else _KINDS.get(name, "") for name in columns}
    return (
        POSITION in columns
        and len({column.shape[:1] for column in columns.values()}) == 1
        and all(columns[name].dtype.kind in kind and columns[name].ndim == 1 for name, kind in typed.items() if kind)
    )


def _rows(columns: Mapping[str, Column], wanted: Sequence[int] | Column | None = None) -> dict[str, Column]:
    """Order rows by position, without duplicates, and keep the wanted ones."""
    positions, rows = np.unique(columns.get(POSITION, ()), return_index=True)
    rows = rows if wanted is None else rows[np.isin(positions, wanted)]
    return {name: column[rows] for name, column in columns.items()}


def _concatenate(parts: Sequence[Mapping[str, Column]]) -> dict[str, Column]:
    """Concatenate the columns of the parts that have rows. A warning column that a part lacks is false there."""
    parts = [part for part in parts if len(part.get(POSITION, ()))]

    def column(part: Mapping[str, Column], name: str) -> Column:
        if name not in part and not name.startswith(WARNING):
            raise BastionError(f"facts: some files lack '{name}', which others have; remove them and measure again")
        return part[name] if name in part else np.zeros(len(part[POSITION]), bool)

    names = dict.fromkeys(name for part in parts for name in part)
    return {name: np.concatenate([column(part, name) for part in parts]) for name in names}

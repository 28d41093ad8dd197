"""Facts on disk: whole, few files, any order, any number of writers."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from bastion import BastionError, storage
from bastion.measuring import store as module
from bastion.measuring.store import FactStore

HERE = {"device": "cpu"}


@pytest.fixture
def store(tmp_path: Path) -> FactStore:
    return FactStore(tmp_path / "identity" / "case")


def write(store: FactStore, positions: range, origin: Any = HERE, pictures: int = 0, **more: Any) -> None:
    values = np.array(positions)
    pixels = np.zeros((pictures, 3, 2, 2)) + values[:pictures, None, None, None]
    shown = {"clean": pixels, "position": values[:pictures]} if pictures else {}
    store.write(positions, {"value": values * 10, **more}, shown, origin)


def test_columns_come_back_in_order_however_they_were_written(store: FactStore) -> None:
    for positions in (range(8, 12), range(4), range(4, 8)):
        write(store, positions)
    assert store.read(["value"], range(12))["value"].tolist() == [10 * i for i in range(12)]
    assert store.read(["value"], range(5))["value"].tolist() == [0, 10, 20, 30, 40]
    assert store.missing(range(15)) == [12, 13, 14]
    assert store.columns() == ["value"]


def test_merging_changes_nothing_but_the_number_of_files(store: FactStore) -> None:
    for start in range(0, 40, 4):
        write(store, range(start, start + 4), pictures=4 if start < 8 else 0, origin={"device": f"gpu {start // 20}"})
    before, pictures, origins = store.read(["value"], range(40)), store.pictures(range(40)), store.origins(range(40))
    store.merge()
    assert len(list(store.folder.iterdir())) == 1
    assert np.array_equal(store.read(["value"], range(40))["value"], before["value"])
    assert origins == store.origins(range(40)) == [{"device": "gpu 0"}, {"device": "gpu 1"}]
    assert store.origins(range(20)) == [{"device": "gpu 0"}]
    assert pictures["position"].tolist() == store.pictures(range(40))["position"].tolist() == list(range(8))
    assert np.array_equal(store.pictures(range(40))["clean"][:, 0, 0, 0], np.arange(8))
    assert store.pictured().tolist() == list(range(8))
    store.merge()
    assert len(list(store.folder.iterdir())) == 1


def test_a_merged_file_has_a_bounded_number_of_examples(store: FactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED", 8)
    for start in range(0, 24, 4):
        write(store, range(start, start + 4))
    store.merge()
    assert len(list(store.folder.iterdir())) == 3


def test_examples_in_random_order_are_merged_into_windows(store: FactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED", 8)
    for start in range(6):
        write(store, range(start, 24, 6), pictures=2)
    store.merge()
    assert len(list(store.folder.iterdir())) == 3
    assert store.read(["value"], [3, 7, 20])["value"].tolist() == [30, 70, 200]
    assert store.pictures(range(24))["position"].tolist() == list(range(12))
    assert store.missing(range(24)) == []


def test_merging_holds_one_window_in_memory_at_a_time(store: FactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MERGED", 4)
    for start in range(0, 64, 2):
        store.write(range(start, start + 2), {"value": np.zeros((2, 100_000))}, {}, HERE)
    tracemalloc.start()
    store.merge()
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 64 * 800_000 / 2  # bytes of all


def test_two_mergers_at_once_lose_nothing(store: FactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one merges, and the others write, after the first one has read and before it writes."""
    write(store, range(4))
    write(store, range(4, 8))
    plain = FactStore._write

    def meanwhile(self: FactStore, *content: Any) -> Path:
        monkeypatch.setattr(FactStore, "_write", plain)
        write(store, range(8, 12))
        store.merge()
        return plain(self, *content)

    monkeypatch.setattr(FactStore, "_write", meanwhile)
    store.merge()
    assert store.read(["value"], range(12))["value"].tolist() == [10 * i for i in range(12)]
    store.merge()
    assert len(list(store.folder.iterdir())) == 1


def test_the_same_facts_are_the_same_bytes_in_whatever_order_they_came(tmp_path: Path) -> None:
    orders = [(range(4), range(4, 8)), (range(4, 8), range(4))]
    stores = [FactStore(tmp_path / str(number) / "identity" / "case") for number in range(2)]
    for store, order in zip(stores, orders, strict=True):
        for positions in order:
            write(store, positions)
        store.merge()
    assert len({path.read_bytes() for path in tmp_path.rglob("*.safetensors")}) == 1


def test_a_warning_that_a_file_does_not_mention_is_not_given_there(store: FactStore) -> None:
    write(store, range(2), **{"warning.rare": np.array([True, False])})
    write(store, range(2, 4))
    for _ in range(2):
        assert store.read(["warning.rare"], range(4))["warning.rare"].tolist() == [True, False, False, False]
        store.merge()


def test_what_is_missing_is_told(store: FactStore) -> None:
    with pytest.raises(BastionError, match="case: 3 of 3 facts are missing; measure again"):
        store.read(["value"], range(3))
    write(store, range(2))
    with pytest.raises(BastionError, match="case: 1 of 3 facts are missing; measure again"):
        store.read(["value"], range(3))
    with pytest.raises(BastionError, match="has no facts 'other'; remove it and measure again"):
        store.read(["other"], range(2))


def test_facts_of_another_case_are_recognised(store: FactStore) -> None:
    write(store, range(2))
    other = FactStore(store.folder.parent / "other")
    other.folder.mkdir()
    (path,) = store.folder.iterdir()
    (other.folder / path.name).write_bytes(path.read_bytes())
    with pytest.raises(BastionError, match="holds facts of another measurement; remove it"):
        other.read(["value"], range(2))


def test_a_damaged_file_is_named(store: FactStore) -> None:
    write(store, range(2))
    (path,) = store.folder.iterdir()
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BastionError, match=f"{path.name}: corrupt or truncated.*remove it"):
        store.read(["value"], range(2))


def test_files_are_plain_safetensors(store: FactStore) -> None:
    write(store, range(2))
    (path,) = store.folder.iterdir()
    assert safetensors.numpy.load_file(path)["value"].tolist() == [0, 10]
    with safetensors.safe_open(path, framework="numpy") as file:
        assert json.loads(file.metadata()["origins"]) == [HERE]


def test_a_file_that_was_merged_away_meanwhile_is_found_again(
    store: FactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, range(4))
    write(store, range(4, 8))
    plain, listed = FactStore._files, []

    def files(self: FactStore) -> list[Path]:
        found = plain(self)
        listed.append(found)
        if len(listed) == 1:
            monkeypatch.setattr(FactStore, "_files", plain)
            FactStore(store.folder).merge()
        return found

    monkeypatch.setattr(FactStore, "_files", files)
    assert store.read(["value"], range(8))["value"].tolist() == [10 * i for i in range(8)]


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("value", np.zeros(3)),  # a row too few
        ("value", np.array(5)),
        ("correct", np.zeros(4)),  # not bool
        ("warning.nan", np.zeros(4, np.int64)),
        ("label", np.zeros((4, 1), np.int64)),
        ("prediction", np.full(4, np.nan)),
        ("position", np.arange(4.0)),
        ("provenance", np.full(4, 7)),  # of one origin
        ("picture.position", np.arange(3)),
    ],
)
def test_a_file_without_the_form_of_facts_is_named(store: FactStore, name: str, column: Any) -> None:
    write(store, range(4), pictures=2, correct=np.ones(4, bool), label=np.arange(4), prediction=np.arange(4))
    (path,) = store.folder.iterdir()
    arrays, metadata = storage.read_arrays(path)
    storage.write_arrays(path, arrays | {name: column}, metadata)
    with pytest.raises(BastionError, match=f"{path.name}: has not the form of facts; remove it and measure again"):
        store.pictures(range(4))
    storage.write_arrays(path, arrays, metadata | {"origins": "[3]"})
    with pytest.raises(BastionError, match="has not the form of facts"):
        store.origins(range(4))

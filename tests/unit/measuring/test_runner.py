"""The measuring loop: small batches, stored once, judged in eval mode, by any number of workers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
from tests.conftest import QUICK
from tests.vits import small_vit
from torch import Tensor, nn

from bastion import BastionError, journal, storage, torchrun
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import AutoAttack
from bastion.attacks.fab import FAB
from bastion.attacks.pgd import PGD
from bastion.corruptions import corrupt
from bastion.data import datasets
from bastion.data.arrays import ArraySplit
from bastion.errors import Interrupted
from bastion.measuring import executors, plan
from bastion.measuring.evaluate import attack_suite
from bastion.measuring.facts import read_measurements
from bastion.measuring.pace import Doing, Pace
from bastion.measuring.plan import Request, make_plan
from bastion.measuring.runner import measure
from bastion.measuring.worker import Task, Worker, on_device
from bastion.models import Classifier, checkpoint
from bastion.probes.accuracy import Accuracy
from bastion.registry import canonical
from bastion.run import open_run
from bastion.suite import Suite
from bastion.training.trainer import train
from bastion.types import Batch, DataSet, Probe

SUITE = Suite.model_validate(
    {
        "probes": {
            "clean": "accuracy",
            "pgd": {
                "name": "adversarial",
                "threat": {"norm": "linf", "eps": 0.1},
                "attack": {"name": "pgd", "steps": 3},
            },
        },
        "aggregates": {"worst case": {"worst": ["clean", "pgd"]}},
    }
)


@pytest.fixture
def ask(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> Any:
    def ask(**options: Any) -> Any:
        settings = {"data": tiny_data, "suite": SUITE, "folder": tmp_path / "run", "batch_size": 16, **options}
        return measure(settings.pop("model", tiny_model), **settings)

    return ask


def test_facts_are_those_of_the_probes(ask: Any, tiny_model: Classifier, tiny_data: DataSet) -> None:
    facts = ask()
    batch = tiny_data.test.batch(range(40))
    right = tiny_model.eval()(batch.x).argmax(1) == batch.y
    assert facts.n == 40
    assert np.array_equal(facts.correct("clean"), right.numpy())
    assert np.array_equal(facts.columns["clean/index"], np.arange(40))
    assert np.array_equal(facts.columns["clean/label"], batch.y.numpy())
    assert (facts.correct("pgd") <= facts.correct("clean")).all()


def test_the_worst_case_is_taken_example_by_example(ask: Any) -> None:
    facts = ask()
    accuracies = facts.accuracies()
    assert list(accuracies) == ["clean", "pgd", "worst case"]
    assert accuracies["worst case"].value == (facts.correct("clean") & facts.correct("pgd")).mean()
    assert accuracies["clean"].n == 40
    assert "n = 40" in facts.table()


def test_a_fact_may_have_several_values_per_example(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the probe names it; what it does not name is a picture, kept of the first examples alone."""

    def answer(self: Accuracy, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        pairs = torch.stack([batch.index, -batch.index], 1).float()
        return {"pairs": pairs, "shown": pairs.clone()}

    monkeypatch.setattr(Accuracy, "__call__", answer)
    monkeypatch.setattr(Accuracy, "facts", {"pairs": "a number and its opposite"})
    facts = ask(suite={"probes": {"clean": "accuracy"}}, keep=3)
    assert np.array_equal(facts.columns["clean/pairs"], np.stack([np.arange(40), -np.arange(40)], 1))
    assert "clean/shown" not in facts.columns and len(facts.pictures("clean")["shown"]) == 3
    assert facts.estimates() == {}  # a mean of several values says nothing


def test_a_measurement_names_the_blocks_of_its_model(ask: Any) -> None:
    facts = ask(model=small_vit(size=8).float(), limit=2)
    assert facts.about.blocks == ("blocks.0", "blocks.1", "blocks.2")


def _files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("*.safetensors")}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[int]]]:
    """Labels and positions of the batches that were measured, and not read from the store."""
    batches: list[tuple[str, list[int]]] = []
    plain = Worker.__call__

    def noted(self: Worker, task: Task) -> Any:
        batches.append((self.cases[task.case].label, task.positions.tolist()))
        return plain(self, task)

    monkeypatch.setattr(Worker, "__call__", noted)
    return batches


OFFSET = 0.0


class Offset(Probe):
    """A probe of one's own, whose code uses a global of its file."""

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        return {"offset": torch.full((len(batch.x),), OFFSET)}


def test_facts_of_a_plug_in_are_of_the_code_that_it_uses(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = {"probes": {"own": Offset()}}
    assert ask(suite=suite).columns["own/offset"].max() == 0
    monkeypatch.setitem(globals(), "OFFSET", 1.0)
    assert ask(suite=suite).columns["own/offset"].min() == 1


def test_a_plug_in_that_is_another_in_a_worker_process_is_refused(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "OFFSET", 1.0)  # here only
    with pytest.raises(BastionError, match="a plug-in uses other code or other values in a worker process"):
        ask(suite={"probes": {"own": Offset()}}, workers=2)


def test_facts_of_a_study_are_of_the_images_that_it_reads(
    ask: Any, measured: list[tuple[str, list[int]]], tiny_data: DataSet
) -> None:
    """As of a folder, whose fingerprint is of paths and sizes."""
    train: Any = tiny_data.train
    four = {"name": "rademacher", "images": 4}
    suite = {"studies": {"four": four, "test": four | {"split": "test"}}}
    ask(suite=suite)
    measured.clear()
    for changed, expected in ((5, []), (3, ["four"])):
        images = train._images.copy()
        images[changed] ^= 1
        ask(suite=suite, data=replace(tiny_data, train=ArraySplit(images, train._labels, train.index)))
        assert sorted({label for label, _ in measured}) == expected


def test_facts_of_a_study_are_of_the_parameters_that_are_trained(
    ask: Any, measured: list[tuple[str, list[int]]], tiny_model: Classifier
) -> None:
    suite = {"probes": {"clean": "accuracy"}, "studies": {"loss": {"name": "landscape", "n": 4, "points": 3}}}
    ask(suite=suite)
    measured.clear()
    tiny_model.network[0].requires_grad_(False)
    ask(suite=suite)
    assert {label for label, _ in measured} == {"loss"}


def test_probes_share_their_positions(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million images take 8 MB, however many probes there are."""
    plain, seen = Worker.open_tasks, list[tuple[list[Task], list[Task]]]()

    def noted(self: Worker, tasks: list[Task]) -> list[Task]:
        seen.append((tasks, plain(self, tasks)))
        return seen[-1][1]

    monkeypatch.setattr(Worker, "open_tasks", noted)
    ask(limit=32)
    tasks, still_open = seen[0]
    assert [task.key for task in tasks] == ["0/0", "1/0", "0/1", "1/1"]
    assert len({id(task.positions) for task in (*tasks, *still_open)}) == 2


def test_what_is_stored_is_not_measured_again(ask: Any, tmp_path: Path, measured: list[Any]) -> None:
    ask(limit=32)
    assert [label for label, _ in measured] == ["clean", "pgd", "clean", "pgd"]  # batch by batch
    before = _files(tmp_path)
    assert len(before) == 2  # one file for each probe
    ask(limit=32)
    assert _files(tmp_path) == before
    measured.clear()
    ask(limit=40)
    assert measured == [("clean", list(range(32, 40))), ("pgd", list(range(32, 40)))]
    assert len(_files(tmp_path)) == 2


def test_another_batch_size_goes_on_from_what_is_stored(ask: Any, measured: list[Any]) -> None:
    ask(limit=16)
    measured.clear()
    facts = ask(limit=40, batch_size=10)
    assert [positions for label, positions in measured if label == "clean"] == [
        [16, 17, 18, 19],
        list(range(20, 30)),
        list(range(30, 40)),
    ]
    assert "note: the facts were measured with different batch size 10 and 16" in facts.table()


def test_another_model_seed_or_probe_is_measured_anew(ask: Any, tiny_model: Classifier, measured: list[Any]) -> None:
    ask(limit=16)
    ask(limit=16, seed=1)
    assert len(measured) == 4
    ask(limit=16, suite=_with(steps=4))
    assert len(measured) == 5  # clean accuracy is the same probe
    with torch.no_grad():
        tiny_model.network[0].weight.mul_(1.01)
    ask(limit=16)
    assert len(measured) == 7


def _with(**settings: Any) -> Suite:
    probes = {label: dict(spec.plain()) for label, spec in SUITE.probes.items()}
    probes["pgd"]["attack"] = {**probes["pgd"]["attack"], **settings}
    return Suite.model_validate({"probes": probes})


def test_defaults_and_other_names_of_an_attack_have_no_part_in_what_names_facts(ask: Any, measured: list[Any]) -> None:
    ask(limit=16)
    measured.clear()
    ask(limit=16, suite=_with(restarts=1, loss="ce"))
    assert measured == []


def test_a_raised_revision_is_measured_anew(ask: Any, measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ask(limit=16)
    measured.clear()
    monkeypatch.setattr(Accuracy, "revision", 2)
    ask(limit=16)
    assert measured == [("clean", list(range(16)))]
    monkeypatch.setattr(PGD, "revision", 2)
    ask(limit=16)
    assert measured[1:] == [("pgd", list(range(16)))]


@pytest.mark.parametrize(
    "suite",
    [
        {"probes": {"far": {"name": "distortion", "norm": "l2"}}},
        {"probes": {"aa": {"name": "adversarial", "threat": {"norm": "l2", "eps": 1}, "attack": "autoattack"}}},
        {"studies": {"at": {"name": "landscape", "n": 8, "threat": {"norm": "l2", "eps": 1}, "attack": "autoattack"}}},
        {"studies": {"at": {"name": "sharpness", "n": 8, "threat": {"norm": "l2", "eps": 1}, "attack": "minimal"}}},
    ],
    ids=["minimal", "autoattack", "study of autoattack", "study of minimal"],
)
def test_facts_are_named_by_the_revisions_of_all_attacks_that_an_attack_is_made_of(
    suite: dict[str, Any], tiny_model: Classifier, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [store_name(suite, tiny_model, tiny_data)]
    for part in (FAB, APGD):
        monkeypatch.setattr(part, "revision", 2)
        names.append(store_name(suite, tiny_model, tiny_data))
    assert len(set(names)) == 3


def store_name(suite: dict[str, Any], model: Classifier, data: DataSet) -> str:
    """Return the name of the facts of a suite's first case, without the model's and data's."""
    worker = make_plan(Request(model, data, suite), shuffle=False).worker
    return worker.store(worker.cases[0]).name.rpartition("/")[2]


ATTACKED = {
    "autoattack": "84ebda923b08dfec",
    "autoattack:version=plus": "f48e2873a1b02c96",
    "autoattack:version=rand": "952e065b8bf8969f",
    "pgd": "aa1580c14c28a6f0",
    "patch-pgd": "bfb891a4a7531120",
    "minimal": "f02278cf8ab6ed27",
}


@pytest.mark.parametrize("attack", ATTACKED)
def test_stored_facts_of_attacks_keep_their_names(attack: str, tiny_model: Classifier, tiny_data: DataSet) -> None:
    probe = {"name": "adversarial", "threat": {"norm": "linf", "eps": "8/255"}, "attack": attack}
    assert store_name({"probes": {"attacked": probe}}, tiny_model, tiny_data) == ATTACKED[attack]


@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
def test_autoattack_is_measured_anew_when_its_revision_is_raised(
    version: str, tiny_model: Classifier, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    attack = {"name": "autoattack", "version": version}
    probe = {"name": "adversarial", "threat": {"norm": "linf", "eps": "8/255"}, "attack": attack}
    before = store_name({"probes": {"attacked": probe}}, tiny_model, tiny_data)
    monkeypatch.setattr(AutoAttack, "revision", 2)
    assert store_name({"probes": {"attacked": probe}}, tiny_model, tiny_data) != before
    spec = canonical(AutoAttack(version=version))
    assert spec == {"name": "autoattack", "revision": 2} | ({} if version == "standard" else {"version": version})


def test_a_suite_may_be_changed(ask: Any) -> None:
    content = {"probes": {label: spec.plain() for label, spec in SUITE.probes.items()}}
    facts = ask(limit=8, suite=content, changes={"probes.pgd.threat.eps": 0.05})
    assert facts.case("pgd").threat.eps == 0.05
    with pytest.raises(BastionError, match="`changes` are not for a Suite object"):
        ask(changes=["probes.pgd.threat.eps=0.05"])


def test_a_curve_is_an_axis(ask: Any) -> None:
    content = {"probes": {label: spec.plain() for label, spec in SUITE.probes.items()}}
    content["axes"] = {"eps": {"set": "probes.pgd.threat.eps", "to": [0.0, 0.02, 0.1]}}
    facts = ask(suite=content)
    accuracies = [estimate.value for estimate in facts.accuracies().values()]
    assert list(facts.accuracies()) == ["clean", "pgd eps=0", "pgd eps=0.02", "pgd eps=0.1"]
    assert accuracies[0] == accuracies[1] >= accuracies[2] >= accuracies[3]


def test_an_aggregate_for_other_data_is_left_out_with_a_note(ask: Any, tiny_data: DataSet) -> None:
    weighted = {"errors": {"clean": 2.0}, "only_for": ["imagenet-c"]}
    suite = {"probes": {"clean": "accuracy"}, "aggregates": {"mCE": weighted}}
    facts = ask(suite=suite, limit=8)
    assert not facts.errors() and not facts.about.aggregates
    assert "note: left out: mCE (only for imagenet-c)" in facts.table()
    kept = ask(suite=suite, data=dataclasses.replace(tiny_data, name="imagenet-c"), limit=8)
    assert kept.errors().keys() == {"mCE"} and not kept.about.notes


def test_a_value_for_images_of_another_size_is_told(ask: Any) -> None:
    pgd = {"name": "adversarial", "threat": {"norm": "l2"}, "attack": "fgsm"}
    axis = {"set": "probes.pgd.threat.eps", "to": 8, "image_size": 224}
    suite = {"axes": {"radius": axis}, "probes": {"pgd": pgd}}
    note = "note: radius = 8 is for images of 224 pixels, and these have 8; give another value with --set radius=…"
    assert note in ask(suite=suite, limit=8).table()
    assert not ask(suite=suite, limit=8, changes="radius=0.2").about.notes  # whoever gives a value knows the images
    assert not ask(suite={**suite, "axes": {"radius": {**axis, "image_size": 8}}}, limit=8).about.notes


def test_other_images_under_the_same_name_are_measured_anew(ask: Any, tiny_data: DataSet, measured: list[Any]) -> None:
    ask(limit=16)
    measured.clear()
    flipped = ArraySplit(255 - tiny_data.test._images, tiny_data.test._labels)
    ask(limit=16, data=dataclasses.replace(tiny_data, test=flipped))
    assert len(measured) == 2


def test_each_ensemble_of_a_table_has_stages_of_its_own(ask: Any) -> None:
    attack = {"name": "ensemble", "members": [{"name": "pgd", "steps": 1}]}
    probe = {"name": "adversarial", "threat": {"norm": "linf"}, "attack": attack}
    axis = {"eps": {"set": "probes.p.threat.eps", "to": [0.0, 0.3]}}
    facts = ask(suite={"axes": axis, "probes": {"p": probe}})
    rows = [line.split("%")[0].split()[-1] for line in facts.table().splitlines()[1:5]]
    assert rows[0] == rows[1]
    assert rows[2] == rows[3] != rows[0]


def test_an_aggregate_of_what_says_no_right_and_wrong_is_told(ask: Any) -> None:
    suite = {"probes": {"far": {"name": "distortion", "norm": "linf", "attack": "fgsm"}}}
    with pytest.raises(BastionError, match="aggregates.w: the probe 'far' has no facts 'correct'"):
        ask(suite=suite | {"aggregates": {"w": {"worst": ["far"]}}}, limit=4)


def test_a_column_that_no_probe_has_is_told_before_anything_is_measured(ask: Any, measured: list[Any]) -> None:
    suite = {"probes": {"a": "accuracy"}, "aggregates": {"m": {"mean": ["a"], "column": "entropy"}}}
    with pytest.raises(BastionError, match="aggregates.m: the probe 'a' has no facts 'entropy'"):
        ask(suite=suite)
    assert measured == []


def test_probes_on_other_examples_are_not_set_beside_each_other(
    ask: Any, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = dataclasses.replace(tiny_data, test=tiny_data.test.subset(range(39, -1, -1)))
    monkeypatch.setattr(Worker, "data", lambda self, case: backwards if case.label == "pgd" else tiny_data)
    with pytest.raises(BastionError, match="probes.pgd.data: its first 40 examples are not those of the suite's data"):
        ask()


def test_acceleration_can_be_switched_off_and_is_told(ask: Any, tmp_path: Path) -> None:
    on, off = ask(), ask(acceleration=False, folder=tmp_path / "plain")
    assert np.mean(on.correct("pgd") == off.correct("pgd")) >= 0.95
    assert [facts.about.origins[0]["acceleration"] for facts in (on, off)] == [True, False]


@pytest.mark.parametrize("launched", [False, True], ids=["one process", "torchrun"])
def test_survivors_are_told_while_a_batch_is_attacked(
    ask: Any, launched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Doing] = []
    monkeypatch.setattr(journal, "INTERVAL", 0.0)
    monkeypatch.setattr(Pace, "moved", lambda self, doing: told.append(doing))
    if launched:
        monkeypatch.setattr(dist, "is_torchelastic_launched", lambda: True)
        monkeypatch.setattr(torchrun, "join", lambda: (dist.HashStore(), 0, 1))
        monkeypatch.setenv("LOCAL_RANK", "0")
    facts = ask(limit=16)
    assert [doing.of for doing in told] == [16] * 3  # steps of PGD
    assert facts.correct("pgd").sum() <= told[-1].survivors <= told[0].survivors


def test_a_data_set_given_as_an_object_has_no_variants(ask: Any) -> None:
    content = {"probes": {"clean": "accuracy"}, "axes": {"size": {"set": "data.size", "to": [8, 16]}}}
    with pytest.raises(BastionError, match="the suite changes size, so the data set must be given by its name"):
        ask(suite=content)


def test_a_study_is_measured_stored_and_read_like_a_probe(
    ask: Any, tiny_model: Classifier, measured: list[Any]
) -> None:
    content = {"probes": {"clean": "accuracy"}, "studies": {"cost": "complexity"}}
    for _ in range(2):
        facts = ask(suite=content, limit=16)
        assert facts.studies()["cost"]["parameters"].tolist() == [sum(p.numel() for p in tiny_model.parameters())]
        assert facts.studies()["cost"]["macs"].tolist() == [8 * 8 * 8 * 27 + 8 * 3]
        assert re.search(r"cost: parameters +267\n", facts.table())
    assert measured == [("cost", [0]), ("clean", list(range(16)))]


def test_the_model_is_judged_in_eval_mode_and_given_back_as_it_was(ask: Any, tiny_model: Classifier) -> None:
    expected = ask().columns["clean/prediction"]
    tiny_model.train()
    tiny_model.network[1].eval()
    again = ask(seed=9)
    assert np.array_equal(again.columns["clean/prediction"], expected)
    assert tiny_model.training
    assert not tiny_model.network[1].training


def test_pictures_are_kept_of_the_first_examples_only(ask: Any, tmp_path: Path, tiny_data: DataSet) -> None:
    facts = ask(keep=20)
    pictures = facts.pictures("pgd")
    assert pictures["adversarial"].shape == (20, 3, 8, 8)
    assert np.array_equal(pictures["clean"], tiny_data.test.batch(range(20)).x.numpy())
    assert np.abs(pictures["adversarial"] - pictures["clean"]).max() <= 0.1 + 1e-6
    assert facts.pictures("clean") == {}


def test_measurements_are_read_back_oldest_first(ask: Any, tmp_path: Path) -> None:
    first, second = ask(limit=16), ask(limit=32)
    stored = read_measurements(open_run(tmp_path / "run"))
    assert sorted(facts.n for facts in stored) == [16, 32]
    assert all(str(facts.case("pgd").threat) == "ℓ∞ ≤ 0.1" for facts in stored)
    assert stored[0].about.summary == stored[0].numbers()
    assert np.array_equal(first.correct("pgd"), second.correct("pgd")[:16])


def test_another_batch_size_changes_only_rounding(ask: Any, tmp_path: Path) -> None:
    facts, others = ask(), ask(batch_size=5, folder=tmp_path / "other")
    agree = [facts.correct(label) == others.correct(label) for label in ("clean", "pgd")]
    assert np.mean(agree) >= 0.995


def test_an_interruption_keeps_what_is_done(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, calls = Worker.__call__, []

    def interrupted(self: Worker, task: Any) -> int:
        calls.append(task)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return work(self, task)

    monkeypatch.setattr(Worker, "__call__", interrupted)
    with pytest.raises(Interrupted, match="1 of the 6 open batches are stored. Re-run the same command to re") as stop:
        ask()
    assert stop.value.signal == signal.SIGTERM
    assert len(_files(tmp_path)) == 1  # an attack stops within its batch
    facts = ask()
    assert len(calls) == 7
    assert np.array_equal(facts.correct("pgd"), ask(folder=tmp_path / "whole").correct("pgd"))


@pytest.mark.parametrize(
    "change",
    [
        *({"n": "many"}, {"n": 0}, {"cases": {}}, {"cases": [{"label": "clean"}]}, {"cases": []}),
        *({"data": {}}, {"data": {"name": "x", "split": "test"}}, {"parameters": 10**400}, {"parameters": -1}),
        *({"summary": {"clean": [2, 0, 1, 5]}}, {"summary": {"clean": [0.5, 0, 1, -5]}}, {"seconds": {"clean": -1}}),
        *({"aggregates": {"mean": {"kind": "mean", "members": members}}} for members in ({}, {"nope": 1})),
        *({"population": 3}, {"origins": [{"versions": 3}]}, {"scalars": {"a/b": float("inf")}}),
    ],
)
def test_a_measurement_of_another_form_says_which_file_to_remove(
    ask: Any, tmp_path: Path, change: dict[str, Any]
) -> None:
    ask(limit=16)
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    storage.write_json(path, storage.read_json(path) | change)
    with pytest.raises(BastionError, match=rf"{path.name}: not a measurement .*; remove it"):
        read_measurements(open_run(tmp_path / "run"))


def test_a_flipped_bit_of_a_measurement_is_found(ask: Any, tmp_path: Path) -> None:
    facts = ask(limit=16)
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    whole = path.read_bytes()
    for position in range(0, 8 * len(whole), 97):
        damaged = bytearray(whole)
        damaged[position // 8] ^= 1 << position % 8
        path.write_bytes(damaged)
        with contextlib.suppress(BastionError):
            assert read_measurements(open_run(tmp_path / "run"))[0].about == facts.about  # white space


def test_measuring_again_leaves_the_measurement_as_it_was(ask: Any, tmp_path: Path) -> None:
    ask(limit=16)
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    storage.write_json(path, storage.read_json(path) | {"created": "before", "command": "another"})
    assert ask(limit=16).about.created == "before"
    path.write_text("{")
    assert ask(limit=16).n == 16  # a damaged one is written anew
    storage.write_json(path, storage.read_json(path) | {"created": "before"})
    next(tmp_path.rglob("*.safetensors")).unlink()
    assert ask(limit=16).about.created != "before"  # and so is one whose facts are


def test_seconds_are_those_of_the_command_that_measured_and_change_nothing_else(
    ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(worker: Worker, task: Task, *_: Any) -> tuple[Any, float]:
        return worker(task), 3.0 * len(task.positions)

    monkeypatch.setattr(executors, "_timed", timed)
    facts = ask(limit=16)
    assert facts.about.seconds == {case.label: 3.0 for case in facts.about.cases}
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    before = path.read_bytes()
    assert ask(limit=16).about.seconds == facts.about.seconds  # nothing is measured, and the file is kept
    assert path.read_bytes() == before


def test_a_damaged_file_of_facts_is_named(ask: Any, tmp_path: Path) -> None:
    ask()
    damaged = sorted(tmp_path.rglob("*.safetensors"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(BastionError, match=f"{damaged.name}: corrupt or truncated.*remove it"):
        ask()
    damaged.unlink()
    ask()


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(
    ask: Any, tmp_path: Path, measured: list[Any]
) -> None:
    ask(limit=16)
    before = _files(tmp_path)
    folder = (tmp_path / next(iter(before))).parent
    folder.rename(tmp_path / "elsewhere")
    folder.write_text("")  # in its place; permissions do not stop a superuser
    measured.clear()
    with pytest.raises(BastionError, match=f"{folder.name}: cannot be written"):
        ask(limit=32)
    folder.unlink()
    (tmp_path / "elsewhere").rename(folder)
    assert measured == [] and _files(tmp_path) == before


class Noisy(nn.Module):
    """Draws random numbers even in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.randn(len(x), 3) + 0 * x.flatten(1).sum(1, keepdim=True)


def test_a_stochastic_model_gives_the_same_facts_twice(ask: Any, tmp_path: Path) -> None:
    noise = torch.get_rng_state()
    first = ask(model=Noisy(), folder=tmp_path / "a")
    assert torch.equal(torch.get_rng_state(), noise)
    torch.manual_seed(99)
    assert np.array_equal(first.correct("clean"), ask(model=Noisy(), folder=tmp_path / "b").correct("clean"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"limit": 0}, "limit: must be a whole number of at least 1, got 0"),
        ({"split": "tset"}, "expected train, val or test, got 'tset'"),
        ({"data": "cifar10-mini"}, "the model has 3 classes, cifar10-mini has 10"),
        ({"data": "cifar11"}, "unknown data set 'cifar11'; did you mean 'cifar10'"),
        ({"suite": "dmeo"}, "no suite 'dmeo'.*did you mean 'demo'"),
        ({"suite": Suite.model_validate({"probes": {"x": "acuracy"}})}, "probes.x.name: unknown probe 'acuracy'"),
        ({"model": "nowhere"}, "no model 'nowhere'"),
        ({"suite": attack_suite(["pgdd"], "linf", [0.1])}, "unknown attack 'pgdd'"),
        ({"suite": {"studies": {"x": "nrm"}}}, "studies.x.name: unknown study 'nrm'"),
        (
            {"suite": {"probes": {"x": "accuracy"}, "aggregates": {"far": {"mean": ["x"], "column": "distance"}}}},
            "the probe 'x' has no facts 'distance'",
        ),
        ({"until": 2}, "until: the width of an interval"),
    ],
)
def test_bad_questions_are_refused_and_nothing_is_written(
    ask: Any, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BastionError, match=message):
        ask(**options)
    assert list(tmp_path.iterdir()) == []


def test_images_outside_the_box_are_refused(ask: Any, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = type(tiny_data.test).batch
    monkeypatch.setattr(
        type(tiny_data.test), "batch", lambda self, p: batch(self, p)._replace(x=batch(self, p).x * 255)
    )
    with pytest.raises(BastionError, match=r"measure, probe 'clean': image 0 has pixels outside \[0, 1\]"):
        ask()


class Shifted(nn.Module):
    """Two of these with equal weights are not equal models."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift, self.weight = shift, nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x.mean(dim=(2, 3))).roll(self.shift, 1)


def test_models_with_equal_weights_do_not_share_facts(ask: Any, tmp_path: Path) -> None:
    first, second = (ask(model=Shifted(shift), folder=tmp_path / "one") for shift in (0, 1))
    assert not np.array_equal(first.columns["clean/prediction"], second.columns["clean/prediction"])


def test_the_label_of_a_probe_has_no_part_in_its_facts(ask: Any, tmp_path: Path) -> None:
    suites = [Suite.model_validate({"probes": {label: "accuracy"}}) for label in ("a", "b")]
    first, second = (
        ask(model=Noisy(), suite=suite, folder=tmp_path / label) for suite, label in zip(suites, "ab", strict=True)
    )
    assert np.array_equal(first.correct("a"), second.correct("b"))


def test_equal_probes_of_a_suite_are_measured_once(ask: Any, measured: list[Any]) -> None:
    facts = ask(suite=Suite.model_validate({"probes": {"a": "accuracy", "b": "accuracy"}}))
    assert [label for label, _ in measured] == ["a", "a", "a"]
    assert np.array_equal(facts.correct("a"), facts.correct("b"))


def test_a_trained_run_takes_no_facts_of_another_model(ask: Any, tmp_path: Path) -> None:
    run = train("base/micro", changes=(*QUICK, "schedule.epochs=1"), folder=tmp_path / "trained")
    other = checkpoint.build({"name": "vit/micro", "depth": 1}, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(BastionError, match="is the run of another model"):
        measure(other, "cifar10-mini", SUITE, limit=4, folder=run.folder)
    assert measure(run.folder, "cifar10-mini", SUITE, limit=4).about.model == "trained"


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Flatten(), r"must give float logits \(B, 3\) for images \(B, 3, 8, 8\).*gave torch.float32 \(2, 192\)"),
        (nn.Linear(7, 3), "it raised RuntimeError"),
    ],
)
def test_networks_that_give_no_logits_are_refused(ask: Any, network: nn.Module, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        ask(model=network)


@pytest.mark.parametrize("option", [{"batch_size": 0}, {"batch_size": -1}, {"workers": 0}])
def test_sizes_below_one_are_refused(ask: Any, option: dict[str, int]) -> None:
    with pytest.raises(BastionError, match="must be a whole number of at least 1"):
        ask(**option)


def test_a_model_by_its_timm_name_goes_to_every_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    source = plan._source("timm/resnet10t:pretrained=false")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert plan._devices(source, None) == ("cuda:0", "cuda:1")
    assert plan._devices(source, "meta") == ("meta",)
    assert next(on_device(source, "meta").parameters()).is_meta


def test_a_model_by_its_timm_name_is_measured_under_it_and_recognised(
    measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, images = "timm/resnet10t:pretrained=false", (torch.rand(2, 3, 64, 64), torch.tensor([0, 1]))
    for _ in range(2):
        facts = measure(name, images, {"probes": {"clean": "accuracy"}})
        assert facts.about.model == name
    assert len(measured) == 1
    assert facts.run.folder == Path("runs") / f"timm-resnet10t-pretrained-false-{facts.about.weights[:8]}"


def test_what_cannot_be_sent_to_a_process_says_so(ask: Any, tiny_model: Classifier) -> None:
    tiny_model.secret = lambda: None
    with pytest.raises(BastionError, match="cannot be sent to worker processes.*use workers=1"):
        ask(workers=2)


def test_a_model_given_as_an_object_is_measured_by_processes_too(ask: Any, tmp_path: Path) -> None:
    model = checkpoint.build({"name": "vit/micro", "depth": 1, "embed_dim": 16}, mean=(0.5,) * 3, std=(0.5,) * 3)
    options = {"model": model, "data": "cifar10-mini", "limit": 32}
    two, one = (ask(**options, workers=workers, folder=tmp_path / f"{workers}") for workers in (2, 1))
    assert np.array_equal(two.correct("pgd"), one.correct("pgd"))


def test_pictures_know_their_examples(ask: Any, tiny_data: DataSet) -> None:
    ask(limit=8, keep=4, batch_size=8)
    pictures = ask(limit=16, keep=16, batch_size=8).pictures("pgd")
    assert pictures["position"].tolist() == [0, 1, 2, 3, *range(8, 16)]
    assert np.array_equal(pictures["clean"], tiny_data.test.batch(pictures["position"].tolist()).x.numpy())


@pytest.mark.parametrize("first", [4, 0])
def test_all_pictures_asked_for_later_are_made_once_and_change_no_fact(
    first: int, ask: Any, tiny_model: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = ask(keep=first)
    with pytest.raises(BastionError, match=rf"were kept of {first} of the 40 examples; measure with keep=\"all\""):
        before.adversarial("pgd")
    facts = {name: before.columns[name] for name in before.columns}
    after = ask(keep="all")
    predicted = tiny_model.eval()(torch.from_numpy(after.adversarial("pgd"))).argmax(1)
    assert np.array_equal(predicted.numpy(), after.columns["pgd/prediction"])
    assert all(np.array_equal(after.columns[name], facts[name], equal_nan=True) for name in facts)
    monkeypatch.setattr(Worker, "__call__", lambda *_: pytest.fail("measured again"))
    assert np.array_equal(ask(keep="all").adversarial("pgd"), after.adversarial("pgd"))


def test_more_examples_than_there_are_is_no_number_to_measure(ask: Any) -> None:
    with pytest.raises(BastionError, match="limit: the test split of .* has 40 examples, got 41"):
        ask(limit=41)
    for wrong in ({"limit": 1.5}, {"limit": True}, {"batch_size": "8"}, {"seed": "a"}, {"seed": None}):
        with pytest.raises(BastionError, match=f"{next(iter(wrong))}: must be a whole number"):
            ask(**wrong)


def test_only_checks_that_were_made_are_counted(ask: Any) -> None:
    """PGD looks for blind starts and points outside; nobody asked about Square or DLR."""
    facts = ask(limit=8)
    checks = sorted(name for name in facts.columns if "/warning." in name)
    assert checks == ["pgd/warning.blind-start", "pgd/warning.out-of-budget"]
    assert facts.checks == 2


def test_a_suite_of_distances_has_a_row_for_them(ask: Any) -> None:
    attack = {"name": "minimal", "fab_steps": 5, "bisections": 1, "steps": 2}
    suite = Suite.model_validate({"probes": {"far": {"name": "distortion", "norm": "l2", "attack": attack}}})
    facts = ask(suite=suite, limit=8)
    distance = facts.columns["far/distance"]
    assert f"median distance {np.median(distance):.4g}, {np.isinf(distance).sum()} not fooled  n = 8" in facts.table()
    assert facts.columns["far/forwards"].max() > 5


CORRUPTED = {
    "axes": {
        "type": {"set": "probes.corrupted.data.corruption", "to": ["contrast", "fog"]},
        "severity": {"set": "probes.corrupted.data.severity", "to": [1, 5]},
    },
    "probes": {"clean": "accuracy", "corrupted": {"name": "accuracy", "role": "corruption"}},
    "aggregates": {"mean": {"mean": ["corrupted"]}},
}


def test_a_suite_corrupts_a_data_set_that_is_given_as_an_object(
    ask: Any, tiny_model: Classifier, tiny_data: DataSet
) -> None:
    facts = ask(suite=CORRUPTED)
    batch = tiny_data.test.batch(range(40))
    for name, severity in (("contrast", 5), ("fog", 1)):
        made = corrupt(batch.x, name, severity, index=batch.index)
        right = tiny_model.eval()(made).argmax(1) == batch.y
        assert np.array_equal(facts.correct(f"corrupted type={name} severity={severity}"), right.numpy())
    assert len({case.store for case in facts.about.cases}) == 5


@pytest.mark.parametrize(("suite", "changes"), [("quick", ()), ("corruptions", "severity=[1, 5]")])
def test_a_resnet_of_timm_is_measured_as_timm_runs_it(suite: str, changes: Any, ask: Any) -> None:
    """Labels are timm's own predictions, so that every clean image is right."""
    mean, std = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    model = checkpoint.build({"name": "timm/resnet10t", "num_classes": 10}, mean=mean, std=std, shape=(3, 32, 32))
    network = timm.create_model("resnet10t", num_classes=10).eval()
    network.load_state_dict(model.network.state_dict())

    def predicted(x: Tensor) -> Tensor:
        return network((x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)).argmax(1)

    batch = datasets.build("cifar10-mini").test.batch(range(2))
    y = predicted(batch.x)
    facts = ask(model=model, data=(batch.x, y), suite=suite, changes=changes)
    assert facts.n == 2 and facts.correct("clean").all()
    if suite == "quick":
        assert facts.columns["apgd-ce-10/in_budget"].all()
        assert not any(warned.any() for name, warned in facts.columns.items() if name.startswith("sanity/warning."))
        return
    corrupted = facts.about.cases[1:]
    assert len(corrupted) == 30
    for case in corrupted:
        made = corrupt(batch.x, case.at["type"], case.at["severity"], index=torch.arange(2))
        assert facts.columns[f"{case.label}/prediction"].tolist() == predicted(made).tolist(), case.label


def test_variants_of_the_data_share_its_images(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise 75 corruptions would hold a data set 75 times."""
    built = []
    make = datasets.build
    monkeypatch.setattr(datasets, "build", lambda *given: built.append(given) or make(*given))
    ask(model=nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)), suite=CORRUPTED, data="cifar10-mini", limit=4)
    assert len(built) == 1


def test_probes_along_two_axes_are_a_grid(ask: Any) -> None:
    facts = ask(suite=CORRUPTED)
    lines = facts.table().splitlines()
    values = {label: f"{100 * each.value:.1f}" for label, each in facts.accuracies().items()}
    assert lines[-3].split() == ["corrupted,", "%", "severity=1", "severity=5"]
    for line, name in zip(lines[-2:], ("contrast", "fog"), strict=True):
        cells = [values[f"corrupted type={name} severity={severity}"] for severity in (1, 5)]
        assert line.split() == [f"type={name}", *cells]
    assert [line.split()[0] for line in lines[1:-3]] == ["clean", "mean"]

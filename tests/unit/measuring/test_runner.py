"""The measuring loop: fixed blocks, stored once, judged in eval mode, read back with intervals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import QUICK
from torch import Tensor, nn

from bastion import BastionError, storage
from bastion.errors import Interrupted
from bastion.measuring import runner
from bastion.measuring.runner import measure
from bastion.measuring.store import ProbeStore, blocks, joined, read_measurements, read_pictures
from bastion.models import Classifier, checkpoint
from bastion.recipe import Suite
from bastion.run import open_run
from bastion.training.trainer import train
from bastion.types import DataSet

SUITE = Suite.model_validate(
    {
        "probes": {
            "clean": "accuracy",
            "pgd": {
                "name": "adversarial",
                "threat": {"norm": "linf", "eps": 0.1},
                "attack": {"name": "pgd", "steps": 3},
            },
        }
    }
)


@pytest.fixture
def ask(tiny_model: Classifier, tiny_data: DataSet, tmp_path: Path) -> Any:
    def ask(**options: Any) -> Any:
        settings = {"data": tiny_data, "suite": SUITE, "folder": tmp_path / "run", "block": 16, **options}
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


def test_a_suite_may_be_given_as_what_its_file_would_say(ask: Any) -> None:
    probes = {"clean": "accuracy", "pgd": SUITE.probes["pgd"].plain()}
    assert np.array_equal(ask(suite={"probes": probes}).correct("pgd"), ask().correct("pgd"))
    assert {"clean", "pgd", "pgd-20"} <= set(ask(suite={"extends": "demo", "probes": probes}, limit=2).labels)
    with pytest.raises(BastionError, match="suite: probe: unknown key; did you mean 'probes'"):
        ask(suite={"probe": probes})
    with pytest.raises(BastionError, match="probes.clean.name: unknown probe 'acuracy'; did you mean 'accuracy'"):
        ask(suite={"probes": {"clean": "acuracy"}})


def _files(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in folder.rglob("facts-*")}


def test_what_is_stored_is_not_measured_again(ask: Any, tmp_path: Path) -> None:
    ask(limit=32)
    before = _files(tmp_path)
    assert len(before) == 4  # two probes, two blocks
    ask(limit=32)
    assert _files(tmp_path) == before
    ask(limit=40)
    after = _files(tmp_path)
    assert len(after) == 6
    assert before.items() <= after.items()


def test_another_model_seed_or_probe_is_measured_anew(ask: Any, tiny_model: Classifier, tmp_path: Path) -> None:
    ask(limit=16)
    ask(limit=16, seed=1)
    assert len(_files(tmp_path)) == 4
    with torch.no_grad():
        tiny_model.network[0].weight.mul_(1.01)
    ask(limit=16)
    assert len(_files(tmp_path)) == 6


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
    pictures = read_pictures(open_run(tmp_path / "run"), facts, "pgd")
    assert pictures["adversarial"].shape == (20, 3, 8, 8)
    assert np.array_equal(pictures["clean"], tiny_data.test.batch(range(20)).x.numpy())
    assert np.abs(pictures["adversarial"] - pictures["clean"]).max() <= 0.1 + 1e-6
    assert read_pictures(open_run(tmp_path / "run"), facts, "clean") == {}


def test_measurements_are_read_back_oldest_first(ask: Any, tmp_path: Path) -> None:
    first, second = ask(limit=16), ask(limit=32)
    stored = read_measurements(open_run(tmp_path / "run"))
    assert sorted(facts.n for facts in stored) == [16, 32]
    assert all(facts.about["threats"] == {"pgd": {"norm": "linf", "eps": 0.1}} for facts in stored)
    assert np.array_equal(first.correct("pgd"), second.correct("pgd")[:16])


def test_another_batch_size_changes_only_rounding(ask: Any, tmp_path: Path) -> None:
    facts, others = ask(), ask(batch=5, folder=tmp_path / "other")
    agree = [facts.correct(label) == others.correct(label) for label in ("clean", "pgd")]
    assert np.mean(agree) >= 0.995


def test_an_interruption_keeps_what_is_done(ask: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work, calls = runner.Worker.__call__, []

    def interrupted(self: runner.Worker, task: Any) -> int:
        calls.append(task)
        if len(calls) == 2:
            signal.raise_signal(signal.SIGTERM)
        return work(self, task)

    monkeypatch.setattr(runner.Worker, "__call__", interrupted)
    with pytest.raises(Interrupted, match="2 of the 6 open blocks are stored: run the same command to go on") as stop:
        ask()
    assert stop.value.signal == signal.SIGTERM
    before = _files(tmp_path)
    assert len(before) == 2
    facts = ask()
    assert before.items() <= _files(tmp_path).items()
    assert np.array_equal(facts.correct("pgd"), ask(folder=tmp_path / "whole").correct("pgd"))


def test_facts_of_another_block_are_not_taken_for_those_of_this_one(ask: Any, tmp_path: Path) -> None:
    ask(limit=32)
    first, second = sorted(tmp_path.rglob("facts-*"))[:2]
    assert first.parent == second.parent
    second.write_bytes(first.read_bytes())
    with pytest.raises(BastionError, match=r"facts-0000016-0000032.safetensors: facts of something else .* remove it"):
        ask(limit=32)


@pytest.mark.parametrize("change", [{"n": "many"}, {"block": 0}, {"probes": []}, {"probes": {"clean": 3}}])
def test_a_damaged_measurement_says_which_file_to_remove(ask: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    ask(limit=16)
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    storage.write_json(path, storage.read_json(path) | change)
    with pytest.raises(BastionError, match=rf"{path.name}: not a measurement; remove it"):
        read_measurements(open_run(tmp_path / "run"))


def test_measuring_again_leaves_the_measurement_as_it_was(ask: Any, tmp_path: Path) -> None:
    ask(limit=16)
    (path,) = (tmp_path / "run" / "measurements").glob("*.json")
    storage.write_json(path, storage.read_json(path) | {"created": "before", "command": "another"})
    assert ask(limit=16).about["created"] == "before"
    path.write_text("{")
    assert ask(limit=16).n == 16  # a damaged one is written anew
    storage.write_json(path, storage.read_json(path) | {"created": "before"})
    next(tmp_path.rglob("facts-*")).unlink()
    assert ask(limit=16).about["created"] != "before"  # and so is one whose facts are


def test_a_damaged_block_says_which_file_to_remove(ask: Any, tmp_path: Path) -> None:
    ask()
    damaged = sorted(tmp_path.rglob("facts-0000016-*"))[0]
    damaged.write_bytes(damaged.read_bytes()[:-3])
    with pytest.raises(BastionError, match="facts-0000016-0000032.safetensors: corrupt or truncated.*remove it"):
        ask()
    damaged.unlink()
    ask()


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
    ],
)
def test_bad_questions_are_refused(ask: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        ask(**options)


def test_images_outside_the_box_are_refused(ask: Any, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = type(tiny_data.test).batch
    monkeypatch.setattr(
        type(tiny_data.test), "batch", lambda self, p: batch(self, p)._replace(x=batch(self, p).x * 255)
    )
    with pytest.raises(BastionError, match=r"measure, probe 'clean': image 0 has pixels outside \[0, 1\]"):
        ask()


def test_a_warning_that_a_block_does_not_mention_is_not_given_there() -> None:
    index = np.arange(2)
    parts = [{"index": index, "warning.rare": np.array([True, False])}, {"index": index + 2}]
    for some in (parts, parts[::-1]):
        assert joined(some)["warning.rare"].sum() == 1
        assert len(joined(some)["warning.rare"]) == 4
    with pytest.raises(KeyError):
        joined([{"index": index, "distance": index}, {"index": index}])
    assert joined([]) == {}


def test_blocks_cover_everything_once() -> None:
    assert blocks(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert blocks(8, 4) == [range(4), range(4, 8)]


def test_facts_are_never_there_without_their_pictures(tmp_path: Path) -> None:
    ProbeStore(tmp_path).write(range(2), {"correct": np.array([True, False])}, {"x": np.zeros((2, 1, 1, 1))})
    order = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name.split("-")[0] for path in order] == ["pictures", "facts"]


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


class Named(Shifted):
    """Its text tells where an object of its own lies in memory, which is another place for every copy."""

    def extra_repr(self) -> str:
        return object.__repr__(self)


def test_a_model_is_the_same_wherever_it_lies_in_memory(ask: Any, tmp_path: Path) -> None:
    first, second = Named(0), Named(0)
    assert repr(first) != repr(second)
    for model in (first, second):
        ask(model=model, folder=tmp_path / "one", limit=16)
    assert len(_files(tmp_path)) == 2  # the second asked nothing again


def test_the_label_of_a_probe_has_no_part_in_its_facts(ask: Any, tmp_path: Path) -> None:
    suites = [Suite.model_validate({"probes": {label: "accuracy"}}) for label in ("a", "b")]
    first, second = (
        ask(model=Noisy(), suite=suite, folder=tmp_path / label) for suite, label in zip(suites, "ab", strict=True)
    )
    assert np.array_equal(first.correct("a"), second.correct("b"))


def test_equal_probes_of_a_suite_are_asked_once(ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    plain = runner.Worker._ask

    def noted(self: runner.Worker, label: str, positions: list[int]) -> dict[str, torch.Tensor]:
        asked.append(label)
        return plain(self, label, positions)

    monkeypatch.setattr(runner.Worker, "_ask", noted)
    facts = ask(suite=Suite.model_validate({"probes": {"a": "accuracy", "b": "accuracy"}}))
    assert len(asked) == 3  # blocks
    assert np.array_equal(facts.correct("a"), facts.correct("b"))


def test_a_trained_run_takes_no_facts_of_another_model(ask: Any, tmp_path: Path) -> None:
    run = train("base/micro", changes=(*QUICK, "schedule.epochs=1"), folder=tmp_path / "trained")
    other = checkpoint.build({"name": "vit/micro", "depth": 1}, mean=(0.5,) * 3, std=(0.5,) * 3)
    with pytest.raises(BastionError, match="is the run of another model"):
        measure(other, "cifar10-mini", SUITE, limit=4, folder=run.folder)
    assert measure(run.folder, "cifar10-mini", SUITE, limit=4).about["model"] == "trained"


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


@pytest.mark.parametrize("option", [{"block": 0}, {"batch": -1}, {"workers": 0}])
def test_sizes_below_one_are_refused(ask: Any, option: dict[str, int]) -> None:
    with pytest.raises(BastionError, match="must be a whole number of at least 1"):
        ask(**option)


def test_what_cannot_be_sent_to_a_process_says_so(ask: Any, tiny_model: Classifier) -> None:
    tiny_model.secret = lambda: None
    with pytest.raises(BastionError, match="cannot be sent to worker processes.*use workers=1"):
        ask(workers=2)


def test_a_model_given_as_an_object_is_measured_by_processes_too(ask: Any, tmp_path: Path) -> None:
    model = checkpoint.build({"name": "vit/micro", "depth": 1, "embed_dim": 16}, mean=(0.5,) * 3, std=(0.5,) * 3)
    options = {"model": model, "data": "cifar10-mini", "limit": 32}
    two, one = (ask(**options, workers=workers, folder=tmp_path / f"{workers}") for workers in (2, 1))
    assert np.array_equal(two.correct("pgd"), one.correct("pgd"))


@pytest.mark.parametrize("label", ["worst case", "", " ", "pgd/warning.nan"])
def test_what_tables_and_columns_need_is_no_label(label: str) -> None:
    with pytest.raises(ValueError, match="take another label"):
        Suite.model_validate({"probes": {label: "accuracy"}})


def test_pictures_know_their_examples(ask: Any, tmp_path: Path, tiny_data: DataSet) -> None:
    ask(limit=8, keep=4, block=8)
    facts = ask(limit=16, keep=16, block=8)
    pictures = read_pictures(open_run(tmp_path / "run"), facts, "pgd")
    assert pictures["index"].tolist() == [0, 1, 2, 3, *range(8, 16)]
    assert np.array_equal(pictures["clean"], tiny_data.test.batch(pictures["index"].tolist()).x.numpy())


class Wrapped(nn.Module):
    """Two networks with the same weights and text, and nearly the same answers."""

    def __init__(self, network: nn.Module, *, scale: float = 1.0, levels: int = 0, straight: bool = False) -> None:
        super().__init__()
        self.network, self.scale, self.levels, self.straight = network, scale, levels, straight

    def forward(self, x: Tensor) -> Tensor:
        rounded = (self.levels * x).round() / self.levels if self.levels else x
        return self.scale * self.network(x + (rounded - x).detach() if self.straight else rounded)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"levels": 16}, {"levels": 16, "straight": True}),  # only the way back differs
        ({}, {"levels": 4000}),
        ({}, {"scale": 1e5}),
    ],
)
def test_models_that_differ_in_their_gradients_alone_do_not_share_facts(
    ask: Any, tiny_model: Classifier, tmp_path: Path, one: dict[str, Any], other: dict[str, Any]
) -> None:
    for settings in (one, other, one):
        ask(model=Wrapped(tiny_model, **settings), limit=8)
    assert len(_files(tmp_path)) == 4  # two models, two probes


def test_more_examples_than_there_are_is_no_number_to_measure(ask: Any) -> None:
    with pytest.raises(BastionError, match="limit: the test split of .* has 40 examples, got 41"):
        ask(limit=41)
    for wrong in ({"limit": 1.5}, {"limit": True}, {"block": "8"}, {"seed": "a"}, {"seed": None}):
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
    assert f"median distance {np.median(distance):.4g}, {np.isinf(distance).sum()} not fooled   n = 8" in facts.table()
    assert facts.columns["far/forwards"].max() > 5

"""The measuring loop: fixed blocks, stored once, judged in eval mode, read back with intervals."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bastion import BastionError
from bastion.errors import Interrupted
from bastion.measuring import runner
from bastion.measuring.runner import measure
from bastion.measuring.store import ProbeStore, blocks, read_measurements, read_pictures
from bastion.models import Classifier
from bastion.recipe import Suite
from bastion.run import open_run
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
        ({"limit": 0}, "limit: must be at least 1, got 0"),
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


def test_blocks_cover_everything_once() -> None:
    assert blocks(10, 4) == [range(4), range(4, 8), range(8, 10)]
    assert blocks(8, 4) == [range(4), range(4, 8)]


def test_facts_are_never_there_without_their_pictures(tmp_path: Path) -> None:
    ProbeStore(tmp_path).write(range(2), {"correct": np.array([True, False])}, {"x": np.zeros((2, 1, 1, 1))})
    order = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert [path.name.split("-")[0] for path in order] == ["pictures", "facts"]

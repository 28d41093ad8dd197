"""More images beside a data set's own, from the recipe to the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests.conftest import QUICK

from bastion import BastionError, load
from bastion.data import datasets
from bastion.data.pool import build_extra
from bastion.errors import Interrupted
from bastion.models import checkpoint
from bastion.recipe import Extra, Recipe, load_recipe
from bastion.run import Run
from bastion.training import trainer
from bastion.training.checkpoints import read_state
from bastion.training.distributed import Processes
from bastion.training.trainer import train
from bastion.types import Batch, DataSet

NAMED = {"data": "cifar10-mini", "model": "vit/micro", "objective": "standard"}


def _npz(path: Path, count: int = 50, classes: int = 10, side: int = 32, channels: int = 3) -> Path:
    pictures = np.random.default_rng(count).integers(0, 256, (count, side, side, channels), dtype=np.uint8)
    np.savez(path, image=pictures, label=np.arange(count) % classes)
    return path


def _spec(path: Path, **options: Any) -> Extra:
    return Extra.model_validate({"data": {"name": "npz", "path": str(path), **options}})


def _train(folder: Path, *changes: str, resume: bool = False) -> Run:
    return train("base/micro", changes=(*QUICK, *changes), folder=folder, resume=resume)


class TestRecipe:
    def test_one_or_several(self) -> None:
        one = {"data": {"name": "npz", "path": "a"}, "share": 0.5}
        two = {"data": "cifar10-mini"}
        assert Recipe.model_validate({**NAMED, "extra": one}).extra == (Extra.model_validate(one),)
        both = Recipe.model_validate({**NAMED, "extra": [one, two]}).extra
        assert [each.share for each in both] == [0.5, None]
        for nothing in (None, [], ()):
            assert Recipe.model_validate({**NAMED, "extra": nothing}).extra == ()

    def test_what_was_resolved_can_be_read_again(self) -> None:
        recipe = Recipe.model_validate({**NAMED, "extra": {"data": {"name": "npz", "path": "a"}, "share": 0.5}})
        assert Recipe.model_validate(recipe.resolved()) == recipe

    def test_parts_of_one_can_be_set(self) -> None:
        changes = ("extra={data: {name: npz, path: a}, share: 0.5}", "extra.share=0.7", "extra.data.classes=10")
        (extra,) = load_recipe("base/micro", changes).extra
        assert extra.share == 0.7
        assert extra.data.plain() == {"name": "npz", "path": "a", "classes": 10}

    @pytest.mark.parametrize("share", [0, 1, -0.5, 1.5])
    def test_a_share_is_a_part(self, share: float) -> None:
        with pytest.raises(ValidationError):
            Recipe.model_validate({**NAMED, "extra": {"data": "cifar10-mini", "share": share}})


class TestBuilding:
    @pytest.fixture
    def cifar(self) -> DataSet:
        return datasets.build("cifar10-mini")

    def test_numbered_classes_go_with_any_names_and_any_size(self, tmp_path: Path, cifar: DataSet) -> None:
        (data,) = build_extra([_spec(_npz(tmp_path / "a.npz", side=16))], cifar)
        assert len(data.train) == 50

    def test_another_number_of_classes_is_an_error(self, tmp_path: Path, cifar: DataSet) -> None:
        path = _npz(tmp_path / "a.npz", classes=9)
        with pytest.raises(BastionError, match=r"extra.0.data: has 9 classes, but cifar10-mini has 10; .* `classes`"):
            build_extra([_spec(path)], cifar)
        assert len(build_extra([_spec(path, classes=10)], cifar)) == 1

    def test_other_channels_are_an_error(self, tmp_path: Path, cifar: DataSet) -> None:
        specs = [_spec(_npz(tmp_path / "a.npz")), _spec(_npz(tmp_path / "grey.npz", channels=1))]
        with pytest.raises(
            BastionError, match=r"extra.1.data: its images have 1 channels, those of cifar10-mini have 3"
        ):
            build_extra(specs, cifar)

    def test_other_names_or_another_order_is_an_error(self, cifar: DataSet) -> None:
        same = [Extra.model_validate({"data": "cifar10-mini"})]
        assert build_extra(same, cifar)[0].classes == cifar.classes
        turned = dataclasses.replace(cifar, classes=("airplane", "bird", "automobile", *cifar.classes[3:]))
        with pytest.raises(BastionError, match=r"class 1 is 'automobile', but 'bird' in cifar10-mini; .* same order"):
            build_extra(same, turned)

    def test_no_training_images_are_an_error(self, cifar: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
        empty = dataclasses.replace(cifar, train=cifar.train.subset([]))
        monkeypatch.setattr(datasets, "build", lambda *_: empty)
        with pytest.raises(BastionError, match=r"extra.0.data: cifar10-mini has no training images"):
            build_extra([Extra.model_validate({"data": "cifar10-mini"})], cifar)


def _extra(path: Path, share: str = "0.25") -> str:
    return f"extra={{data: {{name: npz, path: {path}}}, share: {share}}}"


def test_a_run_with_everything_is_resumed_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeats, growing augmentation with MixUp, and extra images; 96 of 24 a batch are four steps an epoch."""
    augment = "augment={repeats: 2, progressive: 1.5, mixup: 0.8, erasing: 0.5, auto_augment: rand-m9-mstd0.5-inc1}"
    changes = (augment, _extra(_npz(tmp_path / "a.npz", side=20)))
    whole = _train(tmp_path / "whole", *changes)
    assert [record["step"] for record in whole.history() if record["kind"] == "epoch"] == [4, 8]
    train_step = trainer.Trainer.train_step

    def stop(self: trainer.Trainer, batch: Any) -> Any:
        if self.step == 5:
            raise Interrupted("enough", 15)
        return train_step(self, batch)

    with monkeypatch.context() as patch, pytest.raises(Interrupted):
        patch.setattr(trainer.Trainer, "train_step", stop)
        _train(tmp_path / "parts", *changes, "checkpoint.minutes=1e-9")
    parts = _train(tmp_path / "parts", *changes, "workers=2", "checkpoint.minutes=1e-9", resume=True)
    assert "resumed at step 5" in [record.get("message") for record in parts.history()]
    assert checkpoint.digest(load(parts.folder)) == checkpoint.digest(load(whole.folder))
    plain = _train(tmp_path / "plain", augment)
    assert checkpoint.digest(load(plain.folder)) != checkpoint.digest(load(whole.folder))


def test_joined_images_make_an_epoch_longer(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", _extra(_npz(tmp_path / "a.npz", count=64), "null"), "schedule.epochs=1")
    (record,) = [record for record in run.history() if record["kind"] == "epoch"]
    assert record["step"] == (96 + 64) // 32


def test_other_extra_images_under_the_same_recipe_are_refused_on_resume(tmp_path: Path) -> None:
    path = _npz(tmp_path / "a.npz")
    run = _train(tmp_path / "run", _extra(path))
    own, extra = (
        datasets.build("cifar10-mini").fingerprint,
        datasets.build({"name": "npz", "path": str(path)}).fingerprint,
    )
    assert read_state(sorted(run.checkpoints.iterdir())[-1])["of"]["data"] == f"{own}+{extra}"
    np.savez(path, image=np.zeros((50, 32, 32, 3), np.uint8), label=np.arange(50) % 10)
    with pytest.raises(BastionError, match=rf"is of other data or another recipe \(data: '{own}\+{extra}' -> '{own}\+"):
        _train(tmp_path / "run", _extra(path), resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("augment={auto_augment: augmix, progressive: 5}", "'augmix' has no magnitude that could grow"),
        ("extra={data: {name: npz, file: a}}", r"extra.0.data.file: unknown key"),
        ("extra={data: {name: npz, path: none.npz}}", "none.npz: no such file"),
        ("extra={data: cifar10-mini, share: 0.999}", "extra.share: of 32 images"),
    ],
)
def test_what_cannot_be_trained_on_leaves_no_run_behind(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        _train(tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_mixing_starts_in_the_epoch_that_says_so(tmp_path: Path) -> None:
    """Labels are those of one class in the first epoch of three steps, and of two classes in the second."""
    recipe = load_recipe("base/micro", (*QUICK, "augment.mixup=0.8", "augment.progressive=1"))
    made = trainer.Trainer(recipe, Run(tmp_path / "run"), Processes())
    pure = []
    for batch in made.batches():
        made.step += 1
        pure.append(bool((batch.y.max(1).values == 1).all()))
    assert pure == [True] * 3 + [False] * 3


def test_the_time_spent_waiting_for_data_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on by 3 seconds for each batch, and by 5 while it is worked on."""
    made = trainer.Trainer(load_recipe("base/micro", QUICK), Run(tmp_path / "run"), Processes())
    clock = [0.0]

    def late(*_: Any, **__: Any) -> Iterator[Batch]:
        for start in range(0, 128, 32):
            clock[0] += 3
            yield made.data.train.batch(range(start, start + 32))

    monkeypatch.setattr(trainer, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trainer, "training_batches", late)
    seen = []
    for number, _ in enumerate(made.batches(), 1):
        clock[0] += 5
        seen.append(made.waited)
        if number == 2:
            made.waited = 0.0  # as whoever logs it does
    assert seen == [3, 6, 3, 6]

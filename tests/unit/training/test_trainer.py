"""The training loop: what it logs, keeps, refuses, and how it comes back."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.summary.writer.record_writer import RecordWriter
from tests.conftest import ADVERSARIAL, QUICK

from bastion import BastionError, load, storage
from bastion.data.arrays import ArraySplit
from bastion.errors import Interrupted
from bastion.models import checkpoint
from bastion.recipe import load_recipe
from bastion.run import Run
from bastion.training import checkpoints, selection, trainer
from bastion.training.checkpoints import read_state
from bastion.training.distributed import Processes
from bastion.training.trainer import train
from bastion.types import DataSet


def _train(folder: Path, *changes: str, resume: bool = False, base: tuple[str, ...] = QUICK) -> Run:
    return train("base/micro", changes=(*base, *changes), folder=folder, resume=resume)


def _steps(run: Run) -> list[dict[str, Any]]:
    """The logged numbers, without what depends on the clock."""
    clock = {"seconds", "images_per_s", "stall"}
    return [{k: v for k, v in r.items() if k not in clock} for r in run.history() if r["kind"] != "event"]


def _content(run: Run) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def _stop_after(monkeypatch: pytest.MonkeyPatch, steps: int, number: int = signal.SIGTERM) -> None:
    """A signal arrives while the given step is computed."""
    train_step = trainer.Trainer.train_step

    def step_and_signal(self: trainer.Trainer, batch: Any) -> Any:
        if self.step == steps - 1:
            monkeypatch.setattr(trainer.Trainer, "train_step", train_step)
            signal.raise_signal(number)
        return train_step(self, batch)

    monkeypatch.setattr(trainer.Trainer, "train_step", step_and_signal)


def test_the_log_has_every_step_and_epoch(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", *ADVERSARIAL)
    steps = [r for r in run.history() if r["kind"] == "step"]
    epochs = [r for r in run.history() if r["kind"] == "epoch"]
    assert [r["step"] for r in steps] == [1, 2, 3, 4, 5, 6]
    assert [r["epoch"] for r in epochs] == [1, 2]
    assert all(
        {"loss", "lr", "eps", "grad_norm", "clean_accuracy", "robust_accuracy", "images_per_s"} <= r.keys()
        for r in steps
    )
    assert all(r["val_n"] == 40 and r["val_robust"] <= r["val_clean"] for r in epochs)
    assert steps[0]["lr"] == pytest.approx(1e-6)
    assert all(0 < r["stall"] < 1 for r in steps)
    assert list((tmp_path / "run" / "tensorboard").glob("events.*"))


def test_training_learns(tmp_path: Path) -> None:
    """A hundred passes over 32 images: even the smallest model knows them."""
    schedule = "schedule={epochs: 100, warmup_epochs: 2}"
    plain = ("augment={crop: none, hflip: 0}", "objective.label_smoothing=0", "validate.every=100")
    run = _train(tmp_path / "run", "train_limit=32", schedule, *plain, "optimizer.lr=5e-3")
    losses = [r["loss"] for r in run.history() if r["kind"] == "step"]
    assert losses[-1] < 0.4 * losses[0]


def test_same_recipe_same_bits_other_seed_other_bits(tmp_path: Path) -> None:
    first, again = _train(tmp_path / "a"), _train(tmp_path / "b")
    assert checkpoint.digest(load(first.folder)) == checkpoint.digest(load(again.folder))
    assert _steps(first) == _steps(again)
    other = _train(tmp_path / "c", "seed=1")
    assert checkpoint.digest(load(other.folder)) != checkpoint.digest(load(first.folder))


def test_resume_equals_uninterrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped in the first step, in the middle and at the end of an epoch, and in the second one."""
    changes = (*ADVERSARIAL, "ema=0.9", "augment.mixup=0.8", "augment.patchwise={}", "model.drop_path_rate=0.2")
    whole = _train(tmp_path / "whole", *changes)
    for after in (1, 2, 3, 4):
        folder = tmp_path / f"stopped-{after}"
        _stop_after(monkeypatch, after)
        with pytest.raises(Interrupted, match=f"at step {after} of 6; saved: go on with the same command and --resume"):
            _train(folder, *changes)
        parts = _train(folder, *changes, resume=True)
        assert checkpoint.digest(load(parts.folder)) == checkpoint.digest(load(whole.folder))
        assert _steps(parts) == _steps(whole)
        assert [r["message"] for r in parts.history() if r["kind"] == "event"] == [f"resumed at step {after}"]


def test_worker_processes_change_no_bit(tmp_path: Path) -> None:
    changes = ("schedule.epochs=1",)
    alone, helped = _train(tmp_path / "a", *changes), _train(tmp_path / "b", *changes, "workers=2")
    assert checkpoint.digest(load(alone.folder)) == checkpoint.digest(load(helped.folder))


def test_a_damaged_last_checkpoint_gives_way_to_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _train(tmp_path / "whole")
    _stop_after(monkeypatch, 5)
    with pytest.raises(Interrupted):
        _train(tmp_path / "parts")
    last = tmp_path / "parts" / "checkpoints" / "step-000000005.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    parts = _train(tmp_path / "parts", resume=True)
    events = [r["message"] for r in parts.history() if r["kind"] == "event"]
    assert events == ["step-000000005.safetensors is damaged; the one before it is used", "resumed at step 3"]
    assert checkpoint.digest(load(parts.folder)) == checkpoint.digest(load(whole.folder))
    assert _steps(parts) == _steps(whole)


def test_damaged_checkpoints_never_push_out_whole_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _train(tmp_path / "run", "schedule.epochs=3", "checkpoint.keep=9")
    for name in ("step-000000006.safetensors", "step-000000009.safetensors"):
        (run.checkpoints / name).write_bytes(b"")
    before = checkpoint.digest(load(run.folder))
    _train(tmp_path / "run", "schedule.epochs=3", "checkpoint.keep=1", resume=True)
    assert [path.name for path in run.checkpoints.glob("*.safetensors")] == ["step-000000009.safetensors"]
    assert checkpoint.digest(load(run.folder)) == before


def test_with_no_whole_checkpoint_nothing_is_started_over(tmp_path: Path) -> None:
    """However often it is tried, with or without --resume."""
    run = _train(tmp_path / "run", "checkpoint.keep=1")
    (path,) = run.checkpoints.iterdir()
    path.write_bytes(path.read_bytes()[:500])
    before = _content(run)
    for _ in range(2):
        with pytest.raises(BastionError, match="no checkpoint is whole; restore one, or use another --run"):
            _train(tmp_path / "run", "checkpoint.keep=1", resume=True)
        with pytest.raises(BastionError, match="has been trained already"):
            _train(tmp_path / "run", "checkpoint.keep=1")
    assert _content(run) == before


def test_a_finished_run_without_its_checkpoints_is_not_started_over(tmp_path: Path) -> None:
    run = _train(tmp_path / "run")
    shutil.rmtree(run.checkpoints)
    before = _content(run)
    with pytest.raises(BastionError, match="has been trained already; go on with --resume, or use another --run"):
        _train(tmp_path / "run")
    with pytest.raises(BastionError, match="its checkpoints are lost, and without one it would start over"):
        _train(tmp_path / "run", resume=True)
    assert _content(run) == before


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = trainer.Trainer.train_step

    def killed(self: trainer.Trainer, batch: Any) -> Any:
        if self.step == 2:
            raise KeyboardInterrupt
        return train_step(self, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(trainer.Trainer, "train_step", killed)
        _train(tmp_path / "run")
    with pytest.raises(BastionError, match="has been trained already; go on with --resume"):
        _train(tmp_path / "run")
    run, whole = _train(tmp_path / "run", resume=True), _train(tmp_path / "whole")
    assert _steps(run) == _steps(whole)
    assert checkpoint.digest(load(run.folder)) == checkpoint.digest(load(whole.folder))


def test_another_number_of_threads_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _stop_after(monkeypatch, 2)
    with pytest.raises(Interrupted):
        _train(tmp_path / "run")
    torch.set_num_threads(2)
    run = _train(tmp_path / "run", resume=True)
    messages = [r["message"] for r in run.history() if r["kind"] == "event"]
    assert messages[0] == "resumed at step 2"
    assert messages[1].startswith("resumed with other means (threads: 1 -> 2): the result will differ")
    assert len(messages) == 2 and "threads: 1 -> 2" in capsys.readouterr().err


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    run = _train(tmp_path / "run")
    process = subprocess.Popen(["true"])
    process.wait()
    leftover, foreign = (
        run.checkpoints / f".step.{host}-{process.pid}-00000000.tmp" for host in (storage._HOST, "0badcafe")
    )
    leftover.write_bytes(b"half")
    foreign.write_bytes(b"of a machine that may be alive")
    _train(tmp_path / "run", resume=True)
    assert not leftover.exists() and foreign.exists()


def test_a_flipped_bit_in_a_checkpoint_is_noticed(tmp_path: Path) -> None:
    run = _train(tmp_path / "run")
    last = sorted(run.checkpoints.iterdir())[-1]
    content = bytearray(last.read_bytes())
    content[-100] ^= 1
    last.write_bytes(content)
    resumed = _train(tmp_path / "run", resume=True)
    assert "resumed at step 3" in [r.get("message") for r in resumed.history()]


def test_other_images_under_the_same_fingerprint_are_refused_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_data: DataSet
) -> None:
    """As of a folder, whose fingerprint is of paths and sizes."""
    changes = ("model={name: resnet/micro, widths: [4, 8], depths: [1, 1]}", "batch=16", "schedule.epochs=1")
    monkeypatch.setattr(trainer.datasets, "build", lambda *_: tiny_data)
    run = _train(tmp_path / "run", *changes, base=QUICK[:1])
    for name in ("train", "val"):
        split: Any = tiny_data.split(name)
        images = split._images.copy()
        images[split.index[-1]] ^= 1
        other = dataclasses.replace(tiny_data, **{name: ArraySplit(images, split._labels, split.index)})  # type: ignore[arg-type]
        monkeypatch.setattr(trainer.datasets, "build", lambda *_, other=other: other)
        with pytest.raises(BastionError, match="is of other data or another recipe .images: '"):
            _train(run.folder, *changes, base=QUICK[:1], resume=True)
    path = checkpoints.newest(run)
    assert path is not None
    state = checkpoints.read_state(path)
    del state["of"]["images"]  # as in checkpoints of bastion 0.1.0
    checkpoints.write_state(path, state)
    _train(run.folder, *changes, base=QUICK[:1], resume=True)


def test_other_data_under_the_same_recipe_are_refused_on_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_data: DataSet
) -> None:
    monkeypatch.setattr(trainer.datasets, "build", lambda *_: tiny_data)
    changes = (
        "model={name: resnet/micro, widths: [4, 8], depths: [1, 1]}",
        "batch=16",
        "schedule.epochs=1",
        "train_limit=48",
    )
    _train(tmp_path / "run", *changes)
    monkeypatch.setattr(trainer.datasets, "build", lambda *_: dataclasses.replace(tiny_data, fingerprint="other"))
    with pytest.raises(BastionError, match="is of other data or another recipe .data: 'tiny-1' -> 'other'."):
        _train(tmp_path / "run", *changes, resume=True)


@pytest.mark.parametrize("lost", ["model", "weights"])
def test_a_lost_model_comes_back_from_the_last_checkpoint(tmp_path: Path, lost: str) -> None:
    run = _train(tmp_path / "run")
    before = checkpoint.digest(load(run.folder))
    if lost == "weights":
        (weights,) = run.model.glob("*.safetensors")
        weights.unlink()
    else:
        shutil.rmtree(run.model)
    _train(tmp_path / "run", resume=True)
    assert checkpoint.digest(load(run.folder)) == before
    assert [r["epoch"] for r in run.history() if r["kind"] == "epoch"] == [1, 2]


def test_where_the_best_model_is_lost_the_last_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.9, 0.2, 0.2])
    monkeypatch.setattr(selection.Selection, "validate", lambda self, model: {"val_n": 1, "val_clean": next(scores)})
    run = _train(tmp_path / "run", "validate.choose=best")
    shutil.rmtree(run.model)
    _train(tmp_path / "run", "validate.choose=best", resume=True)
    assert checkpoint.read_card(run.model).about["epoch"] == 2
    assert [r["epoch"] for r in run.history() if r["kind"] == "epoch"] == [1, 2]
    assert "the last epoch's model takes the place of the best one's" in run.history()[-2]["message"]


def test_a_failed_start_leaves_no_run_behind(tmp_path: Path) -> None:
    for change in ("batch=100", "augment.auto_augment=nonsense", "model.num_heads=7", "data.name=fashion-mnist"):
        with pytest.raises(BastionError):
            _train(tmp_path / "run", change)
    assert not (tmp_path / "run").exists()


def test_a_run_is_trained_by_one_process_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _train(tmp_path / "run")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with run.locked(), pytest.raises(BastionError, match="another process is training this run"):
        _train(tmp_path / "run", resume=True)
    with Run(tmp_path / "new").locked():
        with pytest.raises(BastionError, match="another process is training this run"):
            _train(tmp_path / "new")
        assert [path.name for path in (tmp_path / "new").iterdir()] == [".lock"]  # a refused one writes nothing


def test_only_the_last_checkpoints_are_kept(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "schedule.epochs=3", "checkpoint.keep=2")
    assert [path.name for path in sorted(run.checkpoints.iterdir())] == [
        "step-000000006.safetensors",
        "step-000000009.safetensors",
    ]


def test_an_older_checkpoint_that_could_not_be_removed_goes_later(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "schedule.epochs=3", "checkpoint.keep=3")
    _train(tmp_path / "run", "schedule.epochs=3", "checkpoint.keep=1", resume=True)  # nothing is left to train
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000000009.safetensors"]


def test_checkpoints_come_by_the_clock_too(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "schedule.epochs=1", "checkpoint={minutes: 1e-9, keep: 9}")
    assert len(list(run.checkpoints.iterdir())) == 3


@pytest.mark.parametrize("setting", ["optimizer.lr=1e30", "optimizer={name: sgd, lr: 1e30, clip_grad: null}"])
def test_a_loss_that_is_not_finite_stops_before_the_step(tmp_path: Path, setting: str) -> None:
    with pytest.raises(BastionError, match=r"training step \d: loss .*Try a smaller optimizer.lr \(now 1e\+30\)"):
        _train(tmp_path / "run", setting, "schedule.warmup_epochs=0", "optimizer.clip_grad=null")
    for path in (tmp_path / "run" / "checkpoints").glob("*"):
        assert all(t.isfinite().all() for t in read_state(path)["model"].values())


def test_a_trained_run_is_not_trained_over(tmp_path: Path) -> None:
    _train(tmp_path / "run")
    with pytest.raises(BastionError, match="has been trained already; go on with --resume, or use another --run"):
        _train(tmp_path / "run")


def test_processes_that_torchrun_starts_again_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But only if it was the same torchrun that began: its second try must not do what the first refused."""
    for name, value in {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "1"}.items():
        monkeypatch.setenv(name, value)
    run = _train(tmp_path / "run")
    _train(tmp_path / "run")
    assert [r["message"] for r in run.history() if r["kind"] == "event"] == ["resumed at step 6"]
    run.launched.write_text("torchrun 1")
    with pytest.raises(BastionError, match="has been trained already"):
        _train(tmp_path / "run")


def test_a_run_of_another_recipe_is_refused_with_the_difference(tmp_path: Path) -> None:
    run = _train(tmp_path / "run")
    before = _content(run)
    with pytest.raises(BastionError, match=r"is the run of another recipe \(optimizer.lr: 0.001 -> 0.002\)"):
        _train(tmp_path / "run", "optimizer.lr=2e-3", resume=True)
    assert _content(run) == before


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    run = _train(tmp_path / "run")
    before = checkpoint.digest(load(run.folder))
    assert checkpoint.digest(load(_train(tmp_path / "run", resume=True).folder)) == before


def test_a_full_disk_stops_with_one_line_and_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, write_state = [], checkpoints.write_state

    def full(path: Path, state: Any) -> None:
        saves.append(path)
        if len(saves) == 2:
            monkeypatch.setattr(os, "fsync", _no_space)
        write_state(path, state)

    monkeypatch.setattr(checkpoints, "write_state", full)
    with pytest.raises(BastionError, match="no space left on the disk; what was stored before is intact"):
        _train(tmp_path / "run")
    monkeypatch.undo()
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000003.safetensors"]
    run = _train(tmp_path / "run", resume=True)
    assert _steps(run) == _steps(_train(tmp_path / "whole"))


@pytest.mark.parametrize("records", [0, 3])  # while the file is opened, or later
def test_a_full_disk_met_by_tensorboard_is_one_line_too(
    records: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer is a thread, which says nothing of its own."""
    said: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    written, write = [], RecordWriter.write

    def full(self: RecordWriter, record: bytes) -> None:
        written.append(record)
        write(self, record) if len(written) <= records else _no_space()

    monkeypatch.setattr(RecordWriter, "write", full)
    with pytest.raises(BastionError, match="tensorboard: no space left on the disk") as caught:
        _train(tmp_path / "run")
    assert not isinstance(caught.value.__context__, BastionError)
    assert not said and threading.excepthook == said.append


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_the_averaged_model_is_the_one_that_is_kept(tmp_path: Path) -> None:
    """Two steps with a decay of one half: the mean of the two weights; the random ones at the start have no part."""
    constant = ("batch=96", "schedule={warmup_epochs: 0, min_lr: 1e-3}")

    def weights(model: torch.nn.Module) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    first = weights(load(_train(tmp_path / "1", *constant, "schedule.epochs=1").folder))
    second = weights(load(_train(tmp_path / "2", *constant).folder))
    averaged = weights(load(_train(tmp_path / "ema", *constant, "ema=0.5").folder))
    assert torch.allclose(averaged, (first + second) / 2, atol=1e-7)
    assert not torch.allclose(first, second, atol=1e-4)


def test_the_best_epoch_is_kept_if_the_recipe_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scores = iter([0.2, 0.9, 0.5])
    monkeypatch.setattr(selection.Selection, "validate", lambda self, model: {"val_n": 1, "val_clean": next(scores)})
    run = _train(tmp_path / "run", "schedule.epochs=3", "validate.choose=best")
    assert json.loads((run.model / "card.json").read_text())["about"]["epoch"] == 2


def test_epochs_can_be_compared_after_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same scores, the same choice and the same log as looking after each epoch."""
    changes = ("schedule.epochs=3", "validate.choose=best", *ADVERSARIAL, "optimizer.lr=5e-3")
    during, after = _train(tmp_path / "a", *changes), _train(tmp_path / "b", *changes, "validate.when=end")
    assert sorted(path.name for path in after.epochs.iterdir()) == ["00001", "00002", "00003"]
    assert [r for r in _steps(during) if r["kind"] == "epoch"] == [r for r in _steps(after) if r["kind"] == "epoch"]
    assert checkpoint.digest(load(during.folder)) == checkpoint.digest(load(after.folder))
    shutil.rmtree(after.model)
    after.log({"kind": "epoch", "step": 3, "epoch": 1})  # an earlier look was stopped
    again = _train(tmp_path / "b", *changes, "validate.when=end", resume=True)
    assert checkpoint.digest(load(during.folder)) == checkpoint.digest(load(again.folder))
    assert [r["epoch"] for r in again.history() if r["kind"] == "epoch"] == [1, 2, 3]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"run_id": "another", "step": 3, "epoch": 1}, r"00001/card.json: is the model of another run \(another\)"),
        ({}, "00001: its card does not say of which step and epoch it is"),
    ],
)
def test_the_model_of_an_epoch_must_be_this_runs(tmp_path: Path, about: dict[str, Any], message: str) -> None:
    run = _train(tmp_path / "run", "validate.when=end")
    card = storage.read_json(run.epochs / "00001" / "card.json")
    storage.write_json(run.epochs / "00001" / "card.json", card | {"about": about})
    shutil.rmtree(run.model)
    with pytest.raises(BastionError, match=message):
        _train(tmp_path / "run", "validate.when=end", resume=True)


def test_training_images_are_looked_at_too(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", *ADVERSARIAL, "validate.train=24", "schedule.epochs=1")
    (record,) = [r for r in run.history() if r["kind"] == "epoch"]
    assert record["train_n"] == 24 and 0 <= record["train_robust"] <= record["train_clean"] <= 1


def test_a_batch_in_parts_is_the_same_batch(tmp_path: Path) -> None:
    changes = ("optimizer={name: sgd, lr: 0.1, clip_grad: 0.5}", *ADVERSARIAL, "augment.mixup=0.8")
    whole, parts = _train(tmp_path / "a", *changes), _train(tmp_path / "b", *changes, "accumulate=4")
    for one, two in zip(_steps(whole), _steps(parts), strict=True):
        for key in {"loss", "grad_norm", "clean_accuracy", "robust_accuracy"} & one.keys():
            assert two[key] == pytest.approx(one[key], rel=1e-4), key
    for one, two in zip(load(whole.folder).parameters(), load(parts.folder).parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-5)


def test_l1_draws_all_weights_towards_zero(tmp_path: Path) -> None:
    """Its gradient is the sign of the weight, and nothing else moves a weight without a loss."""
    still = ("objective.label_smoothing=0", "schedule={name: constant, epochs: 1, warmup_epochs: 0}")
    sgd = "optimizer={name: sgd, lr: 1e-3, momentum: 0, weight_decay: 0, clip_grad: null"
    plain, drawn = _train(tmp_path / "a", *still, sgd + "}"), _train(tmp_path / "b", *still, sgd + ", l1: 1.0}")
    first, after = ([r for r in _steps(run) if r["kind"] == "step"] for run in (plain, drawn))
    assert after[0]["loss"] - after[0]["l1"] == pytest.approx(first[0]["loss"], abs=1e-2)
    sizes = [sum(p.abs().sum().item() for p in load(run.folder).parameters()) for run in (plain, drawn)]
    start = after[0]["l1"]
    count = sum(p.numel() for p in load(drawn.folder).parameters())
    assert sizes[1] < start - 0.9 * 3 * 1e-3 * (count - 100) < sizes[0]


@pytest.mark.parametrize("name", ["sam", "awp"])
def test_the_gradient_is_that_of_the_worst_weights_nearby(tmp_path: Path, name: str) -> None:
    plain = _train(tmp_path / "a", "schedule.epochs=1", *ADVERSARIAL)
    change = f"optimizer.perturb={{name: {name}, size: 0.05}}"
    nearby = _train(tmp_path / "b", "schedule.epochs=1", *ADVERSARIAL, change)
    first, second = ([r for r in _steps(run) if r["kind"] == "step"] for run in (plain, nearby))
    assert second[0]["loss"] == first[0]["loss"] < second[0]["nearby"]
    assert second[0]["grad_norm"] != first[0]["grad_norm"]
    later = _train(tmp_path / "c", "schedule.epochs=1", *ADVERSARIAL, change[:-1] + ", after: 0.5}")
    assert ["nearby" in r for r in _steps(later) if r["kind"] == "step"] == [False, False, True]


def test_training_starts_from_the_weights_that_are_named(tmp_path: Path) -> None:
    source = _train(tmp_path / "source", "schedule.epochs=1")
    model = "model={name: vit/micro, stem: [], embed_dim: 16, depth: 1, num_heads: 2}"
    still = ("optimizer.lr=1e-12", "schedule={epochs: 1, warmup_epochs: 0, min_lr: 0}", "optimizer.weight_decay=0")
    run = _train(tmp_path / "run", model, f"init={{from: {source.folder}, new: [patch_embed]}}", *still)
    mine, theirs = (dict(load(each.folder).network.named_parameters()) for each in (run, source))
    assert torch.allclose(mine["blocks.0.mlp.fc1.weight"], theirs["blocks.0.mlp.fc1.weight"], atol=1e-6)
    (event,) = [r for r in run.history() if r["kind"] == "event"]
    assert event["init"]["new"] == ["patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert "tensors loaded, 2 new (patch_embed.proj.weight, patch_embed.proj.bias)" in event["message"]
    shutil.rmtree(source.folder)  # a run that goes on needs its source no more
    _train(tmp_path / "run", model, f"init={{from: {source.folder}, new: [patch_embed]}}", *still, resume=True)


def test_weights_that_expect_other_images_are_told(tmp_path: Path) -> None:
    source = _train(tmp_path / "source", "schedule.epochs=1")
    run = _train(tmp_path / "run", f"init={{from: {source.folder}}}", "normalize=none", "schedule.epochs=1")
    assert "normalises images otherwise" in [r for r in run.history() if r["kind"] == "event"][-1]["message"]


def test_each_process_cuts_its_share_into_equal_parts(tmp_path: Path) -> None:
    recipe = load_recipe("base/micro", (*QUICK, "batch=20", "accumulate=4"))
    with pytest.raises(BastionError, match="the 10 images of each process cannot be cut into 4 equal parts"):
        trainer.Trainer(recipe, Run(tmp_path / "run"), Processes(rank=0, size=2))


def test_without_held_out_images_none_is_the_best(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (64, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "all.npz", image=pixels, label=np.arange(64) % 10)
    with pytest.raises(BastionError, match="validate.choose: npz holds no images out to find the best by"):
        _train(tmp_path / "run", f"data={{name: npz, path: {tmp_path}/all.npz}}", "validate.choose=best")


def test_bf16_trains_and_keeps_float32_weights(tmp_path: Path) -> None:
    run = _train(tmp_path / "run", "precision=bf16", "schedule.epochs=1", *ADVERSARIAL)
    assert all(p.dtype == torch.float32 for p in load(run.folder).parameters())
    assert not torch.equal(
        next(load(run.folder).parameters()),
        next(load(_train(tmp_path / "b", "schedule.epochs=1", *ADVERSARIAL).folder).parameters()),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective.name=adversaril", "objective.name: unknown objective 'adversaril'; did you mean 'adversarial'"),
        ("objective={name: adversarial, attack: pgd}", "objective.threat: missing"),
        (
            "objective={name: adversarial, attack: pgd, threat: {norm: linf, eps: -1}}",
            "objective.threat.eps: input should be greater than or equal to 0, got -1",
        ),
        (
            "objective={name: adversarial, attack: pgd, threat: {norm: l7, eps: 1}}",
            "objective.threat.norm: unknown norm 'l7'; known: l1, l2, linf",
        ),
        ("model.name=vit/mikro", "model.name: unknown model"),
        ("data.name=cifar-10", "data.name: unknown data set 'cifar-10'; did you mean 'cifar10'"),
        ("validate.attack={name: pgd}", "validate.threat: missing; the objective has none of its own"),
        ("batch=100", "batch: 100 is more than the 96 training images"),
        ("accumulate=5", "accumulate: 32 images cannot be cut into 5 equal parts"),
        ("schedule.min_lr=0.1", "schedule.min_lr: 0.1 is above the highest rate, 0.001; make it smaller"),
        ("optimizer.lr=.inf", "optimizer.lr: expected a finite number"),
        ("objective.label_smoothing=.nan", "objective.label_smoothing: expected a finite number, got nan"),
        ("init={from: zoo/none}", "no 'zoo/none' in the zoo"),
        ("optimizer.perturb={name: sum, size: 1}", r"optimizer.perturb.name: unknown name 'sum'; did you mean 'sam'\?"),
        ("normalize={mean: [0.5], std: [0.5]}", "need 3 means"),
        ("model.num_classes=5", "model.num_classes: cifar10-mini has 10, the recipe says 5; leave it out"),
        ("model.embed_dim=15", "cannot be built"),
        ("model.num_heads=0", "cannot be built"),
        ("model={name: timm/vit_tiny_patch16_224}", "made for images of 224×224 and does not take 32×32"),
        ("augment.auto_augment=foo", "augment: timm cannot make"),
        ("augment.hflip=2", "augment.hflip: input should be less than or equal to 1"),
        ("augment.scale=[1.0, 0.1]", "augment.scale: must be two numbers above 0, the smaller one first"),
        ("augment.mixup=-1", "augment.mixup: input should be greater than or equal to 0"),
        ("optimizer.betas=[1.5, 0.9]", "optimizer.betas.0: input should be less than 1"),
        (
            "schedule.warmup_epochs=2",
            "schedule: warmup_epochs .2. and cooldown_epochs .0. must be less than epochs .2.",
        ),
        ("objective.label_smoothing=2", "objective.label_smoothing: input should be less than 1, got 2"),
        (
            "objective={name: adversarial, attack: pgd, threat: linf}",
            "objective.threat: input should be a dictionary or an instance of Threat, got 'linf'",
        ),
        (
            "objective={name: adversarial, attack: pgd, eps_warmup: -2, threat: {norm: linf, eps: 0.1}}",
            "objective.eps_warmup: input should be greater than or equal to 0, got -2",
        ),
    ],
)
def test_impossible_recipes_are_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        _train(tmp_path / "run", change)

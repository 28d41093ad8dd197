"""The run directory: damage and files of other runs are noticed, and no training overwrites another."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.cards import write_card
from tests.damage import complaints

from bastion import BastionError, storage
from bastion.recipe import Recipe
from bastion.recipe_yaml import dump
from bastion.run import Run, begin_training, create_run, environment, usable_cores
from bastion.training.checkpoints import write_state

RECIPE = Recipe.model_validate({"data": "cifar10-mini", "model": "vit/micro", "objective": "standard"})


def test_more_epochs_for_a_trained_run_are_another_run_that_begins_with_its_model(tmp_path: Path) -> None:
    create_run(tmp_path, 0, RECIPE)
    longer = RECIPE.model_copy(update={"schedule": RECIPE.schedule.model_copy(update={"epochs": 99})})
    with pytest.raises(BastionError, match=rf"further, begin another run with --set init.from={tmp_path}$"):
        create_run(tmp_path, 0, longer)


def _run(folder: Path, steps: int = 3) -> Run:
    run = create_run(folder, 0, RECIPE)
    for step in range(1, steps + 1):
        run.log({"kind": "step", "step": step, "epoch": step / 2, "loss": 1 / step, "message": "Zürich"})
    return run


def _read(run: Run) -> tuple[Any, Any, Any]:
    return run.recipe(), run.history(), run.provenance()


@pytest.mark.parametrize("name", ["recipe.yaml", "log.jsonl", "provenance.json"])
def test_each_flipped_bit_is_noticed_or_changes_nothing(tmp_path: Path, name: str) -> None:
    run = _run(tmp_path / "run")
    found, tried = complaints(run.folder / name, lambda: _read(run), step=2)
    assert len(found) > 0.9 * tried
    assert all(name in each and "\n" not in each for each in found)


@pytest.mark.parametrize("name", ["recipe.yaml", "provenance.json"])
def test_half_a_file_is_noticed(tmp_path: Path, name: str) -> None:
    path = _run(tmp_path / "run").folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(BastionError, match=name):
        _read(Run(tmp_path / "run"))


def test_files_of_another_run_are_noticed(tmp_path: Path) -> None:
    """Even where recipe and numbers are the same."""
    run, other = _run(tmp_path / "run"), _run(tmp_path / "other")
    (run.folder / "recipe.yaml").write_bytes((other.folder / "recipe.yaml").read_bytes())
    with pytest.raises(BastionError, match=r"recipe.yaml: damaged, edited or of another run: its checksum does not"):
        run.recipe()
    lines = run.log_file.read_text().splitlines(keepends=True)
    run.log_file.write_text(lines[0] + other.log_file.read_text().splitlines(keepends=True)[1] + lines[2])
    with pytest.raises(BastionError, match=r"log.jsonl: line 2 is damaged, edited or of another run"):
        run.history()


def test_a_line_that_a_crash_cut_off_is_skipped(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    history, content = run.history(), run.log_file.read_bytes()
    start = content[:-1].rindex(b"\n") + 1
    for end in range(start, len(content) - 1):
        run.log_file.write_bytes(content[:end])
        assert run.history() == history[:2], end
    run.log_file.write_bytes(content[:-1])  # only the end of the line is missing
    assert run.history() == history


def test_a_log_whose_end_is_lost_is_noticed(tmp_path: Path) -> None:
    """By the checkpoint that was stored after it: a shorter log is whole in itself."""
    run = _run(tmp_path / "run")
    write_state(run.checkpoints / "step-000000002.safetensors", {"logged": 1})
    write_state(run.checkpoints / "step-000000003.safetensors", {"logged": run.steps_logged()})
    lines = run.log_file.read_text().splitlines(keepends=True)
    assert len(run.history()) == run.steps_logged() == 3
    for damaged in ("", lines[0], lines[0] + lines[1] + lines[2][:9], "\0" * 300):
        run.log_file.write_text(damaged)
        with pytest.raises(BastionError, match=r"log.jsonl: its end is lost: it has \d steps, and had 3 when the last"):
            run.history()
    run.log_file.unlink()
    assert run.history() == []
    run.log_file.write_text(lines[0])
    (run.checkpoints / "step-000000003.safetensors").write_bytes(b"damaged")
    assert len(run.history()) == 1  # as the one before knows it


def test_rewinding_forgets_what_came_later(tmp_path: Path) -> None:
    run = _run(tmp_path / "run")
    run.log({"kind": "epoch", "step": 2, "epoch": 1})
    run.rewind_log(1, "epoch")
    assert [(each["kind"], each["step"]) for each in run.history()] == [("step", 1), ("step", 2), ("step", 3)]
    run.rewind_log(1)
    assert [each["step"] for each in run.history()] == [1]
    assert "checksum" not in run.history()[0]


def test_runs_from_before_there_were_checksums_are_read(tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "provenance.json").write_text(json.dumps(environment(0)))
    (tmp_path / "recipe.yaml").write_text(dump(RECIPE.resolved()))
    run.log_file.write_text('{"kind": "step", "step": 1}\nhalf a li\n{"kind": "step", "step": 2}\n')
    run.log({"kind": "step", "step": 3})
    assert run.recipe() == RECIPE.resolved()
    assert [record["step"] for record in run.history()] == [1, 2, 3]
    create_run(tmp_path, 0, RECIPE)


def test_every_run_has_an_id_of_its_own(tmp_path: Path) -> None:
    ids = {create_run(tmp_path / name, 0).id() for name in "abc"}
    assert len(ids) == 3 and None not in ids
    assert Run(tmp_path / "none").id() is None


class TestBeginning:
    def test_a_new_run_is_made(self, tmp_path: Path) -> None:
        begin_training(Run(tmp_path / "run"), RECIPE, resume=False)
        assert Run(tmp_path / "run").recipe() == RECIPE.resolved()

    @pytest.mark.parametrize("left", ["model/card.json", "epochs/00001/card.json", "log.jsonl", "checkpoints/step-1"])
    def test_what_a_training_left_is_never_trained_over(self, tmp_path: Path, left: str) -> None:
        run = create_run(tmp_path, 0, RECIPE)
        storage.write_text(tmp_path / left, "x")
        with pytest.raises(BastionError, match=r"--resume, or use another --run \(in Python: resume=True or fol"):
            begin_training(run, RECIPE, resume=False)

    @pytest.mark.parametrize("left", ["model/card.json", "epochs/00001/card.json", "checkpoints/step-1.damaged"])
    def test_without_a_checkpoint_it_is_not_started_over_by_resuming(self, tmp_path: Path, left: str) -> None:
        run = create_run(tmp_path, 0, RECIPE)
        storage.write_text(tmp_path / left, "x")
        with pytest.raises(BastionError, match="its checkpoints are lost, and without one it would start over"):
            begin_training(run, RECIPE, resume=True)

    def test_an_epoch_in_the_log_had_a_checkpoint(self, tmp_path: Path) -> None:
        run = _run(tmp_path / "run")
        begin_training(run, RECIPE, resume=True)  # stopped before its first checkpoint
        run.log({"kind": "epoch", "step": 2, "epoch": 1})
        with pytest.raises(BastionError, match="its checkpoints are lost"):
            begin_training(run, RECIPE, resume=True)

    def test_a_folder_with_a_model_but_no_provenance_is_left_alone(self, tmp_path: Path) -> None:
        storage.write_text(tmp_path / "model" / "card.json", "x")
        for resume in (False, True):
            with pytest.raises(BastionError, match=r"has model but no provenance.json; restore that file, or use"):
                begin_training(Run(tmp_path), RECIPE, resume=resume)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_model_of_another_run_is_recognised(tmp_path: Path) -> None:
    run, other = create_run(tmp_path / "run", seed=0), create_run(tmp_path / "other", seed=0)
    assert run.card() is None
    write_card(run, "5eed", about={"run_id": run.id()})
    card = run.card()
    assert card is not None and card.weights == "5eed"
    shutil.copytree(run.model, other.model)
    with pytest.raises(BastionError, match=rf"other/model/card.json: is the model of another run \({run.id()}\)"):
        other.card()


def test_cores_are_those_that_the_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3, 5}, raising=False)
    assert usable_cores() == 2
    monkeypatch.delattr(os, "sched_getaffinity")  # not every system has it
    assert usable_cores() == os.cpu_count()


@pytest.mark.parametrize("depth", [900, 960, 992, 2000])
def test_a_log_line_however_deep_is_named(tmp_path: Path, depth: int) -> None:
    run = create_run(tmp_path / "run", seed=0)
    run.log_file.write_text(f'{{"kind": "step", "step": 1, "x": {"[" * depth}{"]" * depth}, "checksum": "0"}}\n')
    with pytest.raises(BastionError, match="log.jsonl: line 1 is damaged, edited or of another run"):
        run.history()

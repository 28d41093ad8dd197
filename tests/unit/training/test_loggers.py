"""Numbers of a run go to the tools that people use, if those are installed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import QUICK

from bastion import BastionError, train
from bastion.training.loggers import loggers
from bastion.types import Logger

HALF = (*QUICK, "schedule.epochs=1")


class Kept(Logger):
    """A stranger's, registered nowhere."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        self.calls.append(("open", folder, recipe["seed"], step))

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        self.calls.append((step, dict(numbers)))

    def close(self) -> None:
        self.calls.append("close")


def test_a_logger_of_my_own_gets_every_number(tmp_path: Path) -> None:
    mine = Kept()
    recipe = {"extends": "base/micro", "loggers": [mine]}
    run = train(recipe, changes=HALF, folder=tmp_path / "run")
    assert mine.calls[0] == ("open", tmp_path / "run", 0, 0) and mine.calls[-1] == "close"
    steps = [numbers for step, numbers in mine.calls[1:-1] if "train/loss" in numbers]
    logged = [record["loss"] for record in run.history() if record["kind"] == "step"]
    assert [numbers["train/loss"] for numbers in steps] == logged
    assert "validation/val_clean" in mine.calls[-2][1]
    assert not (tmp_path / "run" / "tensorboard").exists()


def stand_in(calls: list[Any], **known: Any) -> Any:
    """A module whose every other function notes that it was called."""

    class Module(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            return lambda *args, **options: calls.append((name, args, options))

    return Module(**known)


def test_weights_and_biases_gets_one_run_that_a_resumed_one_goes_on_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    client = stand_in(calls)
    begun: list[dict[str, Any]] = []
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **options: begun.append(options) or client))
    logger = loggers.build({"name": "wandb", "project": "p", "mode": "offline"})
    logger.open(tmp_path, {"seed": 3}, 0)
    logger.write({"train/loss": 1.0}, 7)
    logger.close()
    assert begun[0]["project"] == "p" and begun[0]["config"] == {"seed": 3} and begun[0]["resume"] == "allow"
    assert calls == [("log", ({"train/loss": 1.0},), {"step": 7}), ("finish", (), {})]


def test_mlflow_goes_on_in_the_run_that_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    begun: list[dict[str, Any]] = []

    def start_run(**options: Any) -> Any:
        begun.append(options)
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    monkeypatch.setitem(sys.modules, "mlflow", stand_in(calls, start_run=start_run))
    for _ in range(2):
        logger = loggers.build("mlflow")
        logger.open(tmp_path, {"seed": 3}, 0)
        logger.write({"train/loss": 1.0}, 7)
        logger.close()
    assert begun == [{"run_name": tmp_path.name}, {"run_id": "abc"}]
    assert [name for name, _, _ in calls].count("log_dict") == 1
    assert ("log_metrics", ({"train/loss": 1.0},), {"step": 7}) in calls


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_one_line_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(BastionError, match=rf"loggers.0: the logger '{name}' needs the package {name} .*pip install"):
        train("base/micro", changes=(*HALF, f"loggers={name}"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()

"""A run in two parts beside the same run in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bastion.errors import Interrupted
from bastion.run import Run
from bastion.training.trainer import Trainer, train

LAST = "step-000000006.safetensors"


@pytest.fixture
def whole_and_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[str, ...]], tuple[Run, Run]]:
    """Train six steps at once, and again with a stop before the fifth; the last checkpoints must be equal, bit for bit:
    model, objective's networks, optimizers, random states."""
    train_step = Trainer.train_step

    def stop(self: Trainer, batch: Any) -> Any:
        if self.step == 4:
            raise Interrupted("enough", 15)
        return train_step(self, batch)

    def both(changes: tuple[str, ...]) -> tuple[Run, Run]:
        whole = train("base/micro", changes=changes, folder=tmp_path / "whole")
        often = (*changes, "checkpoint.minutes=1e-9")
        with monkeypatch.context() as patch, pytest.raises(Interrupted):
            patch.setattr(Trainer, "train_step", stop)
            train("base/micro", changes=often, folder=tmp_path / "parts")
        parts = train("base/micro", changes=often, folder=tmp_path / "parts", resume=True)
        assert "resumed at step 4" in [record.get("message") for record in parts.history()]
        assert (parts.checkpoints / LAST).read_bytes() == (whole.checkpoints / LAST).read_bytes()
        return whole, parts

    return both

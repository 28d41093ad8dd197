"""TensorBoard's event files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from bastion.settings import settings
from bastion.training.loggers import loggers
from bastion.types import Logger


@loggers.register("tensorboard")
@settings(frozen=False, eq=False)
class TensorBoard(Logger):
    """Event files in the run's folder `tensorboard/`: `tensorboard --logdir RUN`."""

    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        self.client = SummaryWriter(str(folder / "tensorboard"), purge_step=step or None)

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        for name, value in numbers.items():
            self.client.add_scalar(name, value, step)

    def flush(self) -> None:
        self.client.flush()

    def close(self) -> None:
        self.client.close()

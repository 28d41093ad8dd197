"""Weights & Biases, if its package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from bastion.run import Run
from bastion.settings import settings
from bastion.training.loggers import loggers
from bastion.training.loggers.installed import installed
from bastion.types import Logger


@loggers.register("wandb")
@settings(frozen=False, eq=False)
class WeightsAndBiases(Logger):
    """Weights & Biases: a run of the same name, with the recipe as its config; a resumed run goes on in it."""

    project: str = "bastion"
    entity: str | None = None  # user or team; None: the one that is logged in
    mode: Literal["online", "offline", "disabled"] = "online"

    def __post_init__(self) -> None:
        self.client = installed("wandb", "wandb")

    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        self.client = self.client.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            name=folder.resolve().name,
            dir=str(folder),
            config=dict(recipe),
            id=Run(folder).id(),
            resume="allow",
        )

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        self.client.log(dict(numbers), step=step)

    def close(self) -> None:
        self.client.finish()

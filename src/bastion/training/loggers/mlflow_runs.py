"""MLflow, if its package is installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bastion import storage
from bastion.settings import settings
from bastion.training.loggers import loggers
from bastion.training.loggers.installed import installed
from bastion.types import Logger

RUN_ID = ".mlflow"  # file in the run's folder


@loggers.register("mlflow")
@settings(frozen=False, eq=False)
class MLflow(Logger):
    """MLflow: a run of the same name, with the recipe as an artifact; a resumed run goes on in it."""

    experiment: str = "bastion"
    uri: str | None = None  # of the tracking server, or a folder; None: $MLFLOW_TRACKING_URI, or MLflow's own default

    def __post_init__(self) -> None:
        self.client = installed("mlflow", "mlflow")

    def open(self, folder: Path, recipe: Mapping[str, Any], step: int) -> None:
        if self.uri is not None:
            self.client.set_tracking_uri(self.uri)
        self.client.set_experiment(self.experiment)
        known = folder / RUN_ID
        if known.is_file():
            self.client.start_run(run_id=known.read_text().strip())
            return
        run = self.client.start_run(run_name=folder.resolve().name)
        storage.write_text(known, run.info.run_id)
        self.client.log_dict(dict(recipe), "recipe.yaml")

    def write(self, numbers: Mapping[str, float], step: int) -> None:
        self.client.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self.client.end_run()

"""Validation on held-out images, and selection of the epoch whose model is kept."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from torch import Tensor

from bastion.acceleration import accelerate
from bastion.attacks import attacks
from bastion.attacks.judge import judge
from bastion.data.split import limited
from bastion.errors import BastionError
from bastion.forward import in_mode, misclassified, predict
from bastion.models import Classifier, checkpoint
from bastion.recipe import Recipe
from bastion.run import Run
from bastion.training.build import build_model, validation_threat
from bastion.training.checkpoints import unsharded
from bastion.training.distributed import Processes
from bastion.training.log import Log, note
from bastion.types import DataSet, Objective, Split

BATCH = 256


class Selection:
    """Validates models, and keeps the one that the recipe selects."""

    def __init__(
        self,
        recipe: Recipe,
        run: Run,
        processes: Processes,
        objective: Objective,
        data: DataSet,
        train: Split,
        *,
        sharded: bool,
    ) -> None:
        self.recipe, self.run, self.processes, self.settings = recipe, run, processes, recipe.validate_
        self.objective = objective
        if self.settings.choose == "best" and not len(data.val):
            raise BastionError(f"validate.choose: {data.name} holds no images out to find the best by; set it last")
        spec = self.settings.attack
        self.attack = attacks.build(spec.plain(), "validate.attack") if spec else None
        self.threat = validation_threat(recipe, objective) if spec else None
        self.splits = {"val": limited(data.val, self.settings.limit), "train": limited(train, self.settings.train)}
        self.data, self.sharded = data, sharded
        self.best = -1.0  # the score of the model that is kept

    def end_epoch(self, model: Classifier, step: int, epoch: int, log: Log) -> None:
        """Validate the model, and keep it if it is selected; or save it, to be validated after training."""
        settings, last = self.settings, epoch == self.recipe.schedule.epochs
        record: dict[str, Any] = {"step": step, "epoch": epoch}
        due = epoch % settings.every == 0 or last
        if due and settings.when == "end":
            self.save(model, self.run.epochs / f"{epoch:05d}", record, self.networks())
        elif due:
            record |= self.validate(model)
            self.maybe_keep(model, record, self.networks())
        if settings.when == "epochs":
            log.write_epoch(record, self.recipe.schedule.epochs)
        elif last:
            self.validate_saved(model, log)

    def validate_saved(self, like: Classifier, log: Log) -> None:
        """After training, validate the saved models of all epochs."""
        self.processes.barrier()
        if self.processes.main:
            self.run.rewind_log(0, "epoch")  # of an earlier validation that was stopped
        self.best = -1.0
        for folder in sorted(self.run.epochs.iterdir()):
            known = checkpoint.read_card(folder).about
            record: dict[str, Any] = {name: known.get(name) for name in ("step", "epoch")}
            if any(type(number) is not int for number in record.values()):
                raise BastionError(f"{folder}: its card does not say of which step and epoch it is; restore the folder")
            model = _loaded(folder, like).to(self.processes.device)
            record |= self.validate(model)
            self.maybe_keep(model, record, checkpoint.load_networks(folder))
            log.write_epoch(record, self.recipe.schedule.epochs)

    def networks(self) -> dict[str, Tensor]:
        """Tensors of the networks that the objective trains beside the model."""
        networks = self.objective.networks
        return networks.state_dict() if networks is not None and self.objective.optimizer else {}

    def maybe_keep(self, model: Classifier, record: dict[str, Any], networks: dict[str, Tensor]) -> None:
        """Save it as the run's model if it is the best so far, or if the recipe keeps the last one."""
        score = record.get("val_robust", record.get("val_clean", 0.0))
        if self.settings.choose == "last" or score > self.best:
            self.best = score
            self.save(model, self.run.model, record, networks)

    def save(self, model: Classifier, folder: Path, record: dict[str, Any], networks: dict[str, Tensor]) -> None:
        if self.sharded:
            model = unsharded(model, build_model(self.recipe, self.data), self.processes)
        if self.processes.main:
            about = {"run": self.run.name, "run_id": self.run.id(), "recipe": self.recipe.hash(), **record}
            checkpoint.save(model, folder, about, networks)

    def replace_lost(self, model: Classifier, step: int, log: Log) -> None:
        """After the last step: if the run's model, or a network trained beside it, is missing or damaged, save the last
        epoch's model instead."""
        if self.processes.on_main(lambda: self._is_whole(model)):
            return
        if self.processes.main:
            self.run.rewind_log(step - 1, "epoch")
            if self.settings.choose == "best" and self.settings.when == "epochs":
                lost = f"{self.run.model} was lost; the last epoch's model takes the place of the best one's"
                note(self.run, step, lost)
        self.best = -1.0
        self.end_epoch(model, step, self.recipe.schedule.epochs, log)

    def _is_whole(self, like: Classifier) -> bool:
        try:
            _loaded(self.run.model, like)
            checkpoint.load_networks(self.run.model)
        except BastionError:
            return False
        return True

    def validate(self, model: Classifier) -> dict[str, Any]:
        """Clean and, with an attack, robust accuracy of each split, as `val_clean`, `val_robust`, `train_clean`, …"""
        record: dict[str, Any] = {}
        for name, split in self.splits.items():
            record |= {f"{name}_n": len(split)} if name == "val" or len(split) else {}
            if len(split):  # data sets with few images per class have no validation split
                record |= {f"{name}_{what}": value for what, value in self.accuracies(model, split).items()}
        return record

    def accuracies(self, model: Classifier, split: Split) -> dict[str, float]:
        # The processes of a sharded model run it together, so each validates on all images; otherwise on its share.
        shared = Processes(device=self.processes.device) if self.sharded else self.processes
        counts, accelerated = [0, 0], accelerate(model)
        with in_mode(model, training=False):
            for start in range(BATCH * shared.rank, len(split), BATCH * shared.size):
                batch = split.batch(range(start, min(start + BATCH, len(split)))).to(shared.device)
                if self.attack and self.threat:
                    verdict = judge(accelerated, batch, self.attack, self.threat, seed=self.recipe.seed)
                    counts[0] += int(verdict.clean.sum())
                    counts[1] += int((verdict.clean & ~verdict.fooled).sum())
                else:
                    counts[0] += int((~misclassified(predict(model, batch), batch.y)).sum())
        clean, robust = (count / len(split) for count in shared.sum(counts))
        return {"clean": clean, "robust": robust} if self.attack else {"clean": clean}


def _loaded(folder: Path, like: Classifier) -> Classifier:
    """A stored model; a network of the user's own can only be had by copying one."""
    own = like.spec is not None and like.spec.get("name") == checkpoint.OWN
    return checkpoint.load(folder, copy.deepcopy(like.network) if own else None)

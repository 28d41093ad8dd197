"""The one training loop. Read `Trainer.fit` first.

Nothing random has a state: order, augmentation, attacks and dropout are functions of the seed and the step. So a run
that is stopped anywhere and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import Threat, attacks
from bastion.attacks.judge import judge
from bastion.attacks.losses import misclassified
from bastion.data import datasets
from bastion.data.augment import TrainingTransform, mixing
from bastion.data.loader import steps_per_epoch, training_batches
from bastion.errors import BastionError, Interrupted
from bastion.models import Classifier, checkpoint
from bastion.models import models as model_families
from bastion.models.classifier import in_mode
from bastion.models.load import best_device
from bastion.progress import bar, console
from bastion.recipe import Recipe, Stats, differences, load_recipe
from bastion.registry import bind
from bastion.run import Run, create_run
from bastion.signals import StopRequest, stoppable
from bastion.training.log import Log
from bastion.training.objectives import objectives
from bastion.training.optim import make_optimizer, make_schedule
from bastion.training.state import load_state, save_state
from bastion.types import Batch, DataSet, Example, Losses, Objective, Split


def train(
    recipe: Recipe | str | Path,
    *,
    changes: tuple[str, ...] = (),
    folder: str | Path | None = None,
    resume: bool = False,
) -> Run:
    """Train a recipe in a run directory; by default `runs/NAME-HASH`."""
    if isinstance(recipe, Recipe) and changes:
        raise BastionError("train: `changes` go with the name of a recipe; a Recipe is what it is")
    chosen = recipe if isinstance(recipe, Recipe) else load_recipe(recipe, changes)
    name = "run" if isinstance(recipe, Recipe) else Path(recipe).stem
    run = Run(Path(folder) if folder else Path("runs") / f"{name}-{chosen.hash()[:8]}")
    trainer = Trainer(chosen, run)
    create_run(run.folder, chosen.seed, chosen)  # not before everything could be built
    with run.locked(), stoppable() as stop:
        if any(run.checkpoints.glob("*.safetensors")) and not resume:
            raise BastionError(f"{run.folder}: has been trained already; go on with --resume, or use another --run")
        trainer.restore()
        trainer.fit(stop)
    return run


def build_objective(recipe: Recipe) -> Objective:
    """The objective. All else that the recipe names is checked too, before anything is loaded or written."""
    datasets.check(recipe.data.plain(), "data")
    model_families.check(recipe.model.plain(), "model")
    objective = objectives.build(recipe.objective.plain(), "objective")
    if recipe.validate_.attack is not None:
        attacks.build(recipe.validate_.attack.plain(), "validate.attack")
        _validation_threat(recipe, objective)
    return objective


class Trainer:
    """Everything that a run is made of, and the loop over it."""

    def __init__(self, recipe: Recipe, run: Run) -> None:
        self.recipe, self.run = recipe, run
        self.device = best_device()
        self.objective = build_objective(recipe).to(self.device)
        self.data: DataSet = datasets.build(recipe.data.plain(), "data")
        self.split = _limited(self.data.train, recipe.train_limit)
        self.model = build_model(recipe, self.data).to(self.device)
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.optimizer = make_optimizer(self.model, self.objective, recipe.optimizer)
        self.steps_per_epoch = steps_per_epoch(self.split, recipe.batch)
        self.total_steps = recipe.schedule.epochs * self.steps_per_epoch
        self.schedule = make_schedule(self.optimizer, recipe.schedule, self.steps_per_epoch)
        self.ema = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema else None
        self.transform = TrainingTransform(recipe.augment, self.data)
        self.mix = mixing(recipe.augment, len(self.data.classes), recipe.batch)
        self.step = 0  # how many steps are done
        self.best = -1.0  # the validation score of the model that is kept

    def fit(self, stop: StopRequest) -> None:
        """Every step from here to the end of the recipe."""
        log = Log(self.run, self.step)
        saved = time.monotonic()
        with log, bar(f"training {self.run.name}", self.total_steps, self.step) as advance:
            for batch in self.batches():
                example, losses, norm = self.learn(batch)
                self.step += 1
                epoch_ends = self.step % self.steps_per_epoch == 0
                log.images += len(batch.x)
                if self.step % self.recipe.log_every == 0 or epoch_ends:
                    advance(0, note=log.write_step(self.summary(example, losses, norm)))
                if epoch_ends:
                    self.end_epoch(log)
                if epoch_ends or stop or time.monotonic() - saved > 60 * self.recipe.checkpoint.minutes:
                    self.save()
                    saved = time.monotonic()
                if stop:
                    raise self.interrupted(stop)
                advance()
            if not (self.run.model / checkpoint.CARD).is_file():  # lost after the last step
                self.end_epoch(log)

    def batches(self) -> Iterator[Batch]:
        """The batches from the present step on, mixed if the recipe says so."""
        loader = training_batches(
            self.split,
            self.transform,
            batch=self.recipe.batch,
            seed=self.recipe.seed,
            start=self.step,
            stop=self.total_steps,
            workers=self.recipe.workers,
        )
        for batch in _told_plainly(loader):
            batch = batch.to(self.device).check(len(self.data.classes), f"training step {self.step}")
            with self.random("mix"):
                batch = self.mix(batch)
            yield batch

    def learn(self, batch: Batch) -> tuple[Example, Losses, Tensor]:
        """One step: find the example, go down its loss."""
        self.model.train()
        self.schedule.step_update(self.step)
        with self.random("learn"), self.precision():
            example = self.objective.prepare(
                self.model,
                batch,
                progress=self.step / self.steps_per_epoch,
                seed=rng.key(self.recipe.seed, self.step),
            )
            losses = self.objective.loss(self.model, example)
        self.optimizer.zero_grad(set_to_none=True)
        losses.total.backward()  # type: ignore[no-untyped-call]
        limit = self.recipe.optimizer.clip_grad
        learnt = [*self.model.parameters(), *self.objective.parameters()]
        norm = nn.utils.clip_grad_norm_(learnt, limit or torch.inf)
        if not (losses.total.isfinite() and norm.isfinite()):
            raise self.diverged(losses.total.item(), norm.item())
        self.optimizer.step()
        if self.ema:
            self.ema.update(self.model, self.step + 1)  # the first update copies: random weights are no part of it
        return example, losses, norm

    def summary(self, example: Example, losses: Losses, norm: Tensor) -> dict[str, Any]:
        """Numbers of the last step for the log; clean accuracy takes a forward pass of its own if need be."""
        accuracy = _accuracy(losses.logits, example.clean.y)
        record = {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "loss": losses.total.item(),
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm.item(),
            "clean_accuracy": accuracy,
            **example.notes,
            **{name: term.item() for name, term in losses.terms.items()},
        }
        if example.x is not example.clean.x:
            self.model.eval()
            with torch.no_grad(), self.precision():
                record["clean_accuracy"] = _accuracy(self.model(example.clean.x), example.clean.y)
            record["robust_accuracy"] = accuracy
        return record

    def end_epoch(self, log: Log) -> None:
        """Look at the held-out images, and keep the model if it is the one to keep."""
        settings = self.recipe.validate_
        epoch = self.step // self.steps_per_epoch
        last = self.step == self.total_steps
        record: dict[str, Any] = {"step": self.step, "epoch": epoch}
        if epoch % settings.every == 0 or last:
            record |= self.validate()
            score = record.get("val_robust", record.get("val_clean", 0.0))
            if settings.choose == "last" or score > self.best:
                self.best = score
                checkpoint.save(
                    self.kept(),
                    self.run.model,
                    {"run": self.run.name, "recipe": self.recipe.hash(), **record},
                )
        log.write_epoch(record, self.recipe.schedule.epochs)

    def validate(self) -> dict[str, Any]:
        """Clean and, if the recipe names an attack, robust accuracy on the validation split."""
        settings, model = self.recipe.validate_, self.kept()
        split = _limited(self.data.val, settings.limit)
        if not len(split):  # data with a handful of images a class have none to spare
            return {"val_n": 0}
        attack = attacks.build(settings.attack.plain(), "validate.attack") if settings.attack else None
        threat = _validation_threat(self.recipe, self.objective) if attack else None
        clean, robust = 0, 0
        with in_mode(model, training=False):
            for start in range(0, len(split), 256):
                batch = split.batch(range(start, min(start + 256, len(split)))).to(self.device)
                if attack and threat:
                    verdict = judge(model, batch, attack, threat, seed=self.recipe.seed)
                    clean += int(verdict.clean.sum())
                    robust += int((verdict.clean & ~verdict.fooled).sum())
                else:
                    clean += int((~_wrong(model, batch)).sum())
        record = {"val_n": len(split), "val_clean": clean / len(split)}
        return {**record, "val_robust": robust / len(split)} if attack else record

    def kept(self) -> Classifier:
        """The model that is measured and saved: the average of the weights if there is one."""
        if self.ema is None:
            return self.model
        average: Classifier = self.ema.module
        return average

    def save(self) -> None:
        """A checkpoint of everything that is not a function of recipe and step; older ones are removed."""
        state = {
            "of": self.belonging(),
            "step": self.step,
            "best": self.best,
            "model": self.model.state_dict(),
            "objective": self.objective.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "ema": self.ema.module.state_dict() if self.ema else None,
        }
        save_state(self.run.checkpoints / f"step-{self.step:09d}.safetensors", state)
        for old in sorted(self.run.checkpoints.glob("step-*.safetensors"))[: -self.recipe.checkpoint.keep]:
            old.unlink(missing_ok=True)

    def belonging(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be gone on from."""
        return {"recipe": self.recipe.hash(), "data": self.data.fingerprint, "steps_per_epoch": self.steps_per_epoch}

    def restore(self) -> None:
        """Go back to the newest checkpoint that is whole, if there is one."""
        paths = sorted(self.run.checkpoints.glob("step-*.safetensors"), reverse=True)
        for path in paths:
            try:
                state = load_state(path)
            except BastionError as error:
                console.print(f"{error}; trying the one before it", markup=False, style="yellow")
                message = f"{path.name} is damaged; the one before it is used"
                self.run.log({"kind": "event", "step": 0, "message": message})
                path.rename(path.with_suffix(".damaged"))  # or it would be taken for the newest
                continue
            if state["of"] != self.belonging():
                changed = "; ".join(differences(state["of"], self.belonging()))
                raise BastionError(f"{path}: is of other data or another recipe ({changed}); use another --run")
            self.model.load_state_dict(state["model"])
            self.objective.load_state_dict(state["objective"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.ema:
                self.ema.module.load_state_dict(state["ema"])
            self.step, self.best = state["step"], state["best"]
            self.run.rewind_log(self.step)
            self.run.log({"kind": "event", "step": self.step, "message": f"resumed at step {self.step}"})
            return
        if paths:
            raise BastionError(f"{self.run.checkpoints}: no checkpoint is whole; restore one, or use another --run")
        self.run.rewind_log(0)

    @contextmanager
    def random(self, purpose: str) -> Iterator[None]:
        """The global generators as a function of seed, step and purpose, for dropout and its like."""
        with rng.preserved():
            rng.reseed(purpose, self.recipe.seed, self.step)
            yield

    def precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.recipe.precision == "bf16" else nullcontext()

    def diverged(self, loss: float, norm: float) -> BastionError:
        return BastionError(
            f"training step {self.step}: loss {loss:.4g}, gradient norm {norm:.4g}; stopped before the step. "
            f"Try a smaller optimizer.lr (now {self.recipe.optimizer.lr:g}), optimizer.clip_grad (now "
            f"{self.recipe.optimizer.clip_grad}) or precision=fp32; checkpoints in {self.run.checkpoints} are intact"
        )

    def interrupted(self, stop: StopRequest) -> Interrupted:
        return Interrupted(
            f"train: stopped by a signal at step {self.step} of {self.total_steps}; saved: go on with "
            "the same command and --resume",
            stop.received or 0,
        )


def build_model(recipe: Recipe, data: DataSet) -> Classifier:
    """The recipe's model for this data set, with the weights that its seed gives."""
    if isinstance(recipe.normalize, Stats):
        mean, std = recipe.normalize.mean, recipe.normalize.std
    elif recipe.normalize == "data":
        mean, std = data.mean, data.std
    else:
        mean, std = (0.0,) * data.shape[0], (1.0,) * data.shape[0]
    given = {"num_classes": len(data.classes), "in_chans": data.shape[0]}
    spec = {**given, **recipe.model.plain()}
    for key, value in given.items():
        if spec[key] != value:
            raise BastionError(f"model.{key}: {data.name} has {value}, the recipe says {spec[key]}; leave it out")
    model = checkpoint.build(spec, mean=mean, std=std, shape=data.shape, resize=recipe.resize, seed=recipe.seed)
    model.check_input(data.shape, f"model on {data.name}")
    return model


def _validation_threat(recipe: Recipe, objective: Objective) -> Threat:
    """The recipe's own, or the one that is trained against."""
    if recipe.validate_.threat is not None:
        return Threat(**bind(Threat, recipe.validate_.threat, "validate.threat"))
    threat = getattr(objective, "threat", None)
    if not isinstance(threat, Threat):
        raise BastionError("validate.threat: missing; the objective has none of its own, so the attack needs one here")
    return threat


def _limited(split: Split, limit: int | None) -> Split:
    return split if limit is None or limit >= len(split) else split.subset(range(limit))


def _wrong(model: nn.Module, batch: Batch) -> Tensor:
    with torch.no_grad():
        return misclassified(model(batch.x), batch.y)


def _told_plainly(loader: Iterable[Batch]) -> Iterator[Batch]:
    """A loading process wraps its error in a page of text, of which the last line is the error."""
    try:
        yield from loader
    except BastionError as error:
        last = str(error).strip().splitlines()[-1]
        raise BastionError(last.partition("BastionError: ")[2] or last) from error


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return 1.0 - misclassified(logits.detach(), y).float().mean().item()

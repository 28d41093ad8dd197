"""The training loop. Read `Trainer.fit` first.

Random numbers have no state: order, augmentation, attacks and dropout are functions of the seed and the step. So a run
that is stopped at any step and resumed ends with the same bits as an uninterrupted one.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from bastion import rng, storage
from bastion.data import datasets
from bastion.data.augment import TrainingTransform, mixing
from bastion.data.loader import batch_layout, training_batches
from bastion.data.pool import Pool, build_extra
from bastion.data.split import limited
from bastion.errors import BastionError, Interrupted, explain_unknown
from bastion.forward import check_gradient, in_mode, is_sharded, misclassified, single_image_gradients
from bastion.models import Classifier, checkpoint
from bastion.models.adapt import transfer
from bastion.models.load import best_device, load, locate
from bastion.progress import Advance, bar
from bastion.recipe import Recipe
from bastion.recipe_files import Changes
from bastion.run import Run, begin_training
from bastion.signals import StopRequest, stoppable
from bastion.training.build import NOTHING, build_model, build_objective, set_up_objective
from bastion.training.checkpoints import restore_checkpoint, save_checkpoint
from bastion.training.distributed import Processes, join_processes, launcher
from bastion.training.log import Log, note
from bastion.training.loggers import loggers
from bastion.training.loss import StepLoss, concatenated, mean_losses
from bastion.training.optim import make_optimizer
from bastion.training.perturb import perturbed, quiet_norms
from bastion.training.schedules import set_rate
from bastion.training.selection import Selection
from bastion.training.sync_batchnorm import convert_batchnorms
from bastion.training.user_objects import Name, UserObjects, recipe_for, setting_of_the_recipe
from bastion.types import Batch, DataSet, Losses, Objective, Prepared, Split, TrainingContext

HASHED = 10_000  # images of a split, so that those of other trainings are noticed


@explain_unknown(setting_of_the_recipe)
def train(
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    *,
    model: nn.Module | Name | None = None,
    data: Any = None,
    objective: Objective | Name | None = None,
    epochs: int | None = None,
    changes: Changes = (),
    folder: str | Path | None = None,
    resume: bool = False,
    device: str | None = None,
) -> Run:
    """Train a recipe in a run directory; by default `runs/NAME-HASH`.

    `model`, `data`, `objective` and `epochs` take the place of the recipe's; with a model and data no recipe is needed.
    A network of your own takes pixels in [0, 1]; it is trained in place, and ends with the weights that are stored.
    `data` is `(x, y)`, a torch Dataset or DataLoader, some of whose images are held out to validate with, or a name.
    """
    parts: dict[str, Any] = {"model": model, "data": data, "objective": objective, "epochs": epochs}
    chosen, objects = recipe_for(recipe, changes, **parts)
    run = Run(Path(folder) if folder else Path("runs") / f"{_name(recipe, model)}-{chosen.hash()[:8]}")
    before = None if objects.model is None else objects.model.mean.device
    with join_processes(best_device(device)) as processes, ExitStack() as stack:
        trainer = Trainer(chosen, run, processes, objects)  # builds and checks everything, writes nothing
        processes.on_main(lambda: _claim(run, chosen, resume, stack))
        with stoppable() as stop:
            trainer.start()
            trainer.fit(stop)
        if objects.model is not None:
            processes.barrier()
            kept = checkpoint.load(run.model, objects.model.network if objects.is_own else None)
            objects.model.load_state_dict(kept.state_dict())
            objects.model.to(before).eval()
    return run


def _name(recipe: Any, model: Any) -> str:
    """What a run is called after."""
    if isinstance(recipe, str | Path):
        return Path(recipe).stem
    return type(model).__name__.lower() if isinstance(model, nn.Module) else "run"


def _claim(run: Run, recipe: Recipe, resume: bool, stack: ExitStack) -> None:
    """Lock the run until the stack is closed, and write its recipe and provenance; an error if it cannot be trained."""
    stack.enter_context(run.locked())
    storage.remove_leftovers(run.folder)
    started_by = launcher()
    # If the torchrun that started the run has restarted its processes, they resume.
    again = started_by is not None and run.launched.is_file() and run.launched.read_bytes() == started_by.encode()
    begin_training(run, recipe, resume=resume or again)
    if started_by:
        storage.write_text(run.launched, started_by)


def _digest(splits: Iterable[Split]) -> str:
    """Hash the first images of each split, as the fingerprint of a folder is of paths and sizes only.

    The order of a folder's images is random, so these are a sample; all of ImageNet would be 140 GB to read.
    """
    return storage.fingerprint([limited(split, HASHED).digest() for split in splits])


class Trainer:
    """The parts of a training run, and the loop."""

    def __init__(self, recipe: Recipe, run: Run, processes: Processes, objects: UserObjects = NOTHING) -> None:
        self.recipe, self.run, self.processes, self.objects = recipe, run, processes, objects
        self.device = processes.device
        share = processes.share(recipe.batch)
        if share % recipe.accumulate:
            raise BastionError(
                f"accumulate: the {share} images of each process cannot be cut into {recipe.accumulate} equal parts"
            )
        if recipe.init and not storage.files(run.checkpoints, "*.safetensors"):
            locate(recipe.init.from_)
        self.objective = build_objective(recipe, objects)
        self.data: DataSet = objects.data or datasets.build(recipe.data.plain(), "data")
        extra = build_extra(recipe.extra, self.data)
        split = limited(self.data.train, recipe.train_limit)
        self.pool = Pool(split, [(each.train, said.share) for each, said in zip(extra, recipe.extra, strict=True)])
        self.model = (objects.model or build_model(recipe, self.data)).to(self.device)
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        set_up_objective(self.objective, TrainingContext(self.model, self.data, recipe))
        step_loss = StepLoss(self.model, self.objective, recipe.optimizer.l1)
        if recipe.sync_batchnorm and processes.size > 1:
            convert_batchnorms(step_loss)
        self.sharded = recipe.parallel == "fsdp" and processes.size > 1
        if self.sharded:
            self.refuse_what_cannot_be_sharded()
            processes.shard(self.model)
        self.step_loss = step_loss if self.sharded else processes.wrap(step_loss)
        self.optimizer = make_optimizer(self.model, recipe.optimizer)
        self.ema = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema else None
        self.steps_per_epoch = batch_layout(self.pool, recipe.batch, recipe.augment.repeats).steps
        self.total_steps = recipe.schedule.epochs * self.steps_per_epoch
        self.peak = recipe.optimizer.peak(recipe.batch)
        self.transform = TrainingTransform(recipe.augment, self.data)
        self.mix = mixing(recipe.augment, len(self.data.classes), share)
        self.selection = Selection(recipe, run, processes, self.objective, self.data, split, sharded=self.sharded)
        self.identity = {  # a checkpoint must have the same to be resumed
            "recipe": recipe.hash(),
            "data": "+".join(each.fingerprint for each in (self.data, *extra)),
            "images": _digest([*self.pool.splits, self.selection.splits["val"]]),
            "steps_per_epoch": self.steps_per_epoch,
        }
        self.loggers = [loggers.build(spec.plain(), f"loggers.{number}") for number, spec in enumerate(recipe.loggers)]
        self.waited = 0.0  # seconds spent waiting for batches since they were last logged
        self.step = 0  # number of steps done

    def refuse_what_cannot_be_sharded(self) -> None:
        asked = {
            "ema": self.recipe.ema,
            "optimizer.perturb": self.recipe.optimizer.perturb,
            "optimizer.l1": self.recipe.optimizer.l1,
            "an objective with networks of its own": self.objective.networks is not None,
            "a network that was given as an object": self.objects.model is not None,
        }
        if wrong := [name for name, value in asked.items() if value]:
            raise BastionError(f"parallel: fsdp does not go with {' and '.join(wrong)}; leave it out, or use ddp")

    def start(self) -> None:
        """Start from the newest checkpoint; without one, from the recipe's `init`, or from random weights."""
        if restore_checkpoint(self):
            return
        if self.processes.main:
            self.run.rewind_log(0)
        if self.recipe.init:
            self.initialise(self.recipe.init.from_, self.recipe.init.new)

    def fit(self, stop: StopRequest) -> None:
        """Train from the current step to the end of the recipe."""
        saved = time.monotonic()
        logged = self.recipe.resolved(), self.loggers
        with Log(self.run, self.step, *logged, silent=not self.processes.main) as log, self.bar() as advance:
            for batch in self.batches():
                prepared, losses, norms = self.train_step(batch)
                self.step += 1
                epoch, within = divmod(self.step, self.steps_per_epoch)
                log.images += self.recipe.batch
                if self.step % self.recipe.log_every == 0 or not within:
                    advance(0, note=log.write_step(self.summary(prepared, losses, norms), self.waited))
                    self.waited = 0.0
                if not within:
                    self.selection.end_epoch(self.kept(), self.step, epoch, log)
                due = time.monotonic() - saved > 60 * self.recipe.checkpoint.minutes
                stopped, due = (count > 0 for count in self.processes.sum([bool(stop), due]))
                if not within or stopped or due:
                    save_checkpoint(self)
                    saved = time.monotonic()
                if stopped:
                    raise self.interrupted(stop)
                advance()
            self.selection.replace_lost(self.kept(), self.step, log)

    def bar(self) -> AbstractContextManager[Advance]:
        title = f"training {self.run.name}"
        return bar(title, self.total_steps, self.step) if self.processes.main else nullcontext(lambda *_, **__: None)

    def batches(self) -> Iterator[Batch]:
        """The batches from the current step on, with MixUp or CutMix if the recipe has them."""
        loader = training_batches(
            self.pool,
            self.transform,
            batch=self.recipe.batch,
            repeats=self.recipe.augment.repeats,
            seed=self.recipe.seed,
            start=self.step,
            stop=self.total_steps,
            workers=self.recipe.workers,
            rank=self.processes.rank,
            ranks=self.processes.size,
        )
        for batch in self.timed(_with_plain_errors(loader)):
            batch = batch.to(self.device).check(len(self.data.classes), f"training step {self.step}")
            with self.seeded("mix"):
                batch = self.mix(batch, self.step // self.steps_per_epoch)
            yield batch

    def timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Count the seconds spent waiting for batches."""
        asked = time.monotonic()
        for batch in batches:
            self.waited += time.monotonic() - asked
            yield batch
            asked = time.monotonic()

    def train_step(self, batch: Batch) -> tuple[Prepared, Losses, dict[str, Tensor]]:
        """Find the input to train on, and take an optimizer step; also returns the norms of the gradients."""
        self.step_loss.train()
        set_rate(self.optimizer, self.recipe.schedule, self.peak, self.step, self.steps_per_epoch)
        own, perturb = self.objective.optimizer, self.recipe.optimizer.perturb
        # Dropout differs between processes.
        with self.seeded("learn" if self.processes.main else f"learn {self.processes.rank}"):
            parts = [self.prepare(part) for part in batch.chunk(self.recipe.accumulate)]
            losses = self.gradients(parts)
            if perturb and self.step >= perturb.after * self.steps_per_epoch:
                with perturbed(_trained(self.optimizer), perturb), quiet_norms(self.step_loss):
                    losses = losses._replace(terms={**losses.terms, "nearby": self.gradients(parts).total})
        norms = {"grad_norm": _clip(self.optimizer, self.recipe.optimizer.clip_grad)}
        if own:
            norms["objective_grad_norm"] = _clip(own, self.objective.clip_grad)
        if not (losses.total.isfinite() and all(norm.isfinite() for norm in norms.values())):
            raise self.diverged(losses.total, norms)
        self.optimizer.step()
        if own:
            own.step()
        self.processes.average_buffers(self.step_loss)
        if self.ema:
            self.ema.update(self.model, self.step + 1)  # the first update copies, so random weights are not averaged
        return concatenated(parts), losses, norms

    def prepare(self, batch: Batch) -> Prepared:
        progress, seed = self.step / self.steps_per_epoch, rng.key(self.recipe.seed, self.step)
        with self.precision():
            return self.objective.prepare(self.model, batch, progress=progress, seed=seed)

    def gradients(self, parts: list[Prepared]) -> Losses:
        """Compute the gradient of the mean loss over the parts of a batch, in `.grad` of the parameters."""
        # Not `module.zero_grad`: a sharded module may currently hold gathered weights, which are not the optimizer's.
        self.optimizer.zero_grad(set_to_none=True)
        if self.objective.optimizer:
            self.objective.optimizer.zero_grad(set_to_none=True)
        found = []
        for number, prepared in enumerate(parts, 1):
            with self.processes.sync_gradients(self.step_loss, number == len(parts)):
                with self.precision(), single_image_gradients(prepared.x):
                    losses: Losses = self.step_loss(prepared)
                check_gradient(losses.total, f"training step {self.step}")
                (losses.total / len(parts)).backward()  # type: ignore[no-untyped-call]
            found.append(losses)
        return mean_losses(found)

    def summary(self, prepared: Prepared, losses: Losses, norms: dict[str, Tensor]) -> dict[str, Any]:
        """Numbers of the last step for the log; if necessary, clean accuracy is measured on a quarter of the batch."""
        y, clean = prepared.clean.y, losses.clean
        accuracy = _accuracy(losses.logits, y)
        record = {"loss": losses.total.item(), "clean_accuracy": accuracy}
        record |= {name: term.item() for name, term in losses.terms.items()}
        if clean is None and prepared.x is not prepared.clean.x:
            with torch.no_grad(), in_mode(self.model, training=False), self.precision():
                clean = self.model(prepared.clean.x[: -(-len(y) // 4)])
        if clean is not None:
            record |= {"clean_accuracy": _accuracy(clean, y[: len(clean)]), "robust_accuracy": accuracy}
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            **{name: norm.item() for name, norm in norms.items()},
            **prepared.notes,
            **self.processes.mean(record),
        }

    def kept(self) -> Classifier:
        """The model that is validated and saved: that of averaged weights (EMA), if the recipe has one."""
        if self.ema is None:
            return self.model
        average: Classifier = self.ema.module
        return average

    def initialise(self, name: str, new: tuple[str, ...]) -> None:
        """Load the weights of another model; the log lists which tensors were loaded."""
        source = load(name)
        done = transfer(source.to(self.device), self.model, new)
        if self.ema:
            self.ema.set(self.model)
        if self.processes.main:
            loaded = f"weights of {name} ({checkpoint.digest(source)[:16]}): {done}"
            note(self.run, self.step, loaded, init=done.as_dict())
            if not (torch.equal(source.mean, self.model.mean) and torch.equal(source.std, self.model.std)):
                message = f"{name} normalises images otherwise: its features will not be what they were"
                note(self.run, self.step, message)

    @contextmanager
    def seeded(self, purpose: str) -> Iterator[None]:
        """Seed torch's global generators by seed, step and purpose, for dropout and the like."""
        with rng.preserved():
            rng.reseed(purpose, self.recipe.seed, self.step)
            yield

    def precision(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.recipe.precision == "bf16" else nullcontext()

    def diverged(self, loss: Tensor, norms: dict[str, Tensor]) -> BastionError:
        norm = ", ".join(f"{norm.item():.4g}" for norm in norms.values())
        return BastionError(
            f"training step {self.step}: loss {loss.item():.4g}, gradient norm {norm}; stopped before the step. "
            f"Try a smaller optimizer.lr (now {self.recipe.optimizer.lr:g}), optimizer.clip_grad (now "
            f"{self.recipe.optimizer.clip_grad}) or precision=fp32; checkpoints in {self.run.checkpoints} are intact"
        )

    def interrupted(self, stop: StopRequest) -> Interrupted:
        return Interrupted(
            f"train: stopped by a signal at step {self.step} of {self.total_steps}; saved: go on with "
            "the same command and --resume",
            stop.received or 0,
        )


def _trained(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _clip(optimizer: torch.optim.Optimizer, largest: float | None) -> Tensor:
    """Clip the norm of the gradient of all parameters of the optimizer; returns the norm before clipping."""
    norm = nn.utils.clip_grad_norm_(_trained(optimizer), largest or torch.inf)
    full: Tensor = norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
    return full


def _with_plain_errors(loader: Iterable[Batch]) -> Iterator[Batch]:
    """Raise the error of a loader process without the traceback that torch wraps it in."""
    try:
        yield from loader
    except BastionError as error:
        raise BastionError(re.split(r"bastion\.\w+\.\w+Error: ", str(error))[-1]) from error


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return 1.0 - misclassified(logits.detach(), y).float().mean().item()

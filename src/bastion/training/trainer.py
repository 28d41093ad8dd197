"""The one training loop. Read `Trainer.fit` first.

Nothing random has a state: order, augmentation, attacks and dropout are functions of the seed and the step. So a run
that is stopped anywhere and resumed ends with the same bits as one that was not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import torch
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from bastion import rng, storage
from bastion.data import datasets
from bastion.data.augment import TrainingTransform, mixing
from bastion.data.loader import plan, training_batches
from bastion.data.pool import Pool, build_extra
from bastion.errors import BastionError, Interrupted
from bastion.forward import in_mode, misclassified, single_image_gradients
from bastion.models import Classifier, checkpoint
from bastion.models.adapt import transfer
from bastion.models.load import best_device, load, locate
from bastion.progress import Advance, bar, console
from bastion.recipe import Recipe, differences, load_recipe
from bastion.run import Run, create_run
from bastion.signals import StopRequest, stoppable
from bastion.training.batchnorm import share_batchnorms
from bastion.training.build import build_model, build_objective
from bastion.training.log import Log
from bastion.training.optim import make_optimizer
from bastion.training.perturb import perturbed, quiet_norms
from bastion.training.schedules import set_rate
from bastion.training.state import load_state, newest, save_state
from bastion.training.step import Step, joined, mean
from bastion.training.validation import validate
from bastion.training.world import World, joined_world, launcher
from bastion.types import Batch, DataSet, Example, Losses, Split

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


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
    with joined_world(best_device()) as world:
        trainer = Trainer(chosen, run, world)
        if world.main:
            create_run(run.folder, chosen.seed, chosen)  # not before everything could be built
        world.wait()
        with run.locked() if world.main else nullcontext(), stoppable() as stop:
            trained = any(run.checkpoints.glob("*.safetensors")) and not resume
            if world.first_says(trained and not _begun_by(run, launcher())):
                raise BastionError(f"{run.folder}: has been trained already; go on with --resume, or use another --run")
            if world.main and (started_by := launcher()):
                storage.write_text(run.launched, started_by)
            trainer.restore()
            trainer.fit(stop)
    return run


def _begun_by(run: Run, who: str | None) -> bool:
    """Has this torchrun begun the run? Then it has started the processes again, and they go on."""
    return who is not None and run.launched.is_file() and run.launched.read_text() == who


class Trainer:
    """Everything that a run is made of, and the loop over it."""

    def __init__(self, recipe: Recipe, run: Run, world: World) -> None:
        self.recipe, self.run, self.world = recipe, run, world
        self.device = world.device
        share = world.share(recipe.batch, "processes")
        if share % recipe.accumulate:
            raise BastionError(
                f"accumulate: the {share} images of each process cannot be cut into {recipe.accumulate} equal parts"
            )
        if recipe.init and not any(run.checkpoints.glob("*.safetensors")):
            locate(recipe.init.from_)
        self.objective = build_objective(recipe).to(self.device)
        self.data: DataSet = datasets.build(recipe.data.plain(), "data")
        self.extra = build_extra(recipe.extra, self.data)
        self.split = _limited(self.data.train, recipe.train_limit)
        self.pool = Pool(self.split, [(e.train, each.share) for e, each in zip(self.extra, recipe.extra, strict=True)])
        if recipe.validate_.choose == "best" and not len(self.data.val):
            raise BastionError(
                f"validate.choose: {self.data.name} holds no images out to find the best by; set it last"
            )
        self.held_out = _limited(self.data.val, recipe.validate_.limit)
        self.seen = self.split.subset(range(min(recipe.validate_.train, len(self.split))))
        self.model = build_model(recipe, self.data).to(self.device)
        if recipe.channels_last:
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if recipe.sync_batchnorm and world.size > 1:
            share_batchnorms(self.model)
        self.sharded = recipe.parallel == "fsdp" and world.size > 1
        if self.sharded:
            self.refuse_what_cannot_be_sharded()
            world.shard(self.model)
        self.optimizer = make_optimizer(self.model, self.objective, recipe.optimizer)
        step = Step(self.model, self.objective, recipe.optimizer.l1)
        self.stepper = step if self.sharded else world.wrap(step)
        self.steps_per_epoch = plan(self.pool, recipe.batch, recipe.augment.repeats).steps
        self.total_steps = recipe.schedule.epochs * self.steps_per_epoch
        self.peak = recipe.optimizer.peak(recipe.batch)
        self.ema = ModelEmaV3(self.model, decay=recipe.ema) if recipe.ema else None
        self.transform = TrainingTransform(recipe.augment, self.data)
        self.mix = mixing(recipe.augment, len(self.data.classes), share)
        self.waited = 0.0  # seconds without a batch to work on, since they were last logged
        self.step = 0  # how many steps are done
        self.best = -1.0  # the validation score of the model that is kept

    def refuse_what_cannot_be_sharded(self) -> None:
        own = any(True for _ in self.objective.parameters())
        asked = {"ema": self.recipe.ema, "optimizer.perturb": self.recipe.optimizer.perturb}
        asked |= {"optimizer.l1": self.recipe.optimizer.l1, "an objective with parameters of its own": own}
        if wrong := [name for name, value in asked.items() if value]:
            raise BastionError(f"parallel: fsdp does not go with {' and '.join(wrong)}; leave it out, or use ddp")

    def fit(self, stop: StopRequest) -> None:
        """Every step from here to the end of the recipe."""
        saved = time.monotonic()
        with Log(self.run, self.step, silent=not self.world.main) as log, self.bar() as advance:
            for batch in self.batches():
                example, losses, norm = self.learn(batch)
                self.step += 1
                epoch_ends = self.step % self.steps_per_epoch == 0
                log.images += self.recipe.batch
                if self.step % self.recipe.log_every == 0 or epoch_ends:
                    advance(0, note=log.write_step(self.summary(example, losses, norm), self.waited))
                    self.waited = 0.0
                if epoch_ends:
                    self.end_epoch(log)
                due = time.monotonic() - saved > 60 * self.recipe.checkpoint.minutes
                stopped, due = (count > 0 for count in self.world.totals([bool(stop), due]))
                if epoch_ends or stopped or due:
                    self.save()
                    saved = time.monotonic()
                if stopped:
                    raise self.interrupted(stop)
                advance()
            if not (self.run.model / checkpoint.CARD).is_file():
                self.replace_lost_model(log)

    def bar(self) -> AbstractContextManager[Advance]:
        title = f"training {self.run.name}"
        return bar(title, self.total_steps, self.step) if self.world.main else nullcontext(lambda *_, **__: None)

    def batches(self) -> Iterator[Batch]:
        """The batches from the present step on, mixed if the recipe says so."""
        loader = training_batches(
            self.pool,
            self.transform,
            batch=self.recipe.batch,
            repeats=self.recipe.augment.repeats,
            seed=self.recipe.seed,
            start=self.step,
            stop=self.total_steps,
            workers=self.recipe.workers,
            rank=self.world.rank,
            ranks=self.world.size,
        )
        for batch in self.awaited(_told_plainly(loader)):
            batch = batch.to(self.device).check(len(self.data.classes), f"training step {self.step}")
            with self.random("mix"):
                batch = self.mix(batch, self.step // self.steps_per_epoch)
            yield batch

    def awaited(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Count the seconds that the next batch keeps us waiting."""
        asked = time.monotonic()
        for batch in batches:
            self.waited += time.monotonic() - asked
            yield batch
            asked = time.monotonic()

    def learn(self, batch: Batch) -> tuple[Example, Losses, Tensor]:
        """One step: find the example, go down its loss."""
        self.model.train()
        set_rate(self.optimizer, self.recipe.schedule, self.peak, self.step, self.steps_per_epoch)
        learnt = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        worse = self.recipe.optimizer.perturb
        # MixUp mixes the batch of all processes alike; dropout is each one's own.
        with self.random("learn" if self.world.main else f"learn {self.world.rank}"):
            examples = [self.prepare(part) for part in self.parts(batch)]
            losses = self.gradients(examples)
            if worse and self.step >= worse.after * self.steps_per_epoch:
                with perturbed(learnt, worse), quiet_norms(self.model):
                    losses = losses._replace(terms={**losses.terms, "nearby": self.gradients(examples).total})
        norm = nn.utils.clip_grad_norm_(learnt, self.recipe.optimizer.clip_grad or torch.inf)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if not (losses.total.isfinite() and norm.isfinite()):
            raise self.diverged(losses.total.item(), norm.item())
        self.optimizer.step()
        self.world.agree_on_buffers(self.model)
        if self.ema:
            self.ema.update(self.model, self.step + 1)  # the first update copies: random weights are no part of it
        return joined(examples), losses, norm

    def parts(self, batch: Batch) -> list[Batch]:
        """What goes through the model at once."""
        return batch.chunk(self.recipe.accumulate)

    def prepare(self, batch: Batch) -> Example:
        progress, seed = self.step / self.steps_per_epoch, rng.key(self.recipe.seed, self.step)
        with self.precision():
            return self.objective.prepare(self.model, batch, progress=progress, seed=seed)

    def gradients(self, examples: list[Example]) -> Losses:
        """Leave the gradient of the mean loss in the parameters."""
        self.optimizer.zero_grad(set_to_none=True)
        parts = []
        for number, example in enumerate(examples, 1):
            with self.world.together(self.stepper, number == len(examples)):
                with self.precision(), single_image_gradients(example.x):
                    losses: Losses = self.stepper(example)
                (losses.total / len(examples)).backward()  # type: ignore[no-untyped-call]
            parts.append(losses)
        return mean(parts)

    def summary(self, example: Example, losses: Losses, norm: Tensor) -> dict[str, Any]:
        """Numbers of the last step for the log; clean accuracy, if need be, from a pass of a quarter of the batch."""
        accuracy, y = _accuracy(losses.logits, example.clean.y), example.clean.y
        record = {"loss": losses.total.item(), "clean_accuracy": accuracy}
        record |= {name: term.item() for name, term in losses.terms.items()}
        if example.x is not example.clean.x:
            clean = losses.clean
            if clean is None:
                with torch.no_grad(), in_mode(self.model, training=False), self.precision():
                    clean = self.model(example.clean.x[: -(-len(y) // 4)])
            record |= {"clean_accuracy": _accuracy(clean, y[: len(clean)]), "robust_accuracy": accuracy}
        return {
            "step": self.step,
            "epoch": self.step / self.steps_per_epoch,
            "lr": self.optimizer.param_groups[0]["lr"],
            "grad_norm": norm.item(),
            **example.notes,
            **self.world.means(record),
        }

    def end_epoch(self, log: Log) -> None:
        """Look at the held-out images, and keep the model if it is the one to keep."""
        settings = self.recipe.validate_
        epoch = self.step // self.steps_per_epoch
        last = self.step == self.total_steps
        record: dict[str, Any] = {"step": self.step, "epoch": epoch}
        looked = epoch % settings.every == 0 or last
        if looked and settings.when == "end":
            self.keep(self.kept(), self.run.epochs / f"{epoch:05d}", record)
        elif looked:
            record |= self.validate(self.kept())
            self.consider(self.kept(), record)
        if settings.when == "epochs":
            log.write_epoch(record, self.recipe.schedule.epochs)
        elif last:
            self.look_back(log)

    def replace_lost_model(self, log: Log) -> None:
        """All steps are done, but the model is gone: the last epoch's can be made again."""
        self.world.wait()
        if self.world.main:
            self.run.rewind_log(self.step - 1, "epoch")
            if self.recipe.validate_.choose == "best" and self.recipe.validate_.when == "epochs":
                self.note(f"{self.run.model} was lost; the last epoch's model takes the place of the best one's")
        self.best = -1.0
        self.end_epoch(log)

    def look_back(self, log: Log) -> None:
        """Look at the models of all epochs that were kept, after training."""
        self.world.wait()
        if self.world.main:
            self.run.rewind_log(0, "epoch")  # of an earlier look that was stopped
        self.best = -1.0
        for folder in sorted(self.run.epochs.iterdir()):
            model = checkpoint.load(folder).to(self.device)
            known = checkpoint.read_card(folder).about
            record = {"step": known["step"], "epoch": known["epoch"], **self.validate(model)}
            self.consider(model, record)
            log.write_epoch(record, self.recipe.schedule.epochs)

    def consider(self, model: Classifier, record: dict[str, Any]) -> None:
        """Make it the run's model if it is better than those before, or if the last one counts."""
        score = record.get("val_robust", record.get("val_clean", 0.0))
        if self.recipe.validate_.choose == "last" or score > self.best:
            self.best = score
            self.keep(model, self.run.model, record)

    def keep(self, model: Classifier, folder: Path, record: dict[str, Any]) -> None:
        if self.sharded and model is self.model:
            model = self.whole()
        if self.world.main:
            checkpoint.save(model, folder, {"run": self.run.name, "recipe": self.recipe.hash(), **record})

    def validate(self, model: Classifier) -> dict[str, Any]:
        """On held-out images, and on some training images as they are, if the recipe wants to see the difference."""
        # The parts of a sharded model are asked together, so each process looks at everything.
        lookers = World(device=self.device) if self.sharded else self.world
        return validate(model, {"val": self.held_out, "train": self.seen}, self.recipe, self.objective, lookers)

    def kept(self) -> Classifier:
        """The model that is measured and saved: the average of the weights if there is one."""
        if self.ema is None:
            return self.model
        average: Classifier = self.ema.module
        return average

    def save(self) -> None:
        """A checkpoint of everything that is not a function of recipe and step; older ones are removed."""
        model, optimizer = self.states()
        if not self.world.main:
            return
        state = {
            "of": self.belonging(),
            "step": self.step,
            "best": self.best,
            "model": model,
            "objective": self.objective.state_dict(),
            "optimizer": optimizer,
            "ema": self.ema.module.state_dict() if self.ema else None,
        }
        save_state(self.run.checkpoints / f"step-{self.step:09d}.safetensors", state)
        for old in sorted(self.run.checkpoints.glob("step-*.safetensors"))[: -self.recipe.checkpoint.keep]:
            old.unlink(missing_ok=True)

    def states(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Of model and optimizer; gathered at the main process where every process has a part."""
        if not self.sharded:
            return self.model.state_dict(), self.optimizer.state_dict()
        return get_state_dict(self.model, self.optimizer, options=WHOLE)

    def whole(self) -> Classifier:
        """A sharded model in one piece, at the main process."""
        model = build_model(self.recipe, self.data)
        state = get_model_state_dict(self.model, options=WHOLE)
        if self.world.main:
            model.load_state_dict(state)
        return model

    def belonging(self) -> dict[str, Any]:
        """What a checkpoint must agree on to be gone on from."""
        data = "+".join(each.fingerprint for each in (self.data, *self.extra))
        return {"recipe": self.recipe.hash(), "data": data, "steps_per_epoch": self.steps_per_epoch}

    def restore(self) -> None:
        """Go back to the newest checkpoint that is whole, if there is one."""
        path = self.world.first_says(newest(self.run) if self.world.main else None)
        if path is None:
            if self.world.main:
                self.run.rewind_log(0)
            self.initialise()
            return
        state = load_state(path)
        if state["of"] != self.belonging():
            changed = "; ".join(differences(state["of"], self.belonging()))
            raise BastionError(f"{path}: is of other data or another recipe ({changed}); use another --run")
        self.objective.load_state_dict(state["objective"])
        if self.sharded:
            states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, **states, options=WHOLE)
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        self.step, self.best = state["step"], state["best"]
        if self.world.main:
            self.run.rewind_log(self.step)
            self.run.log({"kind": "event", "step": self.step, "message": f"resumed at step {self.step}"})

    def initialise(self) -> None:
        """Begin with the weights that the recipe names; the log says which tensors were and were not taken."""
        init = self.recipe.init
        if init is None:
            return
        source = load(init.from_)
        done = transfer(source.to(self.device), self.model, init.new)
        if self.ema:
            self.ema.set(self.model)
        if self.world.main:
            self.note(f"weights of {init.from_} ({checkpoint.digest(source)[:16]}): {done}", init=done.as_dict())
            if not (torch.equal(source.mean, self.model.mean) and torch.equal(source.std, self.model.std)):
                self.note(f"{init.from_} normalises images otherwise: its features will not be what they were")

    def note(self, message: str, **more: Any) -> None:
        """In the log and on the screen."""
        self.run.log({"kind": "event", "step": self.step, "message": message, **more})
        console.print(message, markup=False)

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


def _limited(split: Split, limit: int | None) -> Split:
    return split if limit is None or limit >= len(split) else split.subset(range(limit))


def _told_plainly(loader: Iterable[Batch]) -> Iterator[Batch]:
    """A loading process wraps its error in a page of text, of which the last line is the error."""
    try:
        yield from loader
    except BastionError as error:
        last = str(error).strip().splitlines()[-1]
        raise BastionError(last.partition("BastionError: ")[2] or last) from error


def _accuracy(logits: Tensor, y: Tensor) -> float:
    return 1.0 - misclassified(logits.detach(), y).float().mean().item()

"""Many searches on one model at once: full batches of searches, each dropped the moment it is over.

An attack is a rule (`Search`) for one search: which image to run the model on next, given the logits of the last. A
search is for one example, with perhaps a target class and a restart. `run_searches` keeps a pool of them whose rows
share the model's batches: one that has fooled the model, or spent its budget, makes room for the next. Searches do not
see each other, so what an example gets does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from bastion import journal
from bastion.acceleration import Accelerated, accelerate
from bastion.attacks.judge import is_adversarial, lead, margin_is_significant
from bastion.attacks.losses import likeliest_wrong
from bastion.errors import BastionError
from bastion.forward import Best, check_batch, check_labels, input_gradient, misclassified, record_zero_grad
from bastion.threat import Threat
from bastion.types import Batch, hard

# "hit": a search ends, and with it all later ones of its example, when it finds an adversarial example.
# "nearest": all searches spend their budget; the adversarial example nearest to the image counts.
# "loss": all searches spend their budget; the highest loss counts.
Goal = Literal["hit", "nearest", "loss"]

# A hit with a margin this small, relative to the largest logit, may be none in another batch: its search goes on.
CONFIRMED = 1e-4
INSIGNIFICANT = 1e9  # what the distance of a hit counts more if its margin may be rounding
FORWARD_ONLY = 2  # so many times the images fit into a pass that saves nothing for a backward pass


@dataclass
class Rows:
    """Tensors with one row per search."""

    at: Tensor  # (B,) the example's place in the batch
    number: Tensor  # (B,) of the search among those of its example; its random numbers hang on it
    target: Tensor  # (B,) class to reach; the right class where the search has none

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: Tensor) -> Self:
        """The rows of a mask or of positions."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def put(self, rows: Tensor, other: Self) -> None:
        """Replace rows, in place."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(other, field.name)


@dataclass
class Jobs(Rows):
    """Searches to be made, first ones first."""

    restart: Tensor  # (B,)


@dataclass
class SearchState(Rows):
    """What is kept of every search; rules add their own."""

    x0: Tensor
    y: Tensor
    x: Tensor  # to run the model on next
    step: Tensor  # int64 (B,): how many times it ran
    done: Tensor  # bool (B,): has spent its budget


def initial_state(jobs: Jobs, batch: Batch, x: Tensor) -> dict[str, Tensor]:
    """The fields of `SearchState`, for searches that start at x."""
    return {
        "at": jobs.at,
        "number": jobs.number,
        "target": jobs.target,
        "x0": batch.x,
        "y": hard(batch.y),
        "x": x,
        "step": torch.zeros_like(jobs.at),
        "done": torch.zeros_like(jobs.at, dtype=torch.bool),
    }


S = TypeVar("S", bound=SearchState)


class Search(ABC, Generic[S]):
    """The rule of an attack, for many searches at once."""

    eot: int = 1  # gradients averaged over so many passes, for models that draw random numbers
    backwards: int = 1  # passes that one gradient takes
    mixed: ClassVar[bool] = False  # some searches want a gradient while others do not
    gradient_free: ClassVar[bool] = False  # none ever wants one

    @abstractmethod
    def start(self, jobs: Jobs, batch: Batch) -> S:
        """Searches at their first images; `batch` has the examples of the jobs, row by row."""

    @abstractmethod
    def wants_gradient(self, state: S) -> Tensor:
        """bool (B,): does the search need the gradient of `loss` at x?"""

    @abstractmethod
    def loss(self, state: S, logits: Tensor) -> Tensor:
        """(B,) what to differentiate."""

    def gradient(self, state: S, logits: Tensor, x: Tensor) -> Tensor:
        """(B, …) of the loss, by the way back from the logits to x."""
        return input_gradient(self.loss(state, logits), x)

    @abstractmethod
    def update(self, state: S, logits: Tensor, gradient: Tensor) -> None:
        """Set `x` to what the model is to run on next, or `done`. The gradient is zero where none is wanted."""

    def best(self, state: S) -> tuple[Tensor, Tensor]:
        """What a search has to show that fooled nobody: images, and scores to compare searches of an example by."""
        return state.x0, state.x0.new_full((len(state),), -torch.inf)


def attack(
    model: nn.Module,
    batch: Batch,
    threat: Threat,
    rule: Callable[[int], Search[S]],
    *,
    name: str,
    targets: int = 0,
    restarts: int = 1,
    goal: Goal = "hit",
) -> Tensor:
    """What the rule for so many classes finds; the image itself where it is misclassified already.

    `targets` n: one search for each of the n likeliest wrong classes; 0: one without a target.
    """
    given, batch = check_batch(model, batch, name)
    if len(batch.x) == 0:
        return batch.x
    accelerated, best = accelerate(model), Best(batch.x)
    if goal != "loss" and accelerated.runs_together:
        raise BastionError(
            f"{name}: stops where an image is fooled, but processes that share BatchNorm in train mode or each have a "
            "part of the model must make as many passes; take an attack that spends all its steps, as pgd or apgd-train"
        )
    known = getattr(given, "num_classes", None)
    with accelerated.ready(batch.x):
        if goal == "loss" and not targets and known:  # one of thousands of training steps: no pass for nothing
            return run_searches(rule(known), accelerated, batch, threat, best, restarts=restarts, goal=goal).x
        clean = clean_logits(accelerated, batch)
        search = rule(clean.shape[1])
        if goal != "loss" and search.eot == 1:  # one draw of a model that draws random numbers proves nothing
            skip_mistakes(best, clean, batch, accelerated.rounding)
        chosen = likeliest_wrong(clean, batch.y, targets) if targets else None
        return run_searches(search, accelerated, batch, threat, best, targets=chosen, restarts=restarts, goal=goal).x


def clean_logits(model: Accelerated, batch: Batch) -> Tensor:
    """Those that come with the batch, or from a pass of the model."""
    if batch.logits is not None:
        return model.taken(batch.logits, batch.x)
    with torch.no_grad():
        logits = torch.cat([model.logits(x) for x in torch.split(batch.x, model.batch_size)])
    check_labels(batch.y, logits.shape[1])
    journal.passes(batch.index, 1, 0)
    return logits


def skip_mistakes(best: Best, clean: Tensor, batch: Batch, rounding: float) -> None:
    """Images that are misclassified by a margin beyond rounding need no search."""
    wrong = misclassified(clean, batch.y) & margin_is_significant(clean, batch.y, rounding)
    best.offer(batch.x, lead(clean, batch.y), wrong)
    best.close(wrong)


def run_searches(
    rule: Search[S],
    model: Accelerated,
    batch: Batch,
    threat: Threat,
    best: Best,
    *,
    targets: Tensor | None = None,
    restarts: int = 1,
    goal: Goal = "hit",
) -> Best:
    """Make every search of every example that is not settled. `targets` (B, n): classes to reach, in this order."""
    waiting = _line_up(batch, targets, restarts)
    waiting = waiting.take(~best.settled[waiting.at])
    passes = torch.zeros(2, len(batch.x), dtype=torch.int64, device=batch.x.device)
    size = _even(len(waiting), model.batch_size * (FORWARD_ONLY if rule.gradient_free else 1))
    state, waiting = _begin(rule, batch, waiting, size * (2 if rule.mixed else 1))
    while len(state):
        rows = _alike(rule.wants_gradient(state), size) if rule.mixed else None
        some = state if rows is None else state.take(rows)
        x, first = some.x, (some.step == 0) & rule.wants_gradient(some)
        logits, gradient = _run_model(rule, model, some, passes)
        if first.any():
            record_zero_grad(batch.index[some.at[first]], gradient[first])
        if goal != "loss":
            # One draw of a model that draws random numbers proves nothing: its hits are kept, and end no search.
            _record_hits(some, x, logits, threat, goal, best, model.rounding, settles=rule.eot == 1)
        rule.update(some, logits, gradient)
        if some.done.any():
            ended = some.take(some.done)
            best.offer(*rule.best(ended), torch.zeros_like(ended.done), ended.at)
        if rows is not None:
            state.put(rows, some)
        state, waiting = _refill(rule, batch, state, waiting, best.by)
    journal.passes(batch.index, *passes)
    return best


def _line_up(batch: Batch, targets: Tensor | None, restarts: int) -> Jobs:
    """All searches: every example's first target before any second one, all targets before the next restart."""
    classes = hard(batch.y)[:, None] if targets is None else targets
    count = classes.shape[1]
    at = torch.arange(len(batch.x), device=classes.device).repeat(count * restarts)
    number = torch.arange(count * restarts, device=classes.device).repeat_interleave(len(batch.x))
    return Jobs(at, number, classes[at, number % max(count, 1)], number // max(count, 1))


def _even(jobs: int, size: int) -> int:
    """About `size`, such that searches of one length leave no small batch at the end: 37 are not 32 and 5."""
    return max(1, math.ceil(jobs / max(1, round(jobs / size))))


def _begin(rule: Search[S], batch: Batch, waiting: Jobs, count: int) -> tuple[S, Jobs]:
    """Start the first `count` jobs; the others go on waiting."""
    rows = torch.arange(len(waiting), device=waiting.at.device)
    jobs = waiting.take(rows[:count])
    return rule.start(jobs, batch.select(jobs.at)), waiting.take(rows[count:])


def _alike(wants: Tensor, size: int) -> Tensor | None:
    """Up to `size` rows that want the same, of the kind that has more; None: that is all rows."""
    kind = wants.sum() * 2 >= len(wants)
    rows = (wants == kind).nonzero()[:size, 0]
    return None if len(rows) == len(wants) else rows


def _run_model(rule: Search[S], model: Accelerated, state: S, passes: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at the searches' x, and gradients if any search wants one."""
    wanted = bool(rule.wants_gradient(state).any())
    x = state.x.detach().requires_grad_(wanted)
    total = state.x.new_zeros(()).expand_as(state.x)
    for draw in range(rule.eot):
        with torch.set_grad_enabled(wanted):
            logits = model.logits(x)
            if wanted:
                gradient = rule.gradient(state, logits, x)
                total = gradient if draw == 0 else total + gradient
    ones = torch.full_like(state.at, rule.eot)
    passes[0].index_add_(0, state.at, ones)
    if wanted:
        passes[1].index_add_(0, state.at, ones * rule.backwards)
    return logits.detach(), total if rule.eot == 1 else total / rule.eot


def _record_hits(
    state: S, x: Tensor, logits: Tensor, threat: Threat, goal: Goal, best: Best, rounding: float, *, settles: bool
) -> None:
    """Keep what is adversarial; a margin below the rounding ends no search."""
    hits = is_adversarial(threat, state.x0, x, logits, state.y).nonzero()[:, 0]
    if not len(hits):
        return
    at, x0, x, y, logits = state.at[hits], state.x0[hits], x[hits], state.y[hits], logits[hits]
    leads = lead(logits, y)
    least = max(CONFIRMED, rounding) if goal == "hit" else rounding  # the nearest has a small one by nature
    sure = margin_is_significant(logits, y, least)
    score = leads if goal == "hit" else -threat.distance(x0, x) - torch.where(sure, 0.0, INSIGNIFICANT)
    best.offer(x, score, torch.ones_like(sure), at)
    if goal == "hit" and settles:
        best.settle(x[sure], leads[sure], at[sure], state.number[hits][sure])


def _refill(rule: Search[S], batch: Batch, state: S, waiting: Jobs, by: Tensor) -> tuple[S, Jobs]:
    """Give the places of searches that are over to those that wait."""
    over = state.done | (state.number >= by[state.at])
    if not over.any():
        return state, waiting
    waiting = waiting.take(waiting.number < by[waiting.at])
    if len(waiting):
        free = over.nonzero()[:, 0]
        fresh, waiting = _begin(rule, batch, waiting, len(free))
        state.put(free[: len(fresh)], fresh)
        over[free[: len(fresh)]] = False
    return (state.take(~over) if over.any() else state), waiting

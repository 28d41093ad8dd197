"""Runs many searches on one model in full batches; a search that is over is replaced by the next one at once.

A search is for one example, possibly with a target class and a number of restarts. An attack is a rule (`Search`) for
it: which image to run the model on next, given the logits and gradient of the last one. `run_searches` keeps a pool of
searches that share the model's batches. Searches are independent, so the result for an example does not depend on what
else is in the batch.
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

# "hit": a search that finds an adversarial example ends, and so do all later ones of its example.
# "nearest": all searches use all their steps; the adversarial example nearest to the image is returned.
# "loss": all searches use all their steps; the image with the highest loss is returned.
Goal = Literal["hit", "nearest", "loss"]

# A hit with a smaller margin, relative to the largest logit, may fail in another batch: its search goes on.
CONFIRMED = 1e-4
INSIGNIFICANT = 1e9  # added to the distance of a hit whose margin may be rounding
FORWARD_ONLY = 2  # the batch is this many times larger in passes without a backward pass


@dataclass
class Rows:
    """Tensors with one row per search."""

    at: Tensor  # (B,) position of the example in the batch
    number: Tensor  # (B,) of the search among those of its example; seeds its random numbers
    target: Tensor  # (B,) target class; the right class if the search is untargeted

    def __len__(self) -> int:
        return len(self.at)

    def take(self, rows: Tensor) -> Self:
        """The rows given by a mask or by positions."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def put(self, rows: Tensor, other: Self) -> None:
        """Replace rows, in place."""
        for field in fields(self):
            getattr(self, field.name)[rows] = getattr(other, field.name)


@dataclass
class Jobs(Rows):
    """Searches that have not started, in their order."""

    restart: Tensor  # (B,)


@dataclass
class SearchState(Rows):
    """The state of running searches; subclasses add fields of their attack."""

    x0: Tensor
    y: Tensor
    x: Tensor  # the next input of the model
    step: Tensor  # int64 (B,): steps taken
    done: Tensor  # bool (B,): all steps are used


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
    """The rule of an attack: how its searches start and proceed, for many searches at once."""

    eot: int = 1  # gradients are averaged over this many passes, for randomised models
    backwards: int = 1  # backward passes that one gradient takes
    mixed: ClassVar[bool] = False  # some searches want a gradient while others do not
    gradient_free: ClassVar[bool] = False  # no search ever wants a gradient

    @abstractmethod
    def start(self, jobs: Jobs, batch: Batch) -> S:
        """The state of new searches, with their first x; row i of `batch` is the example of job i."""

    @abstractmethod
    def wants_gradient(self, state: S) -> Tensor:
        """bool (B,): the search needs the gradient of `loss` at x."""

    @abstractmethod
    def loss(self, state: S, logits: Tensor) -> Tensor:
        """(B,): what is differentiated."""

    def gradient(self, state: S, logits: Tensor, x: Tensor) -> Tensor:
        """The gradient of the loss with respect to x; `logits` are connected to x by the graph."""
        return input_gradient(self.loss(state, logits), x)

    @abstractmethod
    def update(self, state: S, logits: Tensor, gradient: Tensor) -> None:
        """Set the next `x`, or `done`. The gradient is zero where none was wanted."""

    def best(self, state: S) -> tuple[Tensor, Tensor]:
        """What a search that found no adversarial example returns: images, and scores to compare searches by."""
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
    """Run the searches of a rule; images that are already misclassified are returned unchanged.

    `rule` gets the number of classes. `targets` n: one search for each of the n likeliest wrong classes; 0: untargeted.
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
        if goal == "loss" and not targets and known:  # in training, save the clean forward pass
            return run_searches(rule(known), accelerated, batch, threat, best, restarts=restarts, goal=goal).x
        clean = clean_logits(accelerated, batch)
        search = rule(clean.shape[1])
        if goal != "loss" and search.eot == 1:  # a single pass of a randomised model proves nothing
            skip_misclassified(best, clean, batch, accelerated.rounding)
        chosen = likeliest_wrong(clean, batch.y, targets) if targets else None
        return run_searches(search, accelerated, batch, threat, best, targets=chosen, restarts=restarts, goal=goal).x


def clean_logits(model: Accelerated, batch: Batch) -> Tensor:
    """`batch.logits`, or those of a forward pass if the batch has none."""
    if batch.logits is not None:
        return model.taken(batch.logits, batch.x)
    with torch.no_grad():
        logits = torch.cat([model.logits(x) for x in torch.split(batch.x, model.batch_size)])
    check_labels(batch.y, logits.shape[1])
    journal.passes(batch.index, 1, 0)
    return logits


def skip_misclassified(best: Best, clean: Tensor, batch: Batch, rounding: float) -> None:
    """Let no search run for images that are already misclassified by a margin above rounding."""
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
    """Run every search of every example that is not settled. `targets` (B, n): target classes, in this order."""
    waiting = _make_jobs(batch, targets, restarts)
    waiting = waiting.take(~best.settled[waiting.at])
    passes = torch.zeros(2, len(batch.x), dtype=torch.int64, device=batch.x.device)
    size = _even_batch_size(len(waiting), model.batch_size * (FORWARD_ONLY if rule.gradient_free else 1))
    state, waiting = _start_jobs(rule, batch, waiting, size * (2 if rule.mixed else 1))
    while len(state):
        rows = _next_rows(rule.wants_gradient(state), size) if rule.mixed else None
        some = state if rows is None else state.take(rows)
        x, first = some.x, (some.step == 0) & rule.wants_gradient(some)
        logits, gradient = _run_model(rule, model, some, passes)
        if first.any():
            record_zero_grad(batch.index[some.at[first]], gradient[first])
        if goal != "loss":
            # A single pass of a randomised model proves nothing: its hits are kept, but end no search.
            _record_hits(some, x, logits, threat, goal, best, model.rounding, settles=rule.eot == 1)
        rule.update(some, logits, gradient)
        if some.done.any():
            ended = some.take(some.done)
            best.offer(*rule.best(ended), torch.zeros_like(ended.done), ended.at)
        if rows is not None:
            state.put(rows, some)
        if budget := journal.budget_if_due():
            open_ = ~best.settled
            journal.report_progress((budget - passes[0][open_]).clamp(min=0).sum().item(), int((~best.fooled).sum()))
        state, waiting = _refill(rule, batch, state, waiting, best.settled_by)
    journal.passes(batch.index, *passes)
    return best


def _make_jobs(batch: Batch, targets: Tensor | None, restarts: int) -> Jobs:
    """All searches, ordered by restart, then by target, then by example."""
    classes = hard(batch.y)[:, None] if targets is None else targets
    count = classes.shape[1]
    at = torch.arange(len(batch.x), device=classes.device).repeat(count * restarts)
    number = torch.arange(count * restarts, device=classes.device).repeat_interleave(len(batch.x))
    return Jobs(at, number, classes[at, number % max(count, 1)], number // max(count, 1))


def _even_batch_size(jobs: int, size: int) -> int:
    """A batch size near `size` that divides the jobs evenly: 37 jobs at 32 are one batch of 37, not of 32 and 5."""
    return max(1, math.ceil(jobs / max(1, round(jobs / size))))


def _start_jobs(rule: Search[S], batch: Batch, waiting: Jobs, count: int) -> tuple[S, Jobs]:
    """Start the first `count` jobs; returns their state, and the jobs that still wait."""
    rows = torch.arange(len(waiting), device=waiting.at.device)
    jobs = waiting.take(rows[:count])
    return rule.start(jobs, batch.select(jobs.at)), waiting.take(rows[count:])


def _next_rows(wants: Tensor, size: int) -> Tensor | None:
    """Up to `size` rows, all with or all without a gradient, whichever are more; None: all rows."""
    kind = wants.sum() * 2 >= len(wants)
    rows = (wants == kind).nonzero()[:size, 0]
    return None if len(rows) == len(wants) else rows


def _run_model(rule: Search[S], model: Accelerated, state: S, passes: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at the searches' x, and gradients if any search wants one; counts the passes."""
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
    """Keep adversarial examples; one whose margin is below rounding does not end its search."""
    hits = is_adversarial(threat, state.x0, x, logits, state.y).nonzero()[:, 0]
    if not len(hits):
        return
    at, x0, x, y, logits = state.at[hits], state.x0[hits], x[hits], state.y[hits], logits[hits]
    leads = lead(logits, y)
    least = max(CONFIRMED, rounding) if goal == "hit" else rounding  # the margin of the nearest is always small
    sure = margin_is_significant(logits, y, least)
    score = leads if goal == "hit" else -threat.distance(x0, x) - torch.where(sure, 0.0, INSIGNIFICANT)
    best.offer(x, score, torch.ones_like(sure), at)
    if goal == "hit" and settles:
        best.settle(x[sure], leads[sure], at[sure], state.number[hits][sure])


def _refill(rule: Search[S], batch: Batch, state: S, waiting: Jobs, settled_by: Tensor) -> tuple[S, Jobs]:
    """Replace searches that are over by waiting ones."""
    over = state.done | (state.number >= settled_by[state.at])
    if not over.any():
        return state, waiting
    waiting = waiting.take(waiting.number < settled_by[waiting.at])
    if len(waiting):
        free = over.nonzero()[:, 0]
        fresh, waiting = _start_jobs(rule, batch, waiting, len(free))
        state.put(free[: len(fresh)], fresh)
        over[free[: len(fresh)]] = False
    return (state.take(~over) if over.any() else state), waiting

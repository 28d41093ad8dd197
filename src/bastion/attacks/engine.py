"""Many searches on one model at once: full batches of runs, each dropped the moment it is over.

An attack is a rule (`Search`) for one run: which point to ask the model about next, given the answer to the last. A
run is an example with perhaps a target class and a restart. `hunt` keeps a pool of runs whose rows share the model's
batches: a run that has fooled the model, or spent its budget, makes room for the next. Runs do not see each other, so
what an example gets does not depend on what else is in the batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Generic, Literal, Self, TypeVar

import torch
from torch import Tensor, nn

from bastion.attacks import journal
from bastion.attacks.asking import check_labels, notice_blindness, ready
from bastion.attacks.losses import input_gradient, likeliest_wrong, margin, misclassified
from bastion.attacks.threat import Threat
from bastion.attacks.victim import Victim, goes_together, under_attack
from bastion.errors import BastionError
from bastion.types import Batch, hard

# "hit": a run ends, and with it all runs of its example, when a point of the threat's set fools the model.
# "nearest": all runs spend their budget; the fooling point nearest to the image counts.
# "loss": all runs spend their budget; the point with the highest loss counts.
Goal = Literal["hit", "nearest", "loss"]

# A hit with a margin this small, relative to the largest logit, may be none in another batch: its run goes on.
CONFIRMED = 1e-4
MASKED = 1e4  # a class so far below the right one was taken out of the model by hand, and says nothing of its precision
DOUBT = 1e9  # and it counts as further away than any other
FORWARD_ONLY = 2  # so many times the images fit into a pass that saves nothing for a backward pass


class Table:
    """A dataclass of tensors with one row per run."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))  # type: ignore[arg-type]

    def take(self, rows: Tensor) -> Self:
        """The rows of a mask or of positions."""
        return type(self)(**{field.name: getattr(self, field.name)[rows] for field in fields(self)})  # type: ignore[arg-type]

    def put(self, rows: Tensor, other: Self) -> None:
        """Replace rows, in place."""
        for field in fields(self):  # type: ignore[arg-type]
            getattr(self, field.name)[rows] = getattr(other, field.name)


@dataclass
class Jobs(Table):
    """Runs to be made, first ones first."""

    at: Tensor  # (B,) the example's place in the batch
    target: Tensor  # (B,) class to reach; the right class where the run has none
    number: Tensor  # (B,) of the run among those of its example; its random numbers hang on it
    restart: Tensor  # (B,)


@dataclass
class Run(Table):
    """What every search keeps of a run; rules add their own."""

    at: Tensor
    number: Tensor
    x0: Tensor
    y: Tensor
    target: Tensor
    x: Tensor  # the point to ask about next
    step: Tensor  # int64 (B,): how many answers it has had
    done: Tensor  # bool (B,): has spent its budget


def opening(jobs: Jobs, batch: Batch, x: Tensor) -> dict[str, Tensor]:
    """The fields of `Run`, for runs that start at x."""
    return {
        "at": jobs.at,
        "number": jobs.number,
        "x0": batch.x,
        "y": hard(batch.y),
        "target": jobs.target,
        "x": x,
        "step": torch.zeros_like(jobs.at),
        "done": torch.zeros_like(jobs.at, dtype=torch.bool),
    }


R = TypeVar("R", bound=Run)


class Search(ABC, Generic[R]):
    """The rule of an attack, for many runs at once."""

    eot: int = 1  # gradients averaged over so many passes, for models that draw random numbers
    backwards: int = 1  # passes that one gradient takes
    splits: ClassVar[bool] = False  # runs differ in whether they want a gradient
    blind: ClassVar[bool] = False  # none ever wants one

    @abstractmethod
    def start(self, jobs: Jobs, batch: Batch) -> R:
        """Runs at their first points; `batch` has the examples of the jobs, row by row."""

    @abstractmethod
    def wants_gradient(self, runs: R) -> Tensor:
        """bool (B,): does the run need the gradient of `loss` at its point?"""

    @abstractmethod
    def loss(self, runs: R, logits: Tensor) -> Tensor:
        """(B,) what to differentiate."""

    def gradient(self, runs: R, logits: Tensor, x: Tensor) -> Tensor:
        """(B, …) of the loss, by the way back from the logits to x."""
        return input_gradient(self.loss(runs, logits), x)

    def ask(self, runs: R, victim: Victim, x: Tensor) -> Tensor:
        """Logits at the runs' points."""
        logits: Tensor = victim(x)
        return logits

    @abstractmethod
    def tell(self, runs: R, logits: Tensor, gradient: Tensor) -> None:
        """Take the answer in: set `x` to the next point, or `done`. The gradient is zero for runs that want none."""

    def best(self, runs: R) -> tuple[Tensor, Tensor]:
        """What a run has to show that fooled nobody: points, and scores to compare runs of an example by."""
        return runs.x0, runs.x0.new_full((len(runs),), -torch.inf)


NEVER = 2**62


class Findings:
    """The best point of each example so far: a fooling one before any other, then the highest score.

    A hit beyond doubt settles the example for all later runs. Earlier ones go on, and theirs would take its place: what
    is found does not depend on which runs happened to share a batch.
    """

    def __init__(self, x0: Tensor) -> None:
        self.x = x0.clone()
        self.score = x0.new_full((len(x0),), -torch.inf, dtype=torch.float64)
        self.fooled = torch.zeros(len(x0), dtype=torch.bool, device=x0.device)
        self.by = torch.full_like(self.fooled, NEVER, dtype=torch.int64)  # number of the run that settled it

    @property
    def settled(self) -> Tensor:
        return self.by < NEVER

    def begin(self, clean: Tensor, batch: Batch, rounding: float) -> None:
        """With the images themselves, given their logits: those that are misclassified beyond doubt need no runs."""
        self.offer(torch.arange(len(clean), device=clean.device), batch.x, margin(clean, batch.y), fooled=False)
        self.fooled = misclassified(clean, batch.y) & beyond_doubt(clean, batch.y, rounding)
        self.close(self.fooled)

    def close(self, which: Tensor) -> None:
        """No runs for these examples of a mask."""
        self.by[which] = -1

    def settle(self, at: Tensor, number: Tensor, x: Tensor, score: Tensor) -> None:
        """Hits of these runs that are beyond doubt: the first run's counts."""
        rows = _best_of_each(at, -number)
        rows = rows[number[rows] < self.by[at[rows]]]
        at = at[rows]
        self.x[at], self.score[at], self.by[at] = x[rows], score[rows].to(self.score.dtype), number[rows]
        self.fooled[at] = True

    def offer(self, at: Tensor, x: Tensor, score: Tensor, *, fooled: bool) -> None:
        """Points for the examples at these places, where several may be for the same one."""
        held = torch.where(self.fooled[at] == fooled, self.score[at], torch.inf if not fooled else -torch.inf)
        score = score.to(self.score.dtype)
        better = (score > held) & ~self.settled[at] & x.flatten(1).isfinite().all(1)  # a point that is none is not kept
        rows = _best_of_each(at[better], score[better])
        at, x, score = at[better][rows], x[better][rows], score[better][rows]
        self.x[at], self.score[at] = x, score
        self.fooled[at] = fooled


def _best_of_each(at: Tensor, score: Tensor) -> Tensor:
    """Rows with the highest score of their example, the first of equals: at most one an example."""
    order = torch.argsort(score, descending=True, stable=True)
    order = order[torch.argsort(at[order], stable=True)]
    first = torch.ones_like(order, dtype=torch.bool)
    first[1:] = at[order][1:] != at[order][:-1]
    return order[first]


def attack(
    model: nn.Module,
    batch: Batch,
    threat: Threat,
    rule: Callable[[int], Search[R]],
    *,
    name: str,
    targets: int = 0,
    restarts: int = 1,
    goal: Goal = "hit",
) -> Tensor:
    """The points that the rule for so many classes finds; the image itself where it is misclassified already.

    `targets` n: one run for each of the n likeliest wrong classes; 0: one without a target.
    """
    batch = ready(model, batch, name)
    if len(batch.x) == 0:
        return batch.x
    if goal != "loss" and goes_together(model):
        raise BastionError(
            f"{name}: stops where an image is fooled, but processes that share BatchNorm in train mode or each have a "
            "part of the model must make as many passes; take an attack that spends all its steps, as pgd or apgd-train"
        )
    known = getattr(model, "num_classes", None)
    with under_attack(model, batch.x) as victim:
        found = Findings(batch.x)
        if goal == "loss" and not targets and known:  # training asks thousands of times: no pass for nothing
            return hunt(rule(known), victim, batch, threat, found, restarts=restarts, goal=goal).x
        clean = clean_logits(victim, batch)
        search = rule(clean.shape[1])
        if goal != "loss" and search.eot == 1:  # one draw of a model that draws random numbers proves nothing
            found.begin(clean, batch, victim.rounding)
        chosen = likeliest_wrong(clean, batch.y, targets) if targets else None
        return hunt(search, victim, batch, threat, found, targets=chosen, restarts=restarts, goal=goal).x


def clean_logits(victim: Victim, batch: Batch) -> Tensor:
    """A batch at a time."""
    with torch.no_grad():
        logits = torch.cat([victim(x) for x in torch.split(batch.x, victim.lanes)])
    check_labels(batch.y, logits.shape[1])
    journal.passes(batch.index, 1, 0)
    return logits


def hunt(
    rule: Search[R],
    victim: Victim,
    batch: Batch,
    threat: Threat,
    found: Findings,
    *,
    targets: Tensor | None = None,
    restarts: int = 1,
    goal: Goal = "hit",
) -> Findings:
    """Make every run of every example that is not settled. `targets` (B, n): classes to reach, in this order."""
    waiting = _line_up(batch, targets, restarts)
    waiting = waiting.take(~found.settled[waiting.at])
    passes = torch.zeros(2, len(batch.x), dtype=torch.int64, device=batch.x.device)
    lanes = _even(len(waiting), victim.lanes * (FORWARD_ONLY if rule.blind else 1))
    runs, waiting = _begin(rule, batch, waiting, lanes * (2 if rule.splits else 1))
    while len(runs):
        rows = _alike(rule.wants_gradient(runs), lanes) if rule.splits else None
        asked = runs if rows is None else runs.take(rows)
        points = asked.x
        logits, gradient = _ask(rule, victim, asked, passes)
        first = (asked.step == 0) & rule.wants_gradient(asked)
        if first.any():
            notice_blindness(batch.index[asked.at[first]], gradient[first])
        if goal != "loss":
            # One draw of a model that draws random numbers proves nothing: its hits are kept, and end no run.
            _harvest(asked, points, logits, threat, goal, found, victim.rounding, settles=rule.eot == 1)
        rule.tell(asked, logits, gradient)
        if asked.done.any():
            ended = asked.take(asked.done)
            found.offer(ended.at, *rule.best(ended), fooled=False)
        if rows is not None:
            runs.put(rows, asked)
        runs, waiting = _refill(rule, batch, runs, waiting, found.by)
    journal.passes(batch.index, *passes)
    return found


def _line_up(batch: Batch, targets: Tensor | None, restarts: int) -> Jobs:
    """All runs: every example's first target before any second one, all targets before the next restart."""
    classes = hard(batch.y)[:, None] if targets is None else targets
    count = classes.shape[1]
    at = torch.arange(len(batch.x), device=classes.device).repeat(count * restarts)
    number = torch.arange(count * restarts, device=classes.device).repeat_interleave(len(batch.x))
    return Jobs(at, classes[at, number % max(count, 1)], number, number // max(count, 1))


def _even(jobs: int, lanes: int) -> int:
    """About `lanes`, such that runs of one length leave no small batch at the end: 37 runs are not 32 and 5."""
    return max(1, math.ceil(jobs / max(1, round(jobs / lanes))))


def _begin(rule: Search[R], batch: Batch, waiting: Jobs, count: int) -> tuple[R, Jobs]:
    """Start the first `count` jobs; the others go on waiting."""
    rows = torch.arange(len(waiting), device=waiting.at.device)
    jobs = waiting.take(rows[:count])
    return rule.start(jobs, batch.select(jobs.at)), waiting.take(rows[count:])


def _alike(wants: Tensor, lanes: int) -> Tensor | None:
    """Up to `lanes` rows that want the same, of the kind that has more; None: that is all rows."""
    kind = wants.sum() * 2 >= len(wants)
    rows = (wants == kind).nonzero()[:lanes, 0]
    return None if len(rows) == len(wants) else rows


def _ask(rule: Search[R], victim: Victim, runs: R, passes: Tensor) -> tuple[Tensor, Tensor]:
    """Logits at the runs' points, and gradients if any run wants one."""
    wanted = bool(rule.wants_gradient(runs).any())
    x = runs.x.detach().requires_grad_(wanted)
    total = runs.x.new_zeros(()).expand_as(runs.x)
    for draw in range(rule.eot):
        with torch.set_grad_enabled(wanted):
            logits = rule.ask(runs, victim, x)
            if wanted:
                gradient = rule.gradient(runs, logits, x)
                total = gradient if draw == 0 else total + gradient
    ones = torch.full_like(runs.at, rule.eot)
    passes[0].index_add_(0, runs.at, ones)
    if wanted:
        passes[1].index_add_(0, runs.at, ones * rule.backwards)
    return logits.detach(), total if rule.eot == 1 else total / rule.eot


def _harvest(
    runs: R, x: Tensor, logits: Tensor, threat: Threat, goal: Goal, found: Findings, rounding: float, *, settles: bool
) -> None:
    """Keep the points that fool the model inside the threat's set; a lead below the rounding is none."""
    hits = misclassified(logits, runs.y).nonzero()[:, 0]
    if not len(hits):
        return
    x0, x = runs.x0[hits], x[hits]
    valid = threat.contains(x0, x) & x.flatten(1).isfinite().all(1)  # a point that is none fools nobody
    if not valid.any():
        return
    hits, x0, x = hits[valid], x0[valid], x[valid]
    at, number, logits = runs.at[hits], runs.number[hits], logits[hits]
    lead = margin(logits, runs.y[hits]).nan_to_num(nan=torch.inf)  # no answer is not the right answer
    least = max(CONFIRMED, rounding) if goal == "hit" else rounding  # the nearest has a small one by nature
    sure = beyond_doubt(logits, runs.y[hits], least)
    score = lead if goal == "hit" else -threat.distance(x0, x) - torch.where(sure, 0.0, DOUBT)
    found.offer(at, x, score, fooled=True)
    if goal == "hit" and settles:
        found.settle(at[sure], number[sure], x[sure], lead[sure])


def beyond_doubt(logits: Tensor, y: Tensor, least: float) -> Tensor:
    """(B,) bool: does a wrong class lead by more than so much of the largest logit? No answer leads by any measure."""
    lead = margin(logits, y).nan_to_num(nan=torch.inf)
    right = logits.gather(1, hard(y)[:, None])
    largest = torch.where(logits > right - MASKED, logits.abs(), 0).amax(1)
    return (lead > least * largest) | (lead == torch.inf)


def _refill(rule: Search[R], batch: Batch, runs: R, waiting: Jobs, by: Tensor) -> tuple[R, Jobs]:
    """Give the places of runs that are over to those that wait."""
    over = runs.done | (runs.number >= by[runs.at])
    if not over.any():
        return runs, waiting
    waiting = waiting.take(waiting.number < by[waiting.at])
    if len(waiting):
        free = over.nonzero()[:, 0]
        fresh, waiting = _begin(rule, batch, waiting, len(free))
        runs.put(free[: len(fresh)], fresh)
        over[free[: len(fresh)]] = False
    return (runs.take(~over) if over.any() else runs), waiting

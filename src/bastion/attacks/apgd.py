"""Auto-PGD (Croce and Hein 2020): PGD with momentum that chooses its own step; for l1 (2021) its own sparsity too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.losses import LOSSES, TARGETED, LossName, fitting, margin
from bastion.settings import AtLeastOne, Count, Share, settings
from bastion.threat import Norm, Radius, Threat, length, project, project_approx, steepest
from bastion.types import Attack, Batch

MOMENTUM = 0.75
RHO = 0.75  # a step that raises the loss less often than this is too long


@attacks.register("apgd")
@settings
class APGD(Attack):
    """Auto-PGD (Croce and Hein 2020, 2021): steps with momentum, halved or made sparser where they stop paying off.

    `targets` 0: untargeted; n: one search for each of the n likeliest wrong classes.
    `phases` (l1 only): a search starts in a ball of three times the radius, goes on in twice, and ends in the threat's.
    `keep` "fooled" stops at the first success; "best" spends all steps and returns the highest loss, for training.
    """

    steps: Count = 100
    loss: LossName = "ce"
    targets: Count = 0
    restarts: AtLeastOne = 1
    eot: AtLeastOne = 1  # gradients are averaged over so many passes, for models that draw random numbers
    phases: bool = True
    random_start: bool = True
    sparsity: Share = 0.2  # l1: share of the coordinates that the first steps move
    keep: Literal["fooled", "best"] = "fooled"

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return attack(
            model,
            batch,
            threat,
            lambda classes: self.rule(threat.norm, threat.eps, classes, seed),
            name="apgd",
            targets=self.targets,
            restarts=self.restarts,
            goal="hit" if self.keep == "fooled" else "loss",
        )

    def short_name(self) -> tuple[str, dict[str, Any]]:
        if self.loss == "dlr" and self.targets:
            return "apgd-t", {"loss": "dlr", "targets": 9}
        return f"apgd-{self.loss}", {"loss": self.loss}

    def rule(self, norm: Norm, eps: Radius, classes: int, seed: int) -> Climb[Any]:
        """`eps` may be one radius for each example of the batch."""
        loss = fitting(self.loss, classes, targeted=self.targets > 0)
        kind: type[Climb[Any]] = SparseSteps if norm == "l1" else MomentumSteps
        return kind(self, norm, eps, loss, seed)


@attacks.register("apgd-ce")
def apgd_ce(*, steps: int = 100, restarts: int = 1, eot: int = 1, phases: bool = True) -> APGD:
    """APGD on the cross-entropy."""
    return APGD(steps=steps, restarts=restarts, eot=eot, phases=phases)


@attacks.register("apgd-dlr")
def apgd_dlr(*, steps: int = 100, restarts: int = 1, eot: int = 1, phases: bool = True) -> APGD:
    """APGD on the difference of logits ratio."""
    return APGD(steps=steps, loss="dlr", restarts=restarts, eot=eot, phases=phases)


@attacks.register("apgd-t")
def apgd_t(*, steps: int = 100, targets: int = 9, restarts: int = 1, eot: int = 1, phases: bool = True) -> APGD:
    """APGD on the targeted DLR, for each of the likeliest wrong classes."""
    return APGD(steps=steps, loss="dlr", targets=targets, restarts=restarts, eot=eot, phases=phases)


@attacks.register("apgd-t-fast")
def apgd_t_fast() -> APGD:
    """40 steps for each of 3 targets: what Singh et al. (2023) choose by and ablate with."""
    return APGD(steps=40, loss="dlr", targets=3)


@attacks.register("apgd-train")
def apgd_train(*, steps: int = 2, loss: LossName = "ce", sparsity: float = 0.05) -> APGD:
    """APGD for adversarial training (Singh et al. 2023): from the image itself, to the highest loss of all steps."""
    return APGD(steps=steps, loss=loss, phases=False, random_start=False, sparsity=sparsity, keep="best")


@dataclass
class Ascent(SearchState):
    """The best x of a search, by the loss it climbs."""

    eps: Tensor  # (B,)
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    best_margin: Tensor
    size: Tensor  # (B,) length of the next step
    since: Tensor  # (B,) steps since the last look back


@dataclass
class MomentumAscent(Ascent):
    before: Tensor  # the x before this one
    checked_loss: Tensor  # best loss at the last look back
    last_loss: Tensor
    rises: Tensor  # (B,) how often the loss rose since then
    every: Tensor  # (B,) steps between the last look back and the next
    shortened: Tensor  # bool (B,): was the step shortened then?


@dataclass
class SparseAscent(Ascent):
    phase: Tensor  # (B,)
    share: Tensor  # (B,) of the coordinates that a step moves
    support: Tensor  # (B,) how many coordinates of the best x differed at the last look back


A = TypeVar("A", bound=Ascent)


class Climb(Search[A]):
    """What the rules of all norms have in common."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        self.settings, self.norm, self.eps, self.seed = settings, norm, eps, seed
        self.steps, self.eot = settings.steps, settings.eot
        self.loss_name: LossName = loss
        self.starts: Tensor | None = None  # for each example of the batch an image to start from, instead of noise

    def wants_gradient(self, state: A) -> Tensor:
        return state.step < self.steps

    def loss(self, state: A, logits: Tensor) -> Tensor:
        if self.settings.targets:
            return TARGETED[self.loss_name](logits, state.y, state.target)
        return LOSSES[self.loss_name](logits, state.y)

    def best(self, state: A) -> tuple[Tensor, Tensor]:
        return state.best, state.best_margin if self.settings.keep == "fooled" else state.best_loss

    def remember(self, state: A, logits: Tensor, gradient: Tensor) -> Tensor:
        """Keep x if it is the best; returns its loss."""
        loss = self.loss(state, logits)
        better = (loss > state.best_loss) | (state.step == 0) | state.best_loss.isnan()
        state.best = torch.where(_wide(better), state.x, state.best)
        state.best_gradient = torch.where(_wide(better), gradient, state.best_gradient)
        state.best_margin = torch.where(better, margin(logits, state.y), state.best_margin)
        state.best_loss = torch.where(better, loss, state.best_loss)
        return loss

    def radius(self, jobs: Jobs, batch: Batch) -> Tensor:
        eps = self.eps[jobs.at] if isinstance(self.eps, Tensor) else self.eps
        return torch.as_tensor(eps, dtype=torch.float64, device=batch.x.device).expand(len(batch.x)).clone()

    def noise(self, jobs: Jobs, batch: Batch, eps: Tensor) -> Tensor:
        """Where a search starts from: a random direction of length eps, in the box."""
        if self.starts is not None:
            return project(self.norm, batch.x, self.starts[jobs.at], eps)
        if not self.settings.random_start:
            return batch.x.clone()
        draw = rng.key("apgd") + jobs.number
        shape, dtype = batch.x.shape[1:], batch.x.dtype
        if self.norm == "linf":
            offset = rng.uniform(self.seed, batch.index, draw, shape, -1, 1, dtype=dtype)
        else:
            offset = rng.normal(self.seed, batch.index, draw, shape, dtype=dtype)
        if self.norm == "l1":  # too long to be scaled: the projection leaves the largest coordinates
            return project("l1", batch.x, batch.x + offset, eps)
        unit = offset / _wide(length(self.norm, offset))
        return project(self.norm, batch.x, batch.x + _wide(eps).to(dtype) * unit, eps)

    def common(self, jobs: Jobs, batch: Batch, eps: Tensor) -> dict[str, Tensor]:
        x = self.noise(jobs, batch, eps)
        low = x.new_full((len(x),), -torch.inf)
        labels = {"y": batch.y} if self.loss_name == "ce" else {}  # which may be soft
        return {
            **initial_state(jobs, batch, x),
            **labels,
            "eps": eps,
            "best": x.clone(),
            "best_gradient": torch.zeros_like(x),
            "best_loss": low,
            "best_margin": low.clone(),
            "since": torch.zeros_like(jobs.at),
        }


class MomentumSteps(Climb[MomentumAscent]):
    """linf and l2: momentum, and a step that is halved when it stops paying off (Algorithm 1)."""

    def start(self, jobs: Jobs, batch: Batch) -> MomentumAscent:
        eps = self.radius(jobs, batch)
        common = self.common(jobs, batch, eps)
        return MomentumAscent(
            **common,
            size=2 * eps,
            before=common["x"].clone(),
            checked_loss=common["best_loss"].clone(),
            # The first loss is compared with 0, as the reference does: a rise for CE, none for DLR.
            last_loss=torch.zeros_like(common["best_loss"]),
            rises=torch.zeros_like(jobs.at),
            every=torch.full_like(jobs.at, max(int(0.22 * self.steps), 1)),
            shortened=torch.ones_like(jobs.at, dtype=torch.bool),
        )

    def update(self, state: MomentumAscent, logits: Tensor, gradient: Tensor) -> None:
        loss = self.remember(state, logits, gradient)
        first = state.step == 0
        state.checked_loss = torch.where(first, loss, state.checked_loss)
        state.rises = state.rises + (~first & (loss > state.last_loss))
        state.last_loss = torch.where(first, state.last_loss, loss)
        state.since = state.since + ~first
        state.done = state.step >= self.steps
        x, gradient = self._look_back(state, gradient)
        self._move(state, x, gradient)
        state.step = state.step + 1

    def _look_back(self, state: MomentumAscent, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Where searches go on from: halve the step and return to the best x where it swings or stalls."""
        due = state.since == state.every
        if not due.any():
            return state.x, gradient
        swings = state.rises <= RHO * state.every
        stalls = ~state.shortened & (state.checked_loss >= state.best_loss)
        halve = due & (swings | stalls)
        state.size = torch.where(halve, state.size / 2, state.size)
        state.shortened = torch.where(due, halve, state.shortened)
        state.checked_loss = torch.where(due, state.best_loss, state.checked_loss)
        state.rises, state.since = (torch.where(due, 0, count) for count in (state.rises, state.since))
        least, less = (max(int(share * self.steps), 1) for share in (0.06, 0.03))
        state.every = torch.where(due, (state.every - less).clamp(min=least), state.every)
        back = _wide(halve)
        return torch.where(back, state.best, state.x), torch.where(back, state.best_gradient, gradient)

    def _move(self, state: MomentumAscent, x: Tensor, gradient: Tensor) -> None:
        direction = steepest(self.norm, gradient)
        stepped = project_approx(self.norm, state.x0, x + _wide(state.size).to(x.dtype) * direction, state.eps)
        share = _wide(torch.where(state.step == 0, 1.0, MOMENTUM).to(x.dtype))
        # `before` stays where it is when a search returns to its best x.
        moved = x + share * (stepped - x) + (1 - share) * (x - state.before)
        state.x, state.before = project_approx(self.norm, state.x0, moved, state.eps), x


class SparseSteps(Climb[SparseAscent]):
    """l1: steps along the largest coordinates of the gradient, as many as the best x needs (ICML 2021)."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        super().__init__(settings, norm, eps, loss, seed)
        part = math.ceil(0.3 * self.steps)
        # Steps in a ball of so many times the radius; of one or two steps there is none to spare for larger balls.
        phased = settings.phases and self.steps > 2
        plan = [(3.0, part), (2.0, part), (1.0, self.steps - 2 * part)] if phased else [(1.0, self.steps)]
        self.scales = torch.tensor([scale for scale, _ in plan], dtype=torch.float64)
        self.lengths = torch.tensor([count for _, count in plan])

    def wants_gradient(self, state: SparseAscent) -> Tensor:
        return state.step < self.lengths.to(state.step.device)[state.phase]

    def start(self, jobs: Jobs, batch: Batch) -> SparseAscent:
        eps = self.radius(jobs, batch) * self.scales[0].item()
        state = SparseAscent(
            **self.common(jobs, batch, eps),
            size=eps.clone(),
            phase=torch.zeros_like(jobs.at),
            share=torch.full_like(eps, self.settings.sparsity),
            support=torch.full_like(eps, math.prod(batch.x.shape[1:])),
        )
        if self.starts is not None:
            self._measure(state, state.x, ~state.done)
        return state

    def update(self, state: SparseAscent, logits: Tensor, gradient: Tensor) -> None:
        self.remember(state, logits, gradient)
        lengths = self.lengths.to(state.step.device)
        state.since = state.since + (state.step > 0)
        x, gradient = self._look_back(state, gradient, (0.04 * lengths[state.phase]).long().clamp(min=1))
        over = state.step >= lengths[state.phase]
        state.done = over & (state.phase == len(lengths) - 1)
        step = _largest(gradient, state.share)
        size = _wide(state.size / step.abs().flatten(1).sum(1).clamp(min=1)).to(x.dtype)
        stepped = x + size * step
        state.step = state.step + 1
        over = over & ~state.done
        if over.any():
            self._narrow(state, over)
            stepped = torch.where(_wide(over), state.best, stepped)
        state.x = project("l1", state.x0, stepped, state.eps)
        if over.any():
            self._measure(state, state.x, over)

    def _look_back(self, state: SparseAscent, gradient: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
        """Where searches go on from: the best x and full steps where it became sparser, shorter steps elsewhere."""
        due = state.since == every
        if not due.any():
            return state.x, gradient
        sparser = due & (_support(state.x0, state.best) < 0.95 * state.support)
        shorter = (state.size / 1.5).maximum(state.eps / 10)
        state.size = torch.where(due, torch.where(sparser, state.eps, shorter), state.size)
        self._measure(state, state.best, due)
        state.since = torch.where(due, 0, state.since)
        back = _wide(sparser)
        return torch.where(back, state.best, state.x), torch.where(back, state.best_gradient, gradient)

    def _measure(self, state: SparseAscent, x: Tensor, rows: Tensor) -> None:
        """Take the sparsity of the next steps from that of x."""
        support = _support(state.x0, x)
        state.share = torch.where(rows, support / (1.5 * math.prod(x.shape[1:])), state.share)
        state.support = torch.where(rows, support, state.support)

    def _narrow(self, state: SparseAscent, rows: Tensor) -> None:
        """On to the next, smaller ball."""
        scales = self.scales.to(state.eps.device)
        narrower = state.eps * scales[(state.phase + 1).clamp(max=len(scales) - 1)] / scales[state.phase]
        state.eps = torch.where(rows, narrower, state.eps)
        state.phase = state.phase + rows.long()
        state.size = torch.where(rows, state.eps, state.size)
        state.step, state.since = (torch.where(rows, 0, count) for count in (state.step, state.since))


def _support(x0: Tensor, x: Tensor) -> Tensor:
    """(B,) how many coordinates differ."""
    return (x != x0).flatten(1).sum(1).double()


def _largest(gradient: Tensor, share: Tensor) -> Tensor:
    """Signs of the largest coordinates of each gradient, a share of all (ties too); zero elsewhere."""
    size = gradient.abs().flatten(1)
    dimension = size.shape[1]
    count = dimension - ((1 - share) * dimension).long().clamp(0, dimension - 1)
    least = size.topk(int(count.max()), dim=1).values.gather(1, count[:, None] - 1)
    return torch.where(size >= least, gradient.flatten(1).sign(), 0).view(gradient.shape)


def _wide(row: Tensor) -> Tensor:
    """(B,) to (B, 1, 1, 1)."""
    return row.view(-1, 1, 1, 1)

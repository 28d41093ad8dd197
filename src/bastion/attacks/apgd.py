"""Auto-PGD (Croce and Hein 2020): PGD with momentum and adaptive steps; for l1 (2021), steps of adaptive sparsity."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state
from bastion.attacks.losses import LOSSES, TARGETED, LossName, margin, usable_loss
from bastion.settings import AtLeastOne, Count, Share, settings
from bastion.threat import Norm, Radius, Threat, length, project, project_approx, steepest
from bastion.types import Attack, Batch

MOMENTUM = 0.75
RHO = 0.75  # the step is halved if a smaller share of steps raised the loss


@attacks.register("apgd")
@settings
class APGD(Attack):
    """Auto-PGD (Croce and Hein 2020, 2021): steps with momentum that are halved or made sparser when progress stops.

    `targets` 0: untargeted; n: one search for each of the n likeliest wrong classes.
    `phases` (l1 only): a search first uses three times the radius, then twice, then the threat's.
    `keep` "fooled" stops at the first success; "best" uses all steps and returns the highest loss, for training.
    """

    steps: Count = 100  # gradient steps of a search
    loss: LossName = "ce"  # that is climbed
    targets: Count = 0  # 0: away from the right class; n: towards each of the n likeliest wrong ones
    restarts: AtLeastOne = 1  # searches, each from another random point
    eot: AtLeastOne = 1  # gradients are averaged over this many passes, for randomised models
    phases: bool = True  # l1 only: first three times the radius, then twice, then the threat's
    random_start: bool = True  # begin at a random point of the ball, not at the image
    sparsity: Share = 0.2  # l1 only: share of the coordinates that the first steps change
    keep: Literal["fooled", "best"] = "fooled"  # stop at the first success, or use all steps for the highest loss

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

    def passes(self, norm: Norm) -> int:
        phases = len(self.sparse_phases()) if norm == "l1" else 1
        return self.restarts * max(self.targets, 1) * (self.steps + phases) * self.eot

    def sparse_phases(self) -> list[tuple[float, int]]:
        """(factor of the radius, steps) of each phase of a search under l1; one or two steps are a single phase."""
        if not self.phases or self.steps <= 2:
            return [(1.0, self.steps)]
        part = math.ceil(0.3 * self.steps)
        return [(3.0, part), (2.0, part), (1.0, self.steps - 2 * part)]

    def short_name(self) -> tuple[str, dict[str, Any]]:
        if self.loss == "dlr" and self.targets:
            return "apgd-t", {"loss": "dlr", "targets": 9}
        return f"apgd-{self.loss}", {"loss": self.loss}

    def rule(self, norm: Norm, eps: Radius, classes: int, seed: int) -> APGDSearch[Any]:
        """`eps` may be one radius for each example of the batch."""
        loss = usable_loss(self.loss, classes, targeted=self.targets > 0)
        kind: type[APGDSearch[Any]] = SparseSteps if norm == "l1" else MomentumSteps
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
    """40 steps for each of 3 targets, as Singh et al. (2023) use for model selection and ablations."""
    return APGD(steps=40, loss="dlr", targets=3)


@attacks.register("apgd-train")
def apgd_train(*, steps: int = 2, loss: LossName = "ce", sparsity: float = 0.05) -> APGD:
    """APGD for adversarial training (Singh et al. 2023): starts at the image, returns the highest loss of all steps."""
    return APGD(steps=steps, loss=loss, phases=False, random_start=False, sparsity=sparsity, keep="best")


@dataclass
class Ascent(SearchState):
    """`best…` are of the x with the highest loss so far."""

    eps: Tensor  # (B,)
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    best_margin: Tensor
    size: Tensor  # (B,) length of the next step
    since: Tensor  # (B,) steps since the last checkpoint, where the step length is adapted


@dataclass
class MomentumState(Ascent):
    before: Tensor  # the previous x
    checked_loss: Tensor  # best loss at the last checkpoint
    last_loss: Tensor
    rises: Tensor  # (B,) how often the loss rose since then
    every: Tensor  # (B,) steps from the last checkpoint to the next
    shortened: Tensor  # bool (B,): the step was halved at the last checkpoint


@dataclass
class SparseState(Ascent):
    phase: Tensor  # (B,)
    share: Tensor  # (B,) of the coordinates that a step changes
    support: Tensor  # (B,) number of coordinates that the best x had changed at the last checkpoint


A = TypeVar("A", bound=Ascent)


class APGDSearch(Search[A]):
    """What the searches of all norms have in common."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        self.settings, self.norm, self.eps, self.seed = settings, norm, eps, seed
        self.steps, self.eot = settings.steps, settings.eot
        self.loss_name: LossName = loss
        self.starts: Tensor | None = None  # an image to start from for each example, instead of a random one

    def wants_gradient(self, state: A) -> Tensor:
        return state.step < self.steps

    def loss(self, state: A, logits: Tensor) -> Tensor:
        if self.settings.targets:
            return TARGETED[self.loss_name](logits, state.y, state.target)
        return LOSSES[self.loss_name](logits, state.y)

    def best(self, state: A) -> tuple[Tensor, Tensor]:
        return state.best, state.best_margin if self.settings.keep == "fooled" else state.best_loss

    def keep_best(self, state: A, logits: Tensor, gradient: Tensor) -> Tensor:
        """Keep x if its loss is the highest so far; returns its loss."""
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

    def start_image(self, jobs: Jobs, batch: Batch, eps: Tensor) -> Tensor:
        """The first x: given by `starts`, the image itself, or the image plus a random perturbation of length eps."""
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
        if self.norm == "l1":  # the noise is not scaled: projecting it keeps the largest coordinates
            return project("l1", batch.x, batch.x + offset, eps)
        unit = offset / _wide(length(self.norm, offset))
        return project(self.norm, batch.x, batch.x + _wide(eps).to(dtype) * unit, eps)

    def common_state(self, jobs: Jobs, batch: Batch, eps: Tensor) -> dict[str, Tensor]:
        """The fields of `Ascent` but for `size`."""
        x = self.start_image(jobs, batch, eps)
        low = x.new_full((len(x),), -torch.inf)
        labels = {"y": batch.y} if self.loss_name == "ce" else {}  # labels may be soft for the cross-entropy
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


class MomentumSteps(APGDSearch[MomentumState]):
    """linf and l2: momentum, and a step length that is halved when progress stops (Algorithm 1)."""

    def start(self, jobs: Jobs, batch: Batch) -> MomentumState:
        eps = self.radius(jobs, batch)
        common = self.common_state(jobs, batch, eps)
        return MomentumState(
            **common,
            size=2 * eps,
            before=common["x"].clone(),
            checked_loss=common["best_loss"].clone(),
            # The first loss is compared with 0, as in the reference code: a rise for CE, none for DLR.
            last_loss=torch.zeros_like(common["best_loss"]),
            rises=torch.zeros_like(jobs.at),
            every=torch.full_like(jobs.at, max(int(0.22 * self.steps), 1)),
            shortened=torch.ones_like(jobs.at, dtype=torch.bool),
        )

    def update(self, state: MomentumState, logits: Tensor, gradient: Tensor) -> None:
        loss = self.keep_best(state, logits, gradient)
        first = state.step == 0
        state.checked_loss = torch.where(first, loss, state.checked_loss)
        state.rises = state.rises + (~first & (loss > state.last_loss))
        state.last_loss = torch.where(first, state.last_loss, loss)
        state.since = state.since + ~first
        state.done = state.step >= self.steps
        x, gradient = self._adapt_step(state, gradient)
        self._move(state, x, gradient)
        state.step = state.step + 1

    def _adapt_step(self, state: MomentumState, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """At a checkpoint, halve the step and go back to the best x if the loss oscillates or stalls.

        Returns the x to step from, and its gradient.
        """
        due = state.since == state.every
        if not due.any():
            return state.x, gradient
        oscillates = state.rises <= RHO * state.every
        stalls = ~state.shortened & (state.checked_loss >= state.best_loss)
        halve = due & (oscillates | stalls)
        state.size = torch.where(halve, state.size / 2, state.size)
        state.shortened = torch.where(due, halve, state.shortened)
        state.checked_loss = torch.where(due, state.best_loss, state.checked_loss)
        state.rises, state.since = (torch.where(due, 0, count) for count in (state.rises, state.since))
        least, less = (max(int(share * self.steps), 1) for share in (0.06, 0.03))
        state.every = torch.where(due, (state.every - less).clamp(min=least), state.every)
        back = _wide(halve)
        return torch.where(back, state.best, state.x), torch.where(back, state.best_gradient, gradient)

    def _move(self, state: MomentumState, x: Tensor, gradient: Tensor) -> None:
        direction = steepest(self.norm, gradient)
        stepped = project_approx(self.norm, state.x0, x + _wide(state.size).to(x.dtype) * direction, state.eps)
        share = _wide(torch.where(state.step == 0, 1.0, MOMENTUM).to(x.dtype))
        # `before` is not reset when a search goes back to its best x.
        moved = x + share * (stepped - x) + (1 - share) * (x - state.before)
        state.x, state.before = project_approx(self.norm, state.x0, moved, state.eps), x


class SparseSteps(APGDSearch[SparseState]):
    """l1: steps along the largest coordinates of the gradient, their number adapted to the best x (2021)."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        super().__init__(settings, norm, eps, loss, seed)
        scales, lengths = zip(*settings.sparse_phases(), strict=True)
        self.scales, self.lengths = torch.tensor(scales, dtype=torch.float64), torch.tensor(lengths)

    def wants_gradient(self, state: SparseState) -> Tensor:
        return state.step < self.lengths.to(state.step.device)[state.phase]

    def start(self, jobs: Jobs, batch: Batch) -> SparseState:
        eps = self.radius(jobs, batch) * self.scales[0].item()
        state = SparseState(
            **self.common_state(jobs, batch, eps),
            size=eps.clone(),
            phase=torch.zeros_like(jobs.at),
            share=torch.full_like(eps, self.settings.sparsity),
            support=torch.full_like(eps, math.prod(batch.x.shape[1:])),
        )
        if self.starts is not None:
            self._set_sparsity(state, state.x, ~state.done)
        return state

    def update(self, state: SparseState, logits: Tensor, gradient: Tensor) -> None:
        self.keep_best(state, logits, gradient)
        lengths = self.lengths.to(state.step.device)
        state.since = state.since + (state.step > 0)
        x, gradient = self._adapt_step(state, gradient, (0.04 * lengths[state.phase]).long().clamp(min=1))
        over = state.step >= lengths[state.phase]
        state.done = over & (state.phase == len(lengths) - 1)
        step = _largest(gradient, state.share)
        size = _wide(state.size / step.abs().flatten(1).sum(1).clamp(min=1)).to(x.dtype)
        stepped = x + size * step
        state.step = state.step + 1
        over = over & ~state.done
        if over.any():
            self._next_phase(state, over)
            stepped = torch.where(_wide(over), state.best, stepped)
        state.x = project("l1", state.x0, stepped, state.eps)
        if over.any():
            self._set_sparsity(state, state.x, over)

    def _adapt_step(self, state: SparseState, gradient: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
        """At a checkpoint: if the best x became sparser, go back to it with full steps; else shorten the steps."""
        due = state.since == every
        if not due.any():
            return state.x, gradient
        sparser = due & (_support(state.x0, state.best) < 0.95 * state.support)
        shorter = (state.size / 1.5).maximum(state.eps / 10)
        state.size = torch.where(due, torch.where(sparser, state.eps, shorter), state.size)
        self._set_sparsity(state, state.best, due)
        state.since = torch.where(due, 0, state.since)
        back = _wide(sparser)
        return torch.where(back, state.best, state.x), torch.where(back, state.best_gradient, gradient)

    def _set_sparsity(self, state: SparseState, x: Tensor, rows: Tensor) -> None:
        """Set the sparsity of the next steps from the number of coordinates that x changes."""
        support = _support(state.x0, x)
        state.share = torch.where(rows, support / (1.5 * math.prod(x.shape[1:])), state.share)
        state.support = torch.where(rows, support, state.support)

    def _next_phase(self, state: SparseState, rows: Tensor) -> None:
        """Go on with the next, smaller radius."""
        scales = self.scales.to(state.eps.device)
        narrower = state.eps * scales[(state.phase + 1).clamp(max=len(scales) - 1)] / scales[state.phase]
        state.eps = torch.where(rows, narrower, state.eps)
        state.phase = state.phase + rows.long()
        state.size = torch.where(rows, state.eps, state.size)
        state.step, state.since = (torch.where(rows, 0, count) for count in (state.step, state.since))


def _support(x0: Tensor, x: Tensor) -> Tensor:
    """(B,): the number of coordinates that differ."""
    return (x != x0).flatten(1).sum(1).double()


def _largest(gradient: Tensor, share: Tensor) -> Tensor:
    """The signs of each gradient at its largest coordinates, a share of all (and ties); zero elsewhere."""
    size = gradient.abs().flatten(1)
    dimension = size.shape[1]
    count = dimension - ((1 - share) * dimension).long().clamp(0, dimension - 1)
    least = size.topk(int(count.max()), dim=1).values.gather(1, count[:, None] - 1)
    return torch.where(size >= least, gradient.flatten(1).sign(), 0).view(gradient.shape)


def _wide(row: Tensor) -> Tensor:
    """(B,) to (B, 1, 1, 1)."""
    return row.view(-1, 1, 1, 1)

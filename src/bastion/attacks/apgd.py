"""Auto-PGD (Croce and Hein 2020): PGD with momentum that chooses its own step; for l1 (2021) its own sparsity too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from bastion import rng
from bastion.attacks import attacks
from bastion.attacks.engine import Jobs, Run, Search, attack, opening
from bastion.attacks.losses import LOSSES, TARGETED, LossName, fitting, margin
from bastion.attacks.threat import Norm, Radius, Threat, length, project, retract, steepest
from bastion.errors import BastionError
from bastion.registry import check_fields
from bastion.types import Batch

MOMENTUM = 0.75
RHO = 0.75  # a step that raises the loss less often than this is too long


@attacks.register("apgd")
@dataclass(frozen=True, kw_only=True)
class APGD:
    """Auto-PGD (Croce and Hein 2020, 2021): steps with momentum, halved or made sparser where they stop paying off.

    `targets` 0: untargeted; n: one run for each of the n likeliest wrong classes.
    `phases` (l1 only): a run starts in a ball of three times the radius, goes on in twice, and ends in the threat's.
    `keep` "fooled" stops at the first success; "best" spends all steps and returns the highest loss, for training.
    """

    steps: int = 100
    loss: LossName = "ce"
    targets: int = 0
    restarts: int = 1
    eot: int = 1  # gradients are averaged over so many passes, for models that draw random numbers
    phases: bool = True
    random_start: bool = True
    sparsity: float = 0.2  # l1: share of the coordinates that the first steps move
    keep: Literal["fooled", "best"] = "fooled"

    def __post_init__(self) -> None:
        check_fields(self, "apgd")
        if min(self.steps, self.targets) < 0 or min(self.restarts, self.eot) < 1 or not 0 < self.sparsity <= 1:
            raise BastionError(
                "apgd: need steps and targets >= 0, restarts and eot >= 1 and a sparsity in (0, 1], got "
                f"{self.steps}, {self.targets}, {self.restarts}, {self.eot} and {self.sparsity}"
            )

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
class Ascent(Run):
    """The best point of a run, by the loss it climbs."""

    eps: Tensor  # (B,)
    best: Tensor
    best_gradient: Tensor
    best_loss: Tensor
    best_margin: Tensor
    size: Tensor  # (B,) length of the next step
    since: Tensor  # (B,) steps since the last look back


@dataclass
class MomentumAscent(Ascent):
    before: Tensor  # the point before x
    checked_loss: Tensor  # best loss at the last look back
    last_loss: Tensor
    rises: Tensor  # (B,) how often the loss rose since then
    every: Tensor  # (B,) steps between the last look back and the next
    shortened: Tensor  # bool (B,): was the step shortened then?


@dataclass
class SparseAscent(Ascent):
    phase: Tensor  # (B,)
    share: Tensor  # (B,) of the coordinates that a step moves
    support: Tensor  # (B,) how many coordinates of the best point differed at the last look back


A = TypeVar("A", bound=Ascent)


class Climb(Search[A]):
    """What the rules of all norms have in common."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        self.settings, self.norm, self.eps, self.seed = settings, norm, eps, seed
        self.steps, self.eot = settings.steps, settings.eot
        self.loss_name: LossName = loss
        self.starts: Tensor | None = None  # for each example of the batch a point to start from, instead of noise

    def wants_gradient(self, runs: A) -> Tensor:
        return runs.step < self.steps

    def loss(self, runs: A, logits: Tensor) -> Tensor:
        if self.settings.targets:
            return TARGETED[self.loss_name](logits, runs.y, runs.target)
        return LOSSES[self.loss_name](logits, runs.y)

    def best(self, runs: A) -> tuple[Tensor, Tensor]:
        return runs.best, runs.best_margin if self.settings.keep == "fooled" else runs.best_loss

    def remember(self, runs: A, logits: Tensor, gradient: Tensor) -> Tensor:
        """Keep the point if it is the best; returns its loss."""
        loss = self.loss(runs, logits)
        better = (loss > runs.best_loss) | (runs.step == 0) | runs.best_loss.isnan()
        runs.best = torch.where(_wide(better), runs.x, runs.best)
        runs.best_gradient = torch.where(_wide(better), gradient, runs.best_gradient)
        runs.best_margin = torch.where(better, margin(logits, runs.y), runs.best_margin)
        runs.best_loss = torch.where(better, loss, runs.best_loss)
        return loss

    def radius(self, jobs: Jobs, batch: Batch) -> Tensor:
        eps = self.eps[jobs.at] if isinstance(self.eps, Tensor) else self.eps
        return torch.as_tensor(eps, dtype=torch.float64, device=batch.x.device).expand(len(batch.x)).clone()

    def noise(self, jobs: Jobs, batch: Batch, eps: Tensor) -> Tensor:
        """Where a run starts from: a random direction of length eps, in the box."""
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
            **opening(jobs, batch, x),
            **labels,
            "eps": eps,
            "best": x.clone(),
            "best_gradient": torch.zeros_like(x),
            "best_loss": low,
            "best_margin": low.clone(),
            "since": torch.zeros_like(jobs.at),
        }


class MomentumSteps(Climb[MomentumAscent]):
    """linf and l2: two points of memory, and a step that is halved when it stops paying off (Algorithm 1)."""

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

    def tell(self, runs: MomentumAscent, logits: Tensor, gradient: Tensor) -> None:
        loss = self.remember(runs, logits, gradient)
        first = runs.step == 0
        runs.checked_loss = torch.where(first, loss, runs.checked_loss)
        runs.rises = runs.rises + (~first & (loss > runs.last_loss))
        runs.last_loss = torch.where(first, runs.last_loss, loss)
        runs.since = runs.since + ~first
        runs.done = runs.step >= self.steps
        x, gradient = self._look_back(runs, gradient)
        self._move(runs, x, gradient)
        runs.step = runs.step + 1

    def _look_back(self, runs: MomentumAscent, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Where runs go on from: halve the step and return to the best point where it swings or stalls."""
        due = runs.since == runs.every
        if not due.any():
            return runs.x, gradient
        swings = runs.rises <= RHO * runs.every
        stalls = ~runs.shortened & (runs.checked_loss >= runs.best_loss)
        halve = due & (swings | stalls)
        runs.size = torch.where(halve, runs.size / 2, runs.size)
        runs.shortened = torch.where(due, halve, runs.shortened)
        runs.checked_loss = torch.where(due, runs.best_loss, runs.checked_loss)
        runs.rises, runs.since = (torch.where(due, 0, count) for count in (runs.rises, runs.since))
        least, less = (max(int(share * self.steps), 1) for share in (0.06, 0.03))
        runs.every = torch.where(due, (runs.every - less).clamp(min=least), runs.every)
        return torch.where(_wide(halve), runs.best, runs.x), torch.where(_wide(halve), runs.best_gradient, gradient)

    def _move(self, runs: MomentumAscent, x: Tensor, gradient: Tensor) -> None:
        direction = steepest(self.norm, gradient)
        ahead = retract(self.norm, runs.x0, x + _wide(runs.size).to(x.dtype) * direction, runs.eps)
        share = _wide(torch.where(runs.step == 0, 1.0, MOMENTUM).to(x.dtype))
        # `before` stays where it is when a run returns to its best point.
        moved = retract(self.norm, runs.x0, x + share * (ahead - x) + (1 - share) * (x - runs.before), runs.eps)
        runs.x, runs.before = moved, x


class SparseSteps(Climb[SparseAscent]):
    """l1: steps along the largest coordinates of the gradient, as many as the best point needs (ICML 2021)."""

    def __init__(self, settings: APGD, norm: Norm, eps: Radius, loss: LossName, seed: int) -> None:
        super().__init__(settings, norm, eps, loss, seed)
        part = math.ceil(0.3 * self.steps)
        # Steps in a ball of so many times the radius; of one or two steps there is none to spare for larger balls.
        phased = settings.phases and self.steps > 2
        plan = [(3.0, part), (2.0, part), (1.0, self.steps - 2 * part)] if phased else [(1.0, self.steps)]
        self.scales = torch.tensor([scale for scale, _ in plan], dtype=torch.float64)
        self.lengths = torch.tensor([count for _, count in plan])

    def wants_gradient(self, runs: SparseAscent) -> Tensor:
        return runs.step < self.lengths.to(runs.step.device)[runs.phase]

    def start(self, jobs: Jobs, batch: Batch) -> SparseAscent:
        eps = self.radius(jobs, batch) * self.scales[0].item()
        runs = SparseAscent(
            **self.common(jobs, batch, eps),
            size=eps.clone(),
            phase=torch.zeros_like(jobs.at),
            share=torch.full_like(eps, self.settings.sparsity),
            support=torch.full_like(eps, math.prod(batch.x.shape[1:])),
        )
        if self.starts is not None:
            self._measure(runs, runs.x, ~runs.done)
        return runs

    def tell(self, runs: SparseAscent, logits: Tensor, gradient: Tensor) -> None:
        self.remember(runs, logits, gradient)
        lengths = self.lengths.to(runs.step.device)
        runs.since = runs.since + (runs.step > 0)
        x, gradient = self._look_back(runs, gradient, (0.04 * lengths[runs.phase]).long().clamp(min=1))
        over = runs.step >= lengths[runs.phase]
        runs.done = over & (runs.phase == len(lengths) - 1)
        step = _largest(gradient, runs.share)
        size = _wide(runs.size / step.abs().flatten(1).sum(1).clamp(min=1)).to(x.dtype)
        ahead = x + size * step
        runs.step = runs.step + 1
        over = over & ~runs.done
        if over.any():
            self._narrow(runs, over)
            ahead = torch.where(_wide(over), runs.best, ahead)
        runs.x = project("l1", runs.x0, ahead, runs.eps)
        if over.any():
            self._measure(runs, runs.x, over)

    def _look_back(self, runs: SparseAscent, gradient: Tensor, every: Tensor) -> tuple[Tensor, Tensor]:
        """Where runs go on from: the best point and full steps where it became sparser, shorter steps elsewhere."""
        due = runs.since == every
        if not due.any():
            return runs.x, gradient
        sparser = due & (_support(runs.x0, runs.best) < 0.95 * runs.support)
        shorter = (runs.size / 1.5).maximum(runs.eps / 10)
        runs.size = torch.where(due, torch.where(sparser, runs.eps, shorter), runs.size)
        self._measure(runs, runs.best, due)
        runs.since = torch.where(due, 0, runs.since)
        return torch.where(_wide(sparser), runs.best, runs.x), torch.where(_wide(sparser), runs.best_gradient, gradient)

    def _measure(self, runs: SparseAscent, x: Tensor, rows: Tensor) -> None:
        """Take the sparsity of the next steps from that of x."""
        support = _support(runs.x0, x)
        runs.share = torch.where(rows, support / (1.5 * math.prod(x.shape[1:])), runs.share)
        runs.support = torch.where(rows, support, runs.support)

    def _narrow(self, runs: SparseAscent, rows: Tensor) -> None:
        """On to the next, smaller ball."""
        scales = self.scales.to(runs.eps.device)
        narrower = runs.eps * scales[(runs.phase + 1).clamp(max=len(scales) - 1)] / scales[runs.phase]
        runs.eps = torch.where(rows, narrower, runs.eps)
        runs.phase = runs.phase + rows.long()
        runs.size = torch.where(rows, runs.eps, runs.size)
        runs.step, runs.since = (torch.where(rows, 0, count) for count in (runs.step, runs.since))


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

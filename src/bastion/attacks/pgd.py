"""Projected gradient descent (Madry et al. 2018), and FGSM, FGSM with random start and MI-FGSM as special cases."""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from bastion import journal, rng
from bastion.attacks import attacks
from bastion.attacks.losses import LOSSES, TARGETED, LossName, TargetedLoss, divergence, likeliest_wrong, usable_loss
from bastion.errors import BastionError
from bastion.forward import Best, Loss, check_batch, evaluate, loss_and_grad, precise, predict, record_zero_grad
from bastion.settings import AtLeastOne, Count, NotNegative, Positive, Share, settings
from bastion.threat import SAFETY, Norm, Threat, length
from bastion.types import Attack, Batch


@attacks.register("pgd")
@settings
class PGD(Attack):
    """PGD (Madry et al. 2018): steps along the steepest direction of the threat's norm, projected back into its set.

    `targets` n: one search for each of the n likeliest wrong classes instead of one away from the right class.
    The loss `kl` is the divergence from the prediction on the clean image, as in TRADES.
    """

    steps: Count = 20  # gradient steps of a search
    step: Positive | None = None  # length of a step in pixel units …
    rel_step: Positive | None = None  # … or in units of eps; neither: 2.5 / steps of eps
    restarts: AtLeastOne = 1  # searches, each from another random point
    random_start: bool = True  # begin at a random point of the ball, not at the image
    loss: LossName | Literal["kl"] = "ce"  # that is climbed
    targets: Count = 0  # 0: away from the right class; n: towards each of the n likeliest wrong ones
    momentum: NotNegative = 0.0  # decay of MI-FGSM: steps along a running sum of gradients, each scaled to mean |g| = 1
    sparsity: Share = 0.01  # l1 only: the share of coordinates that a step changes
    dense: bool = False  # l1 only: steps along the whole gradient, as in ART; much weaker, for comparison with papers
    keep: Literal["best", "last"] = "best"  # "last" saves a forward pass, for training

    def __post_init__(self) -> None:
        if self.keep == "last" and self.restarts * max(self.targets, 1) > 1:
            raise ValueError(
                f"keep=last returns one search's last image, so it takes no {self.restarts} restarts "
                f"and {self.targets} targets"
            )
        if self.loss == "kl" and (self.targets or not self.random_start):
            raise ValueError("the loss kl has no targets, and no gradient at the clean image: set random_start")
        if self.step is not None and self.rel_step is not None:
            raise ValueError("give `step` (pixel units) or `rel_step` (units of eps), not both")

    def __call__(self, model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        model, batch = check_batch(model, batch, "pgd")
        if self.dense and threat.norm != "l1":
            raise BastionError(f"pgd: dense is about l1 steps, the threat is {threat.norm}; leave it out")
        if self.step is not None and self.step > max(1.0, 2 * threat.eps):
            raise BastionError(
                f"pgd.step: the length of a step, in pixels from 0 to 1; {self.step:g} is more than the ball is wide. "
                f"For {self.step:g} steps, set `steps`"
            )
        best = Best(batch.x) if self.keep == "best" else None
        offers_clean = best is not None and (self.random_start or self.steps == 0)
        if offers_clean or self.targets or self.loss in ("kl", "dlr"):
            batch = batch._replace(logits=predict(model, batch))
        losses = self._losses(batch)
        if best is not None and offers_clean:
            best.offer(batch.x, *evaluate(model, batch, losses[0]))
        for number in range(self.restarts * len(losses)):
            x = ascend(
                model,
                batch,
                threat,
                losses[number % len(losses)],
                self._start(batch, threat, seed, number),
                steps=self.steps,
                size=self._size(threat),
                sparsity=self.sparsity,
                dense=self.dense,
                momentum=self.momentum,
                best=best,
            )
        return x if best is None else best.x

    def passes(self, norm: Norm) -> int:
        return self.restarts * max(self.targets, 1) * (self.steps + 1)

    def _losses(self, batch: Batch) -> list[Loss]:
        """The losses that a restart maximises: one, or one for each target."""
        if not self.targets and self.loss in ("ce", "margin"):
            return [LOSSES[self.loss]]
        assert batch.logits is not None
        clean = precise(batch.logits, batch.x)
        if self.loss == "kl":
            known = clean.log_softmax(1)
            return [lambda logits, _: divergence(known, logits)]
        loss = usable_loss(self.loss, clean.shape[1], targeted=self.targets > 0)
        if not self.targets:
            return [LOSSES[loss]]
        chosen = likeliest_wrong(clean, batch.y, self.targets)
        return [partial(_towards, TARGETED[loss], target) for target in chosen.unbind(1)]

    def _start(self, batch: Batch, threat: Threat, seed: int, number: int) -> Tensor:
        if not self.random_start:
            return batch.x
        draw = rng.key("pgd", number)
        return threat.project(batch.x, threat.random_point(batch.x, batch.index, seed=seed, draw=draw))

    def _size(self, threat: Threat) -> float:
        if self.step is not None:
            return self.step
        return threat.eps * (self.rel_step if self.rel_step is not None else 2.5 / max(self.steps, 1))


def ascend(
    model: nn.Module,
    batch: Batch,
    threat: Threat,
    loss: Loss,
    x: Tensor,
    *,
    steps: int,
    size: float,
    sparsity: float = 0.01,
    dense: bool = False,
    momentum: NotNegative = 0.0,
    mask: Tensor | None = None,
    best: Best | None = None,
) -> Tensor:
    """Projected gradient ascent from x, on the pixels of `mask` if given: the last iterate; `best` is offered all."""
    velocity = torch.zeros_like(x)
    for step in range(steps):
        value, wrong, gradient = loss_and_grad(model, batch.at(x), loss)
        gradient = gradient if mask is None else gradient * mask
        if step == 0:
            record_zero_grad(batch.index, gradient)
        if best is not None:
            best.offer(x, value, wrong)
        journal.spend(len(batch.x), lambda: len(batch.x) if best is None else int((~best.fooled).sum()))
        velocity = accumulated(velocity, gradient, momentum) if momentum else gradient
        if dense:
            x = dense_step(batch.x, x, velocity, size, threat.eps)
        else:
            x = threat.project(batch.x, threat.step(x, velocity, size, sparsity))
    if best is not None:
        best.offer(x, *evaluate(model, batch.at(x), loss))
    return x


def dense_step(x0: Tensor, x: Tensor, gradient: Tensor, size: float, eps: float) -> Tensor:
    """ART's l1 step: along the whole gradient, scaled to l1 length `size`; an offset longer than eps is scaled down.

    On a linear loss with gradient w it gains size·‖w‖₂²/‖w‖₁, the steepest step size·‖w‖_∞.
    """
    moved = x + size * gradient / length("l1", gradient).clamp(min=1e-30).view(-1, 1, 1, 1)
    offset = moved - x0
    scale = (SAFETY * eps / length("l1", offset.double()).clamp(min=1e-30)).clamp(max=1).to(x.dtype)
    return (x0 + scale.view(-1, 1, 1, 1) * offset).clamp(0, 1)


@attacks.register("fgsm")
def fgsm(*, loss: LossName = "ce", sparsity: float = 0.01, keep: Literal["best", "last"] = "best") -> PGD:
    """One step of length eps from the clean image (Goodfellow et al. 2015)."""
    return PGD(steps=1, rel_step=1.0, random_start=False, loss=loss, sparsity=sparsity, keep=keep)


@attacks.register("fgsm-rs")
def fgsm_rs(
    *,
    rel_step: Positive | None = 1.25,
    loss: LossName = "ce",
    sparsity: Share = 0.01,
    keep: Literal["best", "last"] = "best",
) -> PGD:
    """One step of length 1.25 eps from a random point of the ball (Wong et al. 2020)."""
    return PGD(steps=1, rel_step=rel_step, random_start=True, loss=loss, sparsity=sparsity, keep=keep)


@attacks.register("mi-fgsm")
def mi_fgsm(*, steps: int = 10, momentum: float = 1.0, loss: LossName = "ce", restarts: int = 1) -> PGD:
    """Momentum iterative FGSM (Dong et al. 2018): steps of eps / steps from the clean image."""
    return PGD(
        steps=steps, rel_step=1 / max(steps, 1), random_start=False, loss=loss, momentum=momentum, restarts=restarts
    )


def accumulated(velocity: Tensor, gradient: Tensor, decay: float) -> Tensor:
    """MI-FGSM's running sum of gradients, each scaled to a mean absolute value of 1."""
    return decay * velocity + gradient / gradient.abs().mean((1, 2, 3), keepdim=True).clamp(min=1e-30)


def _towards(loss: TargetedLoss, target: Tensor, logits: Tensor, y: Tensor) -> Tensor:
    return loss(logits, y, target)

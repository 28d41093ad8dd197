"""Sanity checks: symptoms of a robustness number that should not be trusted, example by example.

After Athalye et al. (2018), Carlini et al. (2019) and the checks of AutoAttack (Croce and Hein 2020). What a symptom
means, and how many examples make a warning, stands in `measuring/sanity.py`.
"""

from __future__ import annotations

from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from bastion import forward, rng
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import is_adversarial
from bastion.attacks.losses import LossName, ce, margin
from bastion.attacks.pgd import PGD, fgsm
from bastion.forward import GradientsInside, Loss, check_batch, misclassified
from bastion.probes import probes
from bastion.settings import AtLeastOne, settings
from bastion.types import Batch, Description, Probe

TOLERANCE = 1e-4  # of an answer's length: more than float rounding
BOX = Threat("linf", 1.0)  # every image there is, whatever the norm


@probes.register("sanity")
@settings
class Sanity(Probe):
    """Can a robustness number be trusted? `warning.CODE` is true where an example shows the symptom.

    Costs 39 forward and 23 backward passes for an image that nothing fools, less for one that PGD fools, and some
    hundred of each more for one that a single step or noise fools and PGD does not.
    """

    threat: Threat
    steps: Annotated[int, Ge(2)] = 10  # of PGD
    forwards: Annotated[int, Ge(2)] = 3  # that must agree
    tries: AtLeastOne = 4  # random points of the threat
    loss: LossName = "ce"  # of FGSM and PGD

    role = "check"

    def describe(self) -> Description:
        return Description(self.threat, versions=(PGD.version,))

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        model, batch = check_batch(model, batch, "sanity")
        x, inside = batch.x.clone().requires_grad_(), GradientsInside()
        with torch.enable_grad():
            with inside:
                logits = forward.logits(model, x)
            no_ce, no_margin = (stuck(loss, logits, batch.y, x) for loss in (ce, margin))
        logits, grain = logits.detach(), torch.finfo(logits.dtype).eps
        finite = logits.isfinite().all(1)
        right = finite & ~misclassified(logits, batch.y)
        random = self._random(model, batch.x, logits)
        symptoms = {
            "input-range": dark(batch.x),
            "nan": ~finite,
            "probabilities": probabilities(logits, grain),
            "training-mode": torch.full_like(right, any(module.training for module in model.modules())),
            "stochastic": random,
            "batch-dependent": batch_dependent(model, batch.x, logits) & ~random,
            "dynamic": torch.full_like(right, inside.found),
            "zero-gradient": right & no_margin,
            "saturated-ce": right & no_ce & ~no_margin,
            # An attack on a model that is not the same twice fails or succeeds by chance.
            **self._compare_attacks(model, batch, right & ~random, seed),
        }
        return {f"warning.{code}": column for code, column in symptoms.items()}

    def _random(self, model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
        """(B,) bool: the next forward passes do not give the same answer."""
        with torch.no_grad():
            changed = [differs(logits, forward.logits(model, x)) for _ in range(self.forwards - 1)]
        return torch.stack(changed).any(0)

    def _compare_attacks(self, model: nn.Module, batch: Batch, right: Tensor, seed: int) -> dict[str, Tensor]:
        """What PGD does not fool, weaker attacks should not fool, and the same attack without a bound should."""

        def fooled(which: Tensor, attack: Attack, threat: Threat = self.threat, draw: str = "pgd") -> Tensor:
            return fooled_by(attack, model, batch, which, threat, seed=rng.key("sanity", draw, seed))

        survivors = right & ~fooled(right, PGD(steps=self.steps, loss=self.loss))
        one_step = fooled(survivors, fgsm(loss=self.loss))
        noise = fooled(survivors, PGD(steps=0, restarts=self.tries, loss=self.loss), draw="noise")
        # On the border of the ball a loss may rise without a mistake, a step be too long, a random start a bad one:
        # many short steps of another loss from the image itself have to miss it too.
        other: LossName = "ce" if self.loss == "margin" else "margin"
        missed = ~fooled(one_step | noise, PGD(steps=10 * self.steps, loss=other, random_start=False))
        unbounded = fooled(survivors, PGD(steps=self.steps, loss=self.loss, random_start=False), BOX)
        return {
            "one-step-beats-many": one_step & missed,
            "noise-beats-gradient": noise & missed,
            "unbounded-survives": survivors & ~unbounded,
        }


def fooled_by(attack: Attack, model: nn.Module, batch: Batch, which: Tensor, threat: Threat, *, seed: int) -> Tensor:
    """(B,) bool: those of `which`, all right, that the attack fools inside the threat."""
    result = torch.zeros_like(which)
    if which.any():
        some = batch.select(which)
        x = attack(model, some, threat, seed=seed)
        with torch.no_grad():
            result[which] = is_adversarial(threat, some.x, x, forward.logits(model, x), some.y)
    return result


def stuck(loss: Loss, logits: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """(B,) bool: the gradient of the loss shows no way."""
    gradient = None
    if logits.requires_grad:  # a model that detaches its input has no gradient, and is no error
        (gradient,) = torch.autograd.grad(loss(logits, y).sum(), x, retain_graph=True, allow_unused=True)
    flat = (torch.zeros_like(x) if gradient is None else gradient).flatten(1)
    return ~flat.isfinite().all(1) | (flat == 0).all(1)


def differs(logits: Tensor, again: Tensor) -> Tensor:
    """(B,) bool: two answers are further apart than rounding; a NaN in both is no difference."""
    length: Tensor = torch.linalg.vector_norm(logits, dim=1)
    return (logits - again).abs().amax(1) > TOLERANCE * length


def batch_dependent(model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """(B,) bool: the answer changes beside other images, here the negatives of the batch, and in another place."""
    with torch.no_grad():
        among_others = forward.logits(model, torch.cat([1 - x, x]))[len(x) :]
    return differs(logits, among_others)


def probabilities(logits: Tensor, grain: float) -> Tensor:
    """(B,) bool: nothing outside [0, 1], and the sum is 1, but for rounding."""
    slack = max(1e-5, grain)
    unit = (logits > -slack) & (logits < 1 + slack)
    return unit.all(1) & ((logits.sum(1) - 1).abs() < slack)


def dark(x: Tensor) -> Tensor:
    """(B,) bool: not black, but no pixel above 1.5/255."""
    brightest = x.flatten(1).amax(1)
    return (brightest > 0) & (brightest <= 1.5 / 255)

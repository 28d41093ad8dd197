"""Sanity checks for symptoms that a robust accuracy cannot be trusted, example by example.

After Athalye et al. (2018), Carlini et al. (2019) and the checks of AutoAttack (Croce and Hein 2020). What a symptom
means, and how many examples make a warning, is in `measuring/sanity.py`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge
from torch import Tensor, nn

from bastion import forward, rng
from bastion.attacks import Attack, Threat
from bastion.attacks.judge import is_adversarial
from bastion.attacks.losses import LossName, ce, margin
from bastion.attacks.pgd import PGD, fgsm
from bastion.attacks.square import Square
from bastion.forward import GradientsInside, Loss, check_batch, misclassified
from bastion.probes import probes
from bastion.settings import AtLeastOne, Count, settings
from bastion.types import Batch, Description, Probe

TOLERANCE = 1e-4  # of the l2 norm of the logits: more than float rounding
LEVEL = 1 / 255  # one grey level
# By distance in grey levels: the lowest cosine of an image's gradient with the mean gradient of images around it.
# Nine of ten images are above 0.92 and 0.43 for networks without a defence, ImageNet's too (docs/sanity.md).
COSINES = {0.25: 0.75, 2.0: 0.3}
STEP = LEVEL / 16  # of finite differences
# How much of finite differences the gradient may leave unexplained: 0 for a smooth function, 1 if it says nothing,
# 2 if it points the other way.
UNEXPLAINED = 0.2
BOX = Threat("linf", 1.0)  # contains every image


@probes.register("sanity")
@settings
class Sanity(Probe):
    """Whether a robust accuracy can be trusted: `warning.CODE` is true where an example shows the symptom.

    Takes 104 forward and 27 backward passes for an image that nothing fools, fewer for one that PGD fools, and some
    hundred more of each for one that a single step, noise or Square fools and PGD does not.
    """

    revision = 4

    threat: Threat
    steps: Annotated[int, Ge(2)] = 10  # of PGD
    forwards: Annotated[int, Ge(2)] = 3  # forward passes that must agree
    tries: AtLeastOne = 4  # random images of the threat's set
    queries: Count = 50  # of Square
    nearby: Count = 2  # images at each distance whose mean gradient must resemble that of the image
    directions: Count = 4  # random directions in which finite differences must agree with the gradient
    loss: LossName = "ce"  # of FGSM and PGD

    role = "check"

    def describe(self) -> Description:
        attacks = sum(attack.passes(self.threat.norm) + 2 for attack in self._attacks.values())  # clean, and judged
        passes = self.forwards + 2 + len(COSINES) * self.nearby + 2 * self.directions + attacks
        return Description(self.threat, revisions=(PGD.revision, Square.revision), passes=passes)

    @property
    def _attacks(self) -> dict[str, Attack]:
        return {
            "pgd": PGD(steps=self.steps, loss=self.loss),
            "one step": fgsm(loss=self.loss),
            "noise": PGD(steps=0, restarts=self.tries, loss=self.loss),
            "square": Square(queries=self.queries),
            "unbounded": PGD(steps=self.steps, loss=self.loss, random_start=False),
        }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        model, batch = check_batch(model, batch, "sanity")
        symptoms, logits, slope = observe(model, batch, self.forwards)
        right = logits.isfinite().all(1) & ~misclassified(logits, batch.y)
        random, dependent = symptoms["stochastic"], symptoms["batch-dependent"]
        mismatch = self._mismatch(model, batch, slope, seed) | self._unexplained(model, batch, slope, logits, seed)
        symptoms |= {
            "gradient-mismatch": mismatch & right & ~(is_stuck(slope) | random | dependent),
            # On a randomised model an attack succeeds or fails by chance.
            **self._compare_attacks(model, batch, right & ~random, seed),
        }
        return {f"warning.{code}": column for code, column in symptoms.items()}

    def _mismatch(self, model: nn.Module, batch: Batch, slope: Tensor, seed: int) -> Tensor:
        """(B,) bool: the gradient of the margin is not that of its neighbourhood.

        A quarter of a grey level away, noise in the gradient shows; two levels away, a wave laid over the input.
        """
        mismatch = torch.zeros(len(slope), dtype=torch.bool, device=slope.device)
        for levels, least in COSINES.items():
            mean = torch.zeros_like(slope)
            for number in range(self.nearby):
                draw = rng.key("sanity", "nearby", number)
                offset = 2 * rng.uniform(seed, batch.index, draw, batch.x.shape[1:]).to(batch.x) - 1
                x = (batch.x + levels * LEVEL * offset).clamp(0, 1).requires_grad_()
                with torch.enable_grad():
                    mean += input_slope(margin, forward.logits(model, x), batch.y, x) / self.nearby
            mismatch |= F.cosine_similarity(slope.flatten(1), mean.flatten(1)) < least
        return mismatch & (self.nearby > 0)

    def _unexplained(self, model: nn.Module, batch: Batch, slope: Tensor, logits: Tensor, seed: int) -> Tensor:
        """(B,) bool: finite differences of the margin are not what the gradient says.

        Noise in the gradient, a part of it that is missing, or another function's gradient show.
        """
        wrong, size = torch.zeros(2, len(slope), dtype=torch.float64, device=slope.device)
        inside = (batch.x >= STEP) & (batch.x <= 1 - STEP)
        for number in range(self.directions):
            draw = rng.key("sanity", "direction", number)
            signs = (rng.uniform(seed, batch.index, draw, batch.x.shape[1:]).to(batch.x) - 0.5).sign() * inside
            with torch.no_grad():
                ends = [margin(forward.logits(model, batch.x + way * STEP * signs), batch.y) for way in (1, -1)]
            measured, said = (ends[0] - ends[1]).double() / (2 * STEP), (slope * signs).double().flatten(1).sum(1)
            wrong, size = wrong + (measured - said) ** 2, size + measured**2 + said**2
        rounding = 8 * precision(logits) * logits.abs().amax(1).double() / STEP
        found: Tensor = wrong > UNEXPLAINED * size + self.directions * rounding**2
        return found

    def _compare_attacks(self, model: nn.Module, batch: Batch, right: Tensor, seed: int) -> dict[str, Tensor]:
        """On images that PGD does not fool: weaker attacks should not succeed, and PGD without a bound should."""

        def fooled(which: Tensor, attack: Attack, threat: Threat = self.threat, draw: str = "pgd") -> Tensor:
            return fooled_by(attack, model, batch, which, threat, seed=rng.key("sanity", draw, seed))

        attacks = self._attacks
        survivors = right & ~fooled(right, attacks["pgd"])
        one_step = fooled(survivors, attacks["one step"])
        noise = fooled(survivors, attacks["noise"], draw="noise")
        search = fooled(survivors, attacks["square"], draw="square")
        # PGD may also fail for other reasons: too long steps, a bad random start, a loss that rises without a mistake.
        # So a warning needs that many short steps of another loss from the clean image fail too.
        other: LossName = "ce" if self.loss == "margin" else "margin"
        missed = ~fooled(one_step | noise | search, PGD(steps=10 * self.steps, loss=other, random_start=False))
        unbounded = fooled(survivors, attacks["unbounded"], BOX)
        return {
            "one-step-beats-many": one_step & missed,
            "noise-beats-gradient": noise & missed,
            "search-beats-gradient": search & missed,
            "unbounded-survives": survivors & ~unbounded,
        }


class Observed(NamedTuple):
    symptoms: dict[str, Tensor]  # (B,) bool, by code
    logits: Tensor
    slope: Tensor  # gradient of the margin


def observe(model: nn.Module, batch: Batch, forwards: int) -> Observed:
    """Find the symptoms that show without an attack; `forwards` passes on the images must agree."""
    x, inside = batch.x.clone().requires_grad_(), GradientsInside()
    with torch.enable_grad():
        with inside:
            logits = forward.logits(model, x)
        no_ce, slope = is_stuck(input_slope(ce, logits, batch.y, x)), input_slope(margin, logits, batch.y, x)
    no_margin, logits = is_stuck(slope), logits.detach()
    finite = logits.isfinite().all(1)
    right = finite & ~misclassified(logits, batch.y)
    with torch.no_grad():
        random = torch.stack([differs(logits, forward.logits(model, batch.x)) for _ in range(forwards - 1)]).any(0)
    symptoms = {
        "input-range": too_dark(batch.x),
        "nan": ~finite,
        "probabilities": probabilities(logits, torch.finfo(logits.dtype).eps),
        "training-mode": torch.full_like(right, any(module.training for module in model.modules())),
        "stochastic": random,
        "batch-dependent": batch_dependent(model, batch.x, logits) & ~random,
        "dynamic": torch.full_like(right, inside.found),
        "zero-gradient": right & no_margin,
        "saturated-ce": right & no_ce & ~no_margin,
    }
    return Observed(symptoms, logits, slope)


def fooled_by(attack: Attack, model: nn.Module, batch: Batch, which: Tensor, threat: Threat, *, seed: int) -> Tensor:
    """(B,) bool: the examples among `which`, all classified right, that the attack fools inside the threat."""
    result = torch.zeros_like(which)
    if which.any():
        some = batch.select(which)
        x = attack(model, some, threat, seed=seed)
        with torch.no_grad():
            result[which] = is_adversarial(threat, some.x, x, forward.logits(model, x), some.y)
    return result


def input_slope(loss: Loss, logits: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """The gradient of the loss at the images, with NaN and infinities; zero if the model detaches its input."""
    gradient = None
    if logits.requires_grad:
        (gradient,) = torch.autograd.grad(loss(logits, y).sum(), x, retain_graph=True, allow_unused=True)
    return torch.zeros_like(x) if gradient is None else gradient.detach()


def is_stuck(slope: Tensor) -> Tensor:
    """(B,) bool: the gradient is zero or not finite."""
    flat = slope.flatten(1)
    return ~flat.isfinite().all(1) | (flat == 0).all(1)


def differs(logits: Tensor, again: Tensor) -> Tensor:
    """(B,) bool: the logits differ by more than rounding; NaN in both is no difference."""
    length: Tensor = torch.linalg.vector_norm(logits, dim=1)
    return (logits - again).abs().amax(1) > TOLERANCE * length


def precision(logits: Tensor) -> float:
    """The relative precision of the logits: that of bf16 or fp16 if they are such numbers, whatever their type."""
    kinds = (torch.bfloat16, torch.float16)
    coarse = [torch.finfo(kind).eps for kind in kinds if torch.equal(logits.to(kind).to(logits.dtype), logits)]
    return max([torch.finfo(logits.dtype).eps, *coarse])


def batch_dependent(model: nn.Module, x: Tensor, logits: Tensor) -> Tensor:
    """(B,) bool: the logits change if other images, here the negatives of the batch, are in the batch."""
    with torch.no_grad():
        among_others = forward.logits(model, torch.cat([1 - x, x]))[len(x) :]
    return differs(logits, among_others)


def probabilities(logits: Tensor, grain: float) -> Tensor:
    """(B,) bool: the logits are in [0, 1] and sum to 1, up to rounding."""
    slack = max(1e-5, grain)
    unit = (logits > -slack) & (logits < 1 + slack)
    return unit.all(1) & ((logits.sum(1) - 1).abs() < slack)


def too_dark(x: Tensor) -> Tensor:
    """(B,) bool: the image is not black, but no pixel is above 1.5/255."""
    brightest = x.flatten(1).amax(1)
    return (brightest > 0) & (brightest <= 1.5 / 255)

"""Images synthesised for a target class, from noise or from other images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bastion import forward, rng
from bastion.attacks.losses import ce
from bastion.attacks.pgd import ascend
from bastion.forward import check_batch, frozen
from bastion.probes import probes
from bastion.probes.other_models import identity, logits_of_others
from bastion.settings import Count, NotNegative, Positive, settings
from bastion.threat import Threat, at_size
from bastion.types import Batch, Description, Fact, Probe, hard


@probes.register("synthesis")
@settings
class Synthesis(Probe):
    """Images synthesised by raising a class's probability (Sec. 4.3.2 of Debenedetti 2022, Figs. 12 and 14).

    PGD in an ℓ2 ball, without a random start, minimises the cross-entropy of a class drawn by seed and index; the last
    iterate counts. Starting from an image, the class differs from its label.
    """

    start: Literal["noise", "image"] = "noise"  # noise is uniform in [0, 1]
    steps: Count = 100
    eps: NotNegative | None = None  # None: 15 at 224×224, in proportion to √pixels at other sizes: 2.14 at 32×32
    rel_step: Positive | None = None  # length of a step in units of eps; None: 2.5 / steps
    classifiers: tuple[str, ...] = ()  # other models that classify the result
    identities: tuple[str, ...] = field(init=False, default=())  # of the classifiers, which facts depend on

    revision: ClassVar[int] = 2
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "target": "the target class",
        "success": "the model predicts the target",
        "confidence": Fact("softmax probability of the target", "share"),
        "recognised": "predicted as the target, by each of the classifiers",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "identities", tuple(map(identity, self.classifiers)))

    def describe(self) -> Description:
        return Description(passes=self.steps + 2)

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        given, batch = check_batch(model, batch, "probe synthesis")
        with torch.no_grad():
            classes = forward.logits(given, batch.x, batch.y).shape[1]
        target, x0 = self._target(batch, classes, seed), batch.x
        if self.start == "noise":
            x0 = rng.uniform(seed, batch.index, "synthesis noise", x0.shape[1:], dtype=x0.dtype)
        towards = Batch(batch.index, x0, target)
        x = self.synthesise(given, towards)
        with torch.no_grad():
            logits = forward.logits(given, x)
        facts = {
            "target": target,
            "success": logits.argmax(1) == target,
            "confidence": logits.softmax(1).gather(1, target[:, None])[:, 0].float(),
            "start": x0,
            "synthesised": x,
        }
        return facts | self._recognised(model, towards.at(x), classes)

    def synthesise(self, model: nn.Module, batch: Batch) -> Tensor:
        """Images made from batch.x for the classes batch.y."""
        eps = at_size(15, batch.x) if self.eps is None else self.eps
        size = eps * (2.5 / max(self.steps, 1) if self.rel_step is None else self.rel_step)
        with frozen(model):
            return ascend(
                model,
                batch,
                Threat("l2", eps),
                lambda logits, target: -ce(logits, target),
                batch.x,
                steps=self.steps,
                size=size,
            )

    def _target(self, batch: Batch, classes: int, seed: int) -> Tensor:
        if self.start == "noise":
            return rng.integers(seed, batch.index, "synthesis target", high=classes)
        other = rng.integers(seed, batch.index, "synthesis target", high=classes - 1)
        return other + (other >= hard(batch.y))  # the label is left out

    def _recognised(self, model: nn.Module, batch: Batch, classes: int) -> dict[str, Tensor]:
        where = "probe synthesis, classifier"
        others = logits_of_others(self.classifiers, self.identities, model, batch, classes, where)
        return {"recognised": torch.stack([each.argmax(1) == batch.y for each in others], 1)} if others else {}

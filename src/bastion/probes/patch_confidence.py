"""Confidence in the true class when some patches are attacked, noisy or occluded (Guo et al. 2023, Fig. 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor, nn

from bastion import journal, rng
from bastion.attacks import Threat
from bastion.attacks.patch import PatchGaussian, PatchOcclusion, PatchPGD
from bastion.forward import check_batch, precise, predict
from bastion.probes import probes
from bastion.probes.occluded import FREE, MaskedProbe, true_class
from bastion.settings import Count, Positive, settings
from bastion.types import Batch, Description, Fact, hard


@probes.register("patch-confidence")
@settings
class PatchConfidence(MaskedProbe):
    """Probability of the true class: clean, and with the same patches attacked by PGD, made noisy, or occluded.

    The last iterate of PGD counts, not the best. The radius is that of the paper's PGD-5 on whole images; for patches
    the paper gives none, but calls the perturbations invisible.
    """

    eps: Positive = 8 / 255  # linf, of PGD
    steps: Count = 5
    rel_step: Positive = 0.25  # length of a step in units of eps
    sigma: Positive = 0.38  # of the Gaussian noise: the strongest of ImageNet-C

    name = "patch-confidence"
    facts: ClassVar[Mapping[str, str | Fact]] = {
        "clean_confidence": Fact("probability of the true class on the clean image", "share"),
        "adversarial_confidence": Fact("the same with the patches attacked by PGD", "share"),
        "noisy_confidence": Fact("the same with Gaussian noise on the patches", "share"),
        "occluded_confidence": Fact("the same with the patches replaced by uniform noise", "share"),
        **journal.PASSES,
    }

    def describe(self) -> Description:
        revisions = PatchPGD.revision, PatchGaussian.revision, PatchOcclusion.revision
        return Description(revisions=revisions, passes=self.steps + 4)

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        given, batch = check_batch(model, batch, "probe patch-confidence")
        batch, grid = self.at_mask_size(given, batch._replace(y=hard(batch.y)))
        (mask,) = self.masks_of(batch, grid, [0], seed=seed)
        pgd = PatchPGD(steps=self.steps, rel_step=self.rel_step)
        noise, occlusion = PatchGaussian(sigma=self.sigma), PatchOcclusion()
        threat = Threat("linf", self.eps)
        with journal.opened() as notes:
            images = {
                "clean": batch.x,
                "adversarial": pgd.search(given, batch, threat, mask, seed=seed, draw=rng.key("patch-pgd", 0)),
                "noisy": noise.filled(batch, mask, FREE, seed=seed, draw=rng.key(noise.name, 0)),
                "occluded": occlusion.filled(batch, mask, FREE, seed=seed, draw=rng.key(occlusion.name, 0)),
            }
            confidence = {
                f"{name}_confidence": true_class(precise(predict(given, batch.at(x)), x), batch.y).float()
                for name, x in images.items()
            }
        return {**confidence, **notes.passes(batch.index), **images}

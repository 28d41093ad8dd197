"""Input gradients: their alignment with the image, and their energy by frequency."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from bastion.attacks.losses import ce
from bastion.forward import check_batch, frozen, loss_and_grad
from bastion.probes import probes
from bastion.probes.spectrum import energy_shares
from bastion.settings import AtLeastOne, settings
from bastion.types import Batch, Probe


@probes.register("input-gradient")
@settings
class InputGradient(Probe):
    """Alignment of the gradient g with the image x, |⟨x, g⟩| / ‖g‖ (Etmann et al. 2019), and g by frequency.

    They use the gradient of the predicted class's logit, the saliency map; `of: loss` uses that of the cross-entropy.
    Pixels are in [0, 1], so the mean of an image dominates; `correlation` removes the means. NaN if g is zero.
    """

    of: Literal["logit", "loss"] = "logit"
    bins: AtLeastOne = 16  # rings of frequencies

    facts: ClassVar[Mapping[str, str]] = {
        "alignment": "|⟨x, g⟩| / ‖g‖, in pixel units",
        "cosine": "|cos| of the angle between x and g: the alignment over ‖x‖",
        "correlation": "the same of x and g less their means in each channel",
        "norm": "ℓ2 norm of g",
        "energy": "shares of the energy of g in rings of frequencies, from 0 to √½ cycles per pixel",
    }

    def __call__(self, model: nn.Module, batch: Batch, *, seed: int) -> dict[str, Tensor]:
        given, batch = check_batch(model, batch, "probe input-gradient")
        loss = ce if self.of == "loss" else _largest_logit
        with frozen(given):
            _, _, gradient = loss_and_grad(given, batch, loss)
        x, g = batch.x.double(), gradient.double()
        centred = [each - each.mean((2, 3), keepdim=True) for each in (x, g)]
        return {
            "alignment": (_dot(x, g).abs() / _norm(g)).float(),
            "cosine": (_dot(x, g).abs() / (_norm(x) * _norm(g))).float(),
            "correlation": (_dot(*centred).abs() / (_norm(centred[0]) * _norm(centred[1]))).float(),
            "norm": _norm(g).float(),
            "energy": energy_shares(g, self.bins).float(),
            "clean": batch.x,
            "gradient": gradient,
        }


def _largest_logit(logits: Tensor, y: Tensor) -> Tensor:
    return logits.amax(1)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    return (one * other).sum((1, 2, 3))


def _norm(x: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(x, dim=(1, 2, 3))
    return norms

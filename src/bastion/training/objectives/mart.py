"""MART (Wang et al. 2020): misclassification-aware adversarial training."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bastion.attacks.losses import divergence
from bastion.settings import NotNegative, settings
from bastion.training.objectives import objectives
from bastion.training.objectives.attacked import Attacked
from bastion.types import Losses, Prepared, hard


@objectives.register("mart")
@settings(frozen=False, eq=False)
class Mart(Attacked):
    """BCE(x') + λ · KL(p(x) ‖ p(x')) · (1 - p_y(x)), where BCE(x') = CE(x') - log(1 - max over k≠y of p_k(x')).

    With soft labels, p_y is the mean of p under them, and y in the maximum is their likeliest class.
    """

    beta: NotNegative = 5.0  # the paper's λ

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        clean, attacked, y = model(prepared.clean.x), model(prepared.x), prepared.clean.y
        boosted = F.cross_entropy(attacked, y, label_smoothing=self.label_smoothing) + _likeliest_mistake(attacked, y)
        apart = (divergence(clean.log_softmax(1), attacked) * (1 - _confidence(clean, y))).mean()
        return Losses(boosted + self.beta * apart, attacked, {"boosted": boosted, "divergence": apart}, clean)


def _likeliest_mistake(logits: Tensor, y: Tensor) -> Tensor:
    """-log(1 - max over k≠y of p_k), as logsumexp over all classes minus logsumexp without the likeliest wrong one."""
    right = F.one_hot(hard(y), logits.shape[1]).bool()
    mistake = logits.masked_fill(right, -torch.inf).argmax(1, keepdim=True)
    others = logits.scatter(1, mistake, -torch.inf)
    return (logits.logsumexp(1) - others.logsumexp(1)).mean()


def _confidence(logits: Tensor, y: Tensor) -> Tensor:
    """(B,): the probability of the label."""
    probabilities = logits.softmax(1)
    return probabilities.gather(1, y[:, None])[:, 0] if y.ndim == 1 else (probabilities * y).sum(1)

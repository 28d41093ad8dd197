"""One function decides what is adversarial, one whether the margin is more than rounding."""

from __future__ import annotations

import torch

from bastion import Threat
from bastion.attacks.judge import is_adversarial, lead, margin_is_significant


def test_adversarial_is_what_is_misclassified_inside_the_set() -> None:
    x0 = torch.full((6, 1, 1, 1), 0.05)
    x = torch.tensor([0.15, 0.15, 0.2, -0.01, torch.nan, 0.05]).view(-1, 1, 1, 1)
    logits = torch.tensor([[1.0, 0.0], *[[0.0, 1.0]] * 5])
    y = torch.zeros(6, dtype=torch.int64)
    expected = [False, True, False, False, False, True]
    assert is_adversarial(Threat("linf", 0.1), x0, x, logits, y).tolist() == expected
    assert not is_adversarial(Threat("linf", 0.1), x0, x, 1 - logits, y)[1:].any()


def test_a_model_that_answers_nan_is_fooled_by_any_measure() -> None:
    logits, y = torch.tensor([[torch.nan, 1.0], [2.0, 0.0], [0.0, 2.0]]), torch.zeros(3, dtype=torch.int64)
    assert lead(logits, y).tolist() == [torch.inf, -2.0, 2.0]
    assert margin_is_significant(logits, y, 0.5).tolist() == [True, False, True]


def test_a_margin_counts_beside_the_largest_logit_that_is_not_masked() -> None:
    logits = torch.tensor([[100.0, 100.5, 0.0], [100.0, 100.5, -1e9], [100.0, 102.0, 0.0]])
    y = torch.zeros(3, dtype=torch.int64)
    assert margin_is_significant(logits, y, 0.01).tolist() == [False, False, True]

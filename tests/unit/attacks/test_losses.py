"""Losses have the values of their formulas."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.attacks.losses import LOSSES, ce, dlr, margin
from bastion.forward import misclassified

LOGITS = torch.tensor([[4.0, 1.0, 3.0, 0.0], [4.0, 1.0, 3.0, 0.0], [-1.0, -2.0, -3.0, -4.0]])
Y = torch.tensor([0, 2, 0])


def test_cross_entropy_is_minus_log_softmax() -> None:
    assert torch.allclose(ce(LOGITS, Y), -LOGITS.log_softmax(1)[torch.arange(3), Y])


def test_cross_entropy_takes_soft_labels() -> None:
    soft = torch.tensor([[0.5, 0.5, 0, 0], [0, 0, 1.0, 0], [1.0, 0, 0, 0]])
    assert torch.allclose(ce(LOGITS, soft), -(soft * LOGITS.log_softmax(1)).sum(1))


def test_margin_is_positive_exactly_when_fooled() -> None:
    assert margin(LOGITS, Y).tolist() == [-1.0, 1.0, -1.0]  # negative logits too: no one-hot product


def test_dlr_is_the_margin_over_the_gap_of_first_and_third() -> None:
    assert torch.allclose(dlr(LOGITS, Y), torch.tensor([-1 / 3, 1 / 3, -1 / 2]))


def test_dlr_ignores_scale_and_shift_where_cross_entropy_loses_its_gradient() -> None:
    x = LOGITS.double().requires_grad_()
    (plain,) = torch.autograd.grad(dlr(x, Y).sum(), x)
    (scaled,) = torch.autograd.grad(dlr(1000 * x + 7, Y).sum(), x)
    assert torch.allclose(dlr(1000 * x + 7, Y), dlr(x, Y))
    assert torch.allclose(plain, scaled)
    (lost,) = torch.autograd.grad(ce(1000 * x, Y)[0], x)
    assert lost.abs().max() == 0


def test_dlr_refuses_two_classes() -> None:
    with pytest.raises(BastionError, match="needs at least 3 classes, the model has 2; use 'margin'"):
        dlr(LOGITS[:, :2], Y[:1])


@pytest.mark.parametrize("name", LOSSES)
def test_one_value_per_example(name: str) -> None:
    assert LOSSES[name](LOGITS, Y).shape == (3,)


def test_a_nan_answer_is_not_the_right_class() -> None:
    logits = torch.tensor([[2.0, 1.0], [float("nan"), 1.0], [1.0, 2.0]])
    assert misclassified(logits, torch.tensor([0, 0, 0])).tolist() == [False, True, True]
    assert misclassified(logits, torch.eye(2)[[0, 0, 0]]).tolist() == [False, True, True]

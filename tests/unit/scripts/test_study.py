"""Intervals and verdicts of the studies in `scripts/`."""

from __future__ import annotations

import math

import pytest
from scripts.study import FAILED, HELD, OPEN, both, minus, students_t, table, transformed, verdict, within

from bastion.measuring.intervals import Estimate


def test_three_numbers_have_the_interval_of_students_t() -> None:
    found = students_t([1.0, 2.0, 3.0])
    assert found.value == 2
    assert found.high - found.value == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)  # of two degrees of freedom
    assert students_t([1.0]).high == math.inf


@pytest.mark.parametrize(("low", "high", "said"), [(0.1, 0.3, HELD), (-0.3, -0.1, FAILED), (-0.1, 0.1, OPEN)])
def test_a_claim_holds_if_the_whole_interval_is_on_its_side(low: float, high: float, said: str) -> None:
    found = Estimate((low + high) / 2, low, high, 10)
    assert verdict(found) == said
    assert verdict(minus(minus(found))) == said
    assert verdict(Estimate(found.value + 1, low + 1, high + 1, 10), least=1) == said


@pytest.mark.parametrize(("low", "high", "said"), [(0.0, 0.05, HELD), (0.2, 0.3, FAILED), (0.05, 0.3, OPEN)])
def test_a_claim_of_equality_holds_if_the_whole_interval_is_near(low: float, high: float, said: str) -> None:
    assert within(Estimate((low + high) / 2, low, high, 10), -0.1, 0.1) == said


def test_a_claim_in_several_parts_is_no_better_than_the_worst() -> None:
    assert both(HELD, HELD) == HELD
    assert both(HELD, OPEN) == OPEN
    assert both(OPEN, HELD, FAILED) == FAILED


def test_a_falling_function_turns_an_interval_round() -> None:
    assert transformed(Estimate(2, 1, 4, 5), lambda value: 1 / value) == (0.5, 0.25, 1, 5)


def test_a_table_is_markdown() -> None:
    assert table(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"

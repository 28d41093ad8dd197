"""The share of a measurement that is done, and the time that is left."""

from __future__ import annotations

import math

import pytest

from bastion.measuring.pace import Doing, Pace


def test_the_time_that_is_left_is_told_by_the_cost_of_each_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers; a clean example costs 1 s, an attacked one 99 s; half of the clean ones are stored."""
    now = [0.0]
    monkeypatch.setattr("bastion.measuring.pace.time.monotonic", lambda: now[0])
    pace = Pace({0: 200, 1: 200}, {0: 100, 1: 200})
    assert pace.done() == 0.25  # nothing is known of what they cost
    assert pace.seconds_left() == math.inf
    pace.add(0, 50, 50.0)
    now[0] = 50.0
    assert pace.seconds_left() == 50 + 200  # as if both cost the same
    pace.add(1, 50, 4950.0)
    now[0] = 2500.0
    assert pace.done() == pytest.approx((150 + 99 * 50) / (200 + 99 * 200))
    assert pace.seconds_left() == pytest.approx((50 + 99 * 150) / 2)
    pace.add(1, 150, None)  # another job's
    pace.add(0, 50, 50.0)
    assert (pace.done(), pace.seconds_left()) == (1, 0)


def test_the_eta_moves_within_a_batch_and_knows_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("bastion.measuring.pace.time.monotonic", lambda: now[0])
    pace = Pace({0: 100, 1: 100}, {0: 100, 1: 100}, {1: 50})
    pace.moved(Doing(worker=0, case=0, examples=10, of=40, survivors=9, seconds=2.0))
    now[0] = 2.0
    assert pace.done() == pytest.approx(10 / (100 + 50 * 100))
    assert pace.seconds_left() == pytest.approx(0.2 * 90 + 50 * 0.2 * 100)
    pace.add(0, 100, 20.0)
    now[0] = 20.0
    for share in (0.25, 0.5):  # of the attack on a batch of 40
        pace.moved(Doing(0, 1, share * 40, 40, 30, share * 100.0))
        assert pace.seconds_left() == pytest.approx((100 - share * 40) * 2.5 * now[0] / (20 + share * 100))

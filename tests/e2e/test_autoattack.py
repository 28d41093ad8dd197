"""AutoAttack beside its reference, on models of the zoo. The whole comparison is `python -m benchmarks.autoattack`."""

from __future__ import annotations

import pytest
from benchmarks.autoattack import COMPONENTS, THREATS, by_bastion, by_reference, without_checks

from bastion.data import datasets
from bastion.models.load import load

N = 24


@pytest.mark.slow
@pytest.mark.parametrize("norm", list(THREATS))
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_component_is_as_strong_as_the_reference(component: str, norm: str) -> None:
    """Of 24 images at most one verdict differs, and the union with it is at most one image weaker."""
    without_checks()
    model = load("zoo/cifar10-linf-vit")
    batch = datasets.build("cifar10-mini").test.batch(range(N))
    ours, theirs = (side(model, batch, THREATS[norm], component) for side in (by_bastion, by_reference))
    assert sum(ours.robust) <= sum(theirs.robust) + 1
    assert sum(a != b for a, b in zip(ours.robust, theirs.robust, strict=True)) <= 1

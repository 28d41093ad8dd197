"""Networks so narrow that they are trained in a second, and real images for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bastion.data import datasets
from bastion.deepaugment import fit
from bastion.deepaugment.networks import CAE, EDSR, NETWORKS, Network
from bastion.types import DataSet

STEPS = 200


@pytest.fixture(scope="session")
def mini() -> DataSet:
    return datasets.build("cifar10-mini")


@pytest.fixture(scope="session", autouse=True)
def _narrow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kind in (EDSR, CAE):
            patch.setattr(kind, "width", 8)
            patch.setattr(kind, "blocks", 1)
        patch.setattr(fit, "RATE", 1e-2)
        yield


@pytest.fixture(scope="session")
def trained(mini: DataSet, _narrow: None) -> dict[str, Network]:
    torch.set_num_threads(1)
    return {name: fit.train(name, mini, seed=0, steps=STEPS) for name in NETWORKS}

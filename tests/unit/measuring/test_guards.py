"""What people get wrong most often is told, and what is right is not doubted."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import bastion
from bastion.attacks import PGD, Ensemble
from bastion.measuring.guards import warn_if_normalised_input_is_expected
from bastion.measuring.sanity import accuracy_warnings
from bastion.types import Attack, Batch


class Brightness(nn.Module):
    """Is a picture brighter than the mean? Of pixels from 0 to 1, or of normalised ones."""

    def __init__(self, threshold: float) -> None:
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        brightness = x.mean((1, 2, 3)) - self.threshold
        return torch.stack([-brightness, brightness], 1)


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    y = torch.arange(16) % 2
    return 0.3 + 0.3 * y.view(-1, 1, 1, 1).expand(16, 3, 8, 8).clone(), y


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_network_that_expects_normalised_images_is_told(images: tuple[Tensor, Tensor], wrapped: bool) -> None:
    """Also one in a Classifier that does not normalise, as `path.py:function` makes of a network."""
    batch, network = Batch(torch.arange(16), *images), Brightness(0.0)
    given = bastion.wrap(network, normalize="none", shape=(3, 8, 8)) if wrapped else network
    with pytest.warns(UserWarning, match="gets 8 right, and 16 if they are normalised.*normalize=.cifar10."):
        warn_if_normalised_input_is_expected(given, batch)
    with pytest.warns(UserWarning, match="gets 8 right, and 16 if they are normalised"):
        bastion.attack(given, *images, "fgsm", eps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_normalised_input_is_expected(Brightness(0.45), batch)
        warn_if_normalised_input_is_expected(bastion.wrap(network, normalize="cifar10", shape=(3, 8, 8)), batch)


@pytest.mark.parametrize(
    ("right", "labels", "code"),
    [(2, 10, "at-chance"), (3, 10, None), (20, 1, "one-class"), (0, 1, "one-class")],
)
def test_accuracies_that_say_nothing_are_doubted(right: int, labels: int, code: str | None) -> None:
    """Of 20 examples in ten classes two are right by chance."""
    found = accuracy_warnings("clean", np.arange(20) < right, np.arange(20) % labels, 10)
    assert [each.code for each in found] == ([code] if code else [])


def test_a_network_typed_into_a_notebook_is_refused_by_workers_in_a_line(
    images: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    typed = type("Typed", (Brightness,), {"__module__": "__main__"})
    monkeypatch.setattr(sys.modules["__main__"], "Typed", typed, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    suite = {"probes": {"clean": "accuracy"}}
    with pytest.raises(bastion.BastionError, match="Typed is defined in a notebook .* or use workers=1"):
        bastion.measure(typed(0.45), images, suite, workers=2, batch_size=4, folder=tmp_path / "run")


@pytest.mark.parametrize("kind", ["attack", "member", "function"])
def test_an_attack_or_function_typed_into_a_notebook_is_refused_by_workers_in_a_line(
    kind: str, images: tuple[Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def typed(x: Tensor) -> Tensor:
        return Brightness(0.45)(x)

    typed.__module__, typed.__qualname__ = "__main__", "typed"
    own = type("Typed", (Attack,), {"__module__": "__main__", "__call__": lambda self, model, batch, threat, seed: 0})
    monkeypatch.setattr(sys.modules["__main__"], "Typed", own, raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "typed", typed, raising=False)
    monkeypatch.delattr(sys.modules["__main__"], "__file__", raising=False)
    attack = {"attack": own(), "member": Ensemble(members=(PGD(), own())), "function": PGD()}[kind]
    model = typed if kind == "function" else Brightness(0.45)
    with pytest.raises(bastion.BastionError, match="(?i)measure: typed is defined in a notebook .* or use workers=1"):
        bastion.evaluate(model, images, attack, workers=2, batch_size=4)

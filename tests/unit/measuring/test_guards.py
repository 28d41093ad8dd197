"""What people get wrong most often is told, and what is right is not doubted."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import numpy as np
import pytest
import timm
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


class Scripted(nn.Module):
    """Of 32 images with labels 0, 1, 0, 1, … the first ones are right if they are normalised, the last ones if not."""

    def __init__(self, gained: int, lost: int) -> None:
        super().__init__()
        self.gained, self.lost = gained, lost

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(len(x))
        right = place < self.gained if x.min() < 0 else place >= len(x) - self.lost
        return torch.eye(2)[(place + ~right) % 2]


@pytest.fixture
def images() -> tuple[Tensor, Tensor]:
    y = torch.arange(32) % 2
    return 0.3 + 0.3 * y.view(-1, 1, 1, 1).expand(32, 3, 8, 8).clone(), y


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_network_that_expects_normalised_images_is_told(images: tuple[Tensor, Tensor], wrapped: bool) -> None:
    """Also one in a Classifier that does not normalise, as `path.py:function` makes of a network."""
    batch, network = Batch(torch.arange(32), *images), Brightness(0.0)
    given = bastion.wrap(network, normalize="none", shape=(3, 8, 8)) if wrapped else network
    with pytest.warns(UserWarning, match="gets 16 right, and 32 if they are normalised.*normalize=.cifar10."):
        warn_if_normalised_input_is_expected(given, batch)
    with pytest.warns(match="at-chance"), pytest.warns(match="gets 16 right, and 32 if they are normalised"):
        bastion.attack(given, *images, "fgsm", eps=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_if_normalised_input_is_expected(Brightness(0.45), batch)
        warn_if_normalised_input_is_expected(bastion.wrap(network, normalize="cifar10", shape=(3, 8, 8)), batch)


@pytest.mark.parametrize(
    ("gained", "lost", "n", "told"), [(16, 1, 32, 1), (13, 3, 32, 0), (13, 3, 64, 1), (9, 9, 64, 0)]
)
def test_normalised_images_may_be_expected_although_some_are_lost(gained: int, lost: int, n: int, told: int) -> None:
    """McNemar's exact test decides: p = 0.02 for 13 to 3, which more images make sure."""
    batch = Batch(torch.arange(n), torch.full((n, 3, 8, 8), 0.3), torch.arange(n) % 2)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_if_normalised_input_is_expected(Scripted(gained, lost), batch)
    assert len(found) == told


@pytest.mark.parametrize("classes", [1000, 10])
def test_a_network_of_timm_that_is_not_wrapped_is_told(classes: int) -> None:
    """If its classes are timm's: one with other classes may have been trained on any images."""
    network = timm.create_model("resnet10t", num_classes=classes)
    images = Batch(torch.arange(4), torch.rand(4, 3, 64, 64), torch.arange(4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        warn_if_normalised_input_is_expected(network, images)
        warn_if_normalised_input_is_expected(bastion.wrap(network, normalize="imagenet"), images)
    expected = "timm's ResNet expects normalised images. Use bastion.wrap(network, normalize='imagenet')"
    assert [str(each.message).partition(", which")[0] for each in told] == [expected] * (classes == 1000)


@pytest.mark.parametrize(
    ("right", "labels", "code"),
    [(2, 10, "at-chance"), (4, 10, "at-chance"), (6, 10, None), (20, 1, "one-class"), (0, 1, "one-class")],
)
def test_accuracies_that_say_nothing_are_doubted(right: int, labels: int, code: str | None) -> None:
    """Of 20 examples in ten classes two are right by chance, and four may be: 1/10 is in the interval."""
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

"""Passes per image, counted, against what one derives by hand; images and operations; a rate that is the real one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import QUICK
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bastion.costs import (
    Passes,
    counted,
    dummy_model,
    images_per_second,
    plan_run,
    step_passes,
    training_passes,
    validation_passes,
)
from bastion.data.known import outline
from bastion.models import checkpoint, complexity
from bastion.recipe import Recipe, load_recipe
from bastion.training.objectives import objectives
from bastion.training.objectives.standard import Standard
from bastion.training.trainer import Trainer
from bastion.types import Batch, DataSet, Losses, Prepared

THREAT = {"norm": "linf", "eps": 8 / 255}
CIFAR10 = outline({"name": "cifar10"})


def _recipe(objective: dict[str, Any], **more: Any) -> Recipe:
    return Recipe.model_validate({"data": "cifar10", "model": "vit/micro", "objective": objective, **more})


def _passes(objective: dict[str, Any], data: DataSet = CIFAR10) -> tuple[Passes, Passes]:
    return step_passes(_recipe(objective), data)


def _attacked(objective: str, **attack: Any) -> dict[str, Any]:
    return {"name": objective, "threat": THREAT, "attack": attack}


# attack -> forward and backward passes of one image that it does not fool
ATTACKS: list[tuple[dict[str, Any], tuple[int, int]]] = [
    ({"name": "pgd", "steps": 10, "keep": "last"}, (10, 10)),
    ({"name": "pgd", "steps": 10, "keep": "best"}, (12, 10)),  # the image itself before, the last point after
    ({"name": "pgd", "steps": 3, "keep": "best", "random_start": False}, (4, 3)),  # the image is the first point
    ({"name": "pgd", "steps": 3, "restarts": 2}, (1 + 2 * 4, 2 * 3)),
    ({"name": "pgd", "steps": 3, "targets": 2}, (1 + 2 * 4, 2 * 3)),  # the image itself also chooses the targets
    ({"name": "pgd", "steps": 3, "keep": "last", "loss": "kl"}, (1 + 3, 3)),  # the answer on the clean image
    ({"name": "fgsm", "keep": "last"}, (1, 1)),
    ({"name": "fgsm"}, (2, 1)),
    ({"name": "fgsm-rs", "keep": "last"}, (1, 1)),
    ({"name": "fgsm-rs"}, (3, 1)),
    ({"name": "mi-fgsm", "steps": 4}, (5, 4)),
    ({"name": "apgd-train", "steps": 2}, (3, 2)),
    ({"name": "apgd-train", "steps": 3}, (4, 3)),
    ({"name": "apgd-ce", "steps": 5}, (1 + 6, 5)),  # is it fooled already? and all steps, as it never is
    ({"name": "apgd", "steps": 5, "eot": 3, "keep": "best"}, (3 * 6, 3 * 5)),
    ({"name": "square", "queries": 7}, (1 + 1 + 7, 0)),
]


@pytest.mark.parametrize(("attack", "expected"), ATTACKS, ids=[str(attack) for attack, _ in ATTACKS])
def test_attacks_take_what_they_say(attack: dict[str, Any], expected: tuple[int, int]) -> None:
    prepare, loss = _passes(_attacked("adversarial", **attack))
    assert prepare == Passes(*expected, 0)
    assert loss == Passes(1, 1, 1)


@pytest.mark.parametrize(
    ("spec", "prepare", "loss"),
    [
        ({"name": "standard"}, Passes(), Passes(1, 1, 1)),
        (_attacked("adversarial", name="pgd", steps=7, keep="last"), Passes(7, 7), Passes(1, 1, 1)),
        (_attacked("trades", name="pgd", steps=10, loss="kl", keep="last"), Passes(11, 10), Passes(2, 2, 2)),
        (_attacked("mart", name="pgd", steps=10, keep="last"), Passes(10, 10), Passes(2, 2, 2)),
        (_attacked("alp", name="pgd", steps=10, keep="last"), Passes(10, 10), Passes(2, 2, 2)),
        (_attacked("alp", name="apgd-train", steps=2), Passes(3, 2), Passes(2, 2, 2)),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_objectives_take_what_their_formulas_say(spec: dict[str, Any], prepare: Passes, loss: Passes) -> None:
    assert _passes(spec) == (prepare, loss)


@pytest.mark.parametrize("attack_mode", ["eval", "train"])
@pytest.mark.parametrize(("shape", "classes"), [((3, 224, 224), 1000), ((1, 28, 28), 10), ((3, 20, 31), 2)])
def test_the_images_may_have_any_shape(shape: tuple[int, int, int], classes: int, attack_mode: str) -> None:
    spec = _attacked("adversarial", name="pgd", steps=2, keep="last") | {"attack_mode": attack_mode}
    data = dataclasses.replace(CIFAR10, shape=shape, classes=tuple(map(str, range(classes))))
    assert _passes(spec, data) == (Passes(2, 2), Passes(1, 1, 1))


def test_units_are_forward_passes() -> None:
    assert Passes(1, 0, 0).units == 1
    assert Passes(1, 1, 0).units == 2  # input gradient
    assert Passes(1, 1, 1).units == 3  # training
    prepare, loss = _passes(_attacked("adversarial", name="pgd", steps=10, keep="last"))
    assert prepare.plus(loss).units == 2 * 10 + 3
    assert prepare.plus(loss, times=1.5) == Passes(11.5, 11.5, 1.5)


@dataclass(kw_only=True)
class Halves(Standard):
    """Asks about half of the images twice, without freezing anything, and takes an input gradient by hand."""

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Prepared:
        half = batch.x[: len(batch.x) // 2].clone().requires_grad_()
        torch.autograd.grad(model(half).sum(), half)
        with torch.no_grad():
            model(half)
        return Prepared(batch, batch.x, {})

    def loss(self, model: nn.Module, prepared: Prepared) -> Losses:
        features: list[Tensor] = []
        handle = model.network.blocks[0].register_forward_hook(lambda *given: features.append(given[2]))  # type: ignore
        with torch.no_grad():
            model(prepared.x)
        logits = model(prepared.x)
        handle.remove()
        return Losses(features[1].square().mean(), logits, {})  # the logits are not part of it


def test_a_plug_in_is_counted_by_what_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Part of a batch counts for its part; a gradient for the input alone is told from one for the weights even where
    these are not frozen; a loss need not come from the logits."""
    monkeypatch.setitem(objectives._factories, "halves", Halves)
    assert _passes({"name": "halves"}) == (Passes(1, 0.5, 0), Passes(2, 1, 1))


def test_counting_ends_with_its_context() -> None:
    model, batch = dummy_model(CIFAR10)
    with counted(model) as passes:
        model(batch.x)
    model(batch.x)
    assert passes == Passes(1, 0, 0)


def test_sam_and_awp_take_the_loss_twice_once_they_have_begun() -> None:
    spec, schedule = _attacked("adversarial", name="pgd", steps=2, keep="last"), {"epochs": 20}
    assert training_passes(_recipe(spec)) == Passes(3, 3, 1)
    for name in ("sam", "awp"):
        counts = [
            training_passes(
                _recipe(spec, optimizer={"perturb": {"name": name, "size": 0.1, "after": after}}, schedule=schedule)
            ).weights
            for after in (0, 5, 30)
        ]
        assert counts == [2, 1.75, 1]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (None, Passes(1)),
        ({"name": "pgd", "steps": 5}, Passes(2 + 6, 5)),
        ({"name": "apgd-ce", "steps": 5}, Passes(2 + 6, 5)),
    ],
)
def test_validation_looks_at_the_image_attacks_it_and_judges(attack: dict[str, Any] | None, expected: Passes) -> None:
    spec = _attacked("adversarial", name="pgd", steps=2, keep="last")
    assert validation_passes(_recipe(spec, validate={"attack": attack})) == expected


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "standard"},
        _attacked("adversarial", name="pgd", steps=3, keep="last"),
        _attacked("mart", name="fgsm-rs"),
    ],
    ids=lambda spec: spec["name"],
)
def test_the_convention_agrees_with_torchs_count_of_a_real_step(spec: dict[str, Any]) -> None:
    """Nearly: the first layer needs no gradient of its input, and products of activations have two gradients."""
    model = checkpoint.build(
        {"name": "vit/micro", "patch_size": 8, "depth": 4}, mean=(0.5,) * 3, std=(0.25,) * 3
    ).train()
    objective, index = objectives.build(spec), torch.arange(2)
    batch = Batch(index, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)), index)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        objective.loss(model, objective.prepare(model, batch, progress=1.0, seed=0)).total.backward()  # type: ignore
    prepare, loss = _passes(spec)
    expected = len(batch.x) * 2 * complexity.macs(model) * prepare.plus(loss).units
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)


def test_images_and_operations_are_those_of_the_whole_run() -> None:
    """One attack step and a training pass are five units; validation without an attack is one."""
    spec = _attacked("adversarial", name="fgsm-rs", keep="last")
    plan = plan_run(_recipe(spec, schedule={"epochs": 3}, batch=100, validate={"limit": 50, "every": 2}))
    images = 49_000 * 3
    assert (plan.images, plan.validated) == (images, 100)
    assert plan.flops == pytest.approx(2 * plan.macs * (5 * images + 100))
    assert plan.hours(10.0) == pytest.approx((images + 100 / 5) / 10 / 3600)


def test_limits_extra_images_and_copies_are_counted_as_training_draws_them() -> None:
    def images(**more: object) -> int:
        named = {"data": "cifar10-mini", "model": "vit/micro", "objective": "standard", "batch": 100}
        return plan_run(Recipe.model_validate(named | {"schedule": {"epochs": 2}} | more)).images

    assert images() == 2 * 3600
    assert images(train_limit=250) == 2 * 200
    assert images(extra={"data": "cifar10-mini"}) == 2 * 7200
    assert images(extra={"data": "cifar10-mini", "share": 0.5}) == 2 * 7200  # until its own are used up
    assert images(augment={"repeats": 4}) == 2 * 3600  # of fewer different images


def test_the_rate_is_that_of_the_training_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that stands still but for the steps: 2 seconds each, 20 the first one."""
    clock = [0.0]
    train_step = Trainer.train_step

    def slow(self: Trainer, batch: Batch) -> Any:
        clock[0] += 2.0 if self.step else 20.0
        return train_step(self, batch)

    monkeypatch.setattr(Trainer, "train_step", slow)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.chdir(tmp_path)
    assert images_per_second(load_recipe("base/micro", QUICK), seconds=23.0) == 32 / 2.0
    assert clock[0] == 20 + 2 + 2
    assert not list(tmp_path.iterdir())

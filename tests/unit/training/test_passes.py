"""Passes per image, counted, against what one derives by hand from the objective and its attack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from bastion.models import checkpoint, complexity
from bastion.recipe import Recipe
from bastion.training.objectives import objectives
from bastion.training.objectives.standard import Standard
from bastion.training.passes import Passes, counted, learning_twice, stand_in, step_passes, validation_passes
from bastion.types import Batch, Example, Losses, Objective

THREAT = {"norm": "linf", "eps": 8 / 255}
SHAPE = (3, 32, 32)


def _passes(spec: dict[str, Any], shape: tuple[int, int, int] = SHAPE, classes: int = 10) -> tuple[Passes, Passes]:
    return step_passes(objectives.build(spec), shape, classes, progress=1.0)


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
    finding, learning = _passes(_attacked("adversarial", **attack))
    assert finding == Passes(*expected, 0)
    assert learning == Passes(1, 1, 1)


@pytest.mark.parametrize(
    ("spec", "finding", "learning"),
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
def test_objectives_take_what_their_formulas_say(spec: dict[str, Any], finding: Passes, learning: Passes) -> None:
    assert _passes(spec) == (finding, learning)


@pytest.mark.parametrize("name", objectives.names())
def test_every_objective_learns_once_from_each_answer_that_it_asks_for(name: str) -> None:
    attack = {"name": "pgd", "steps": 2, "keep": "last", "loss": "kl" if name == "trades" else "ce"}
    _, learning = _passes({"name": name} if name == "standard" else _attacked(name, **attack))
    assert 1 <= learning.weights <= learning.backward <= learning.forward


@pytest.mark.parametrize("attack_mode", ["eval", "train"])
@pytest.mark.parametrize(("shape", "classes"), [((3, 224, 224), 1000), ((1, 28, 28), 10), ((3, 20, 31), 2)])
def test_the_images_may_have_any_shape(shape: tuple[int, int, int], classes: int, attack_mode: str) -> None:
    spec = _attacked("adversarial", name="pgd", steps=2, keep="last") | {"attack_mode": attack_mode}
    assert _passes(spec, shape, classes) == (Passes(2, 2), Passes(1, 1, 1))


def test_units_are_forward_passes() -> None:
    assert Passes(1, 0, 0).units == 1
    assert Passes(1, 1, 0).units == 2  # input gradient
    assert Passes(1, 1, 1).units == 3  # training
    finding, learning = _passes(_attacked("adversarial", name="pgd", steps=10, keep="last"))
    assert (finding + learning).units == 2 * 10 + 3
    assert learning.times(1.5) == Passes(1.5, 1.5, 1.5)


class Halves(Standard):
    """Asks about half of the images twice, without freezing anything, and takes an input gradient by hand."""

    def prepare(self, model: nn.Module, batch: Batch, *, progress: float, seed: int) -> Example:
        half = batch.x[: len(batch.x) // 2].clone().requires_grad_()
        torch.autograd.grad(model(half).sum(), half)
        with torch.no_grad():
            model(half)
        return Example(batch, batch.x, {})

    def loss(self, model: nn.Module, example: Example) -> Losses:
        features: list[Tensor] = []
        handle = model.network.blocks[0].register_forward_hook(lambda *given: features.append(given[2]))  # type: ignore
        with torch.no_grad():
            model(example.x)
        logits = model(example.x)
        handle.remove()
        return Losses(features[1].square().mean(), logits, {})  # the logits are not part of it


def test_a_plug_in_is_counted_by_what_it_does() -> None:
    """Part of a batch counts for its part; a gradient for the input alone is told from one for the weights even where
    these are not frozen; a loss need not come from the logits."""
    assert step_passes(Halves(), SHAPE, 10, progress=0.0) == (Passes(1, 0.5, 0), Passes(2, 1, 1))


def test_counting_ends_with_its_context() -> None:
    model, batch = stand_in(SHAPE, 10)
    with counted(model) as passes:
        model(batch.x)
    model(batch.x)
    assert passes == Passes(1, 0, 0)


def _recipe(**more: Any) -> Recipe:
    spec = _attacked("adversarial", name="pgd", steps=2, keep="last")
    return Recipe.model_validate({"data": "cifar10", "model": "vit/micro", "objective": spec, **more})


def test_sam_and_awp_learn_twice_once_they_have_begun() -> None:
    schedule = {"epochs": 20}
    assert learning_twice(_recipe()) == 0
    for name in ("sam", "awp"):
        at_once, later, never = (
            _recipe(optimizer={"perturb": {"name": name, "size": 0.1, "after": after}}, schedule=schedule)
            for after in (0, 5, 30)
        )
        assert [learning_twice(recipe) for recipe in (at_once, later, never)] == [1, 0.75, 0]


@pytest.mark.parametrize(
    ("attack", "expected"),
    [
        (None, Passes(1)),
        ({"name": "pgd", "steps": 5}, Passes(2 + 6, 5)),
        ({"name": "apgd-ce", "steps": 5}, Passes(2 + 6, 5)),
    ],
)
def test_validation_looks_at_the_image_attacks_it_and_judges(attack: dict[str, Any] | None, expected: Passes) -> None:
    recipe = _recipe(validate={"attack": attack})
    objective: Objective = objectives.build(recipe.objective.plain())
    assert validation_passes(recipe, objective, SHAPE, 10) == expected


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
    batch = Batch(index, torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(0)), index)
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        objective.loss(model, objective.prepare(model, batch, progress=1.0, seed=0)).total.backward()  # type: ignore
    finding, learning = _passes(spec)
    expected = len(batch.x) * 2 * complexity.macs(model) * (finding + learning).units
    assert counter.get_total_flops() == pytest.approx(expected, rel=0.03)

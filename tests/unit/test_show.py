"""What `bastion show` says of a recipe's cost, with and without its data and model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from bastion.training.calibrate import Rate

from bastion import planning
from bastion.data import datasets
from bastion.errors import BastionError
from bastion.models import models
from bastion.recipe import Recipe
from bastion.show import describe
from bastion.training import calibrate
from bastion.training.objectives import objectives

IMAGENET = """
about: One attack step on ImageNet.
data: imagenet
model: timm/vit_tiny_patch16_224
objective: {name: adversarial, threat: {norm: linf, eps: 4/255}, attack: {name: fgsm-rs, keep: last}}
batch: 512
precision: bf16
schedule: {epochs: 110}
validate: {limit: 5000, every: 20, attack: {name: fgsm}}
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An ImageNet recipe on a machine without ImageNet."""
    monkeypatch.setenv("BASTION_DATA", str(tmp_path / "empty"))
    path = tmp_path / "recipe.yaml"
    path.write_text(IMAGENET)
    return str(path)


def rows(text: str) -> dict[str, str]:
    """What stands behind each word below the recipe."""
    return dict(re.findall(r"^(\S[^:\n]{0,11}?) {2,}(\S.*)$", text, re.M))


def hours(text: str, device: str) -> float:
    (number, unit) = re.findall(rf"^ {{13}}{device} +([\d,.]+) (h|min|s) ", text, re.M)[0]
    return float(number.replace(",", "")) * {"h": 1, "min": 1 / 60, "s": 1 / 3600}[unit]


def test_imagenet_is_planned_without_imagenet(recipe: str) -> None:
    text = describe(recipe)
    said = rows(text)
    assert said["not here"].startswith("data set 'imagenet' is not in ")
    assert said["data"] == "imagenet: 1,181,167 images to train on, 100,000 held out (by what is known of it)"
    assert said["classes"] == "1000"
    assert said["parameters"] == "5,717,416"
    assert said["passes"].startswith("2 forward, 1 backward to the input, 1 backward to the weights; 5 times")
    images, looked = 1_181_167 // 512 * 512 * 110, 5000 * 6  # after epochs 20, 40, …, 100 and the last
    assert said["training"] == f"{images:,} images in 110 epochs"
    assert said["validation"].startswith(f"{looked:,} images; 4 forward, 1 backward to the input at most")
    tokens, width = 197, 192
    block = tokens * width * (3 + 1 + 4 + 4) * width + 2 * tokens * tokens * width
    macs = 196 * 768 * width + 12 * block + width * 1000
    total = 2 * macs * (5 * images + 5 * looked)
    assert float(said["total"].split()[0]) == pytest.approx(total, rel=0.005)
    assert "a multiply-accumulate is 2 FLOP" in said["total"]
    assert float(said["MACs"].split()[0]) == pytest.approx(macs / 1e9, abs=5e-4)
    assert said["plan"].startswith("at 0.3 of the peak")
    assert hours(text, "1 × A100") == pytest.approx(total / (312e12 * 0.3 * 3600), rel=0.01)
    assert hours(text, "8 × A100") == pytest.approx(total / (8 * 312e12 * 0.3 * 3600), rel=0.02)
    assert hours(text, "8 × H100 SXM") == pytest.approx(total / (8 * 989e12 * 0.3 * 3600), rel=0.02)
    assert hours(text, "64 × TPUv4 core") == pytest.approx(total / (64 * 137.5e12 * 0.3 * 3600), rel=0.02)


def test_devices_utilisation_and_precision_are_what_one_says(recipe: str) -> None:
    half, fp32 = describe(recipe, (), ("a100:4",), 0.5), describe(recipe, ("precision=fp32",), ("a100:4",), 0.5)
    assert rows(half)["plan"].startswith("at 0.5 of the peak")
    assert "H100" not in half
    assert hours(fp32, "4 × A100") / hours(half, "4 × A100") == pytest.approx(312 / 19.5, rel=0.02)


def test_this_machine_is_timed(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of all images at the rate found, and of validation at the same speed."""
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: Rate(250.0, 64))
    text = describe(recipe, (), ("CPU",))
    assert rows(text)["plan"] == "at the speed found; loading of images not counted"
    images, looked = 1_181_167 // 512 * 512 * 110, 5000 * 6
    assert hours(text, "this machine") == pytest.approx((images + looked * 5 / 5) / 250 / 3600, rel=1e-3)
    assert "250 images/s in batches of 64" in text
    sam = describe(recipe, ("optimizer.perturb={name: sam, size: 0.1}",), ("cpu",))
    assert hours(sam, "this machine") == pytest.approx((images * 8 / 5 + looked) / 250 / 3600, rel=1e-3)
    assert "3 forward, 1 backward to the input, 2 backward to the weights; 8 times" in sam


def test_a_model_that_is_announced_only_is_said_not_to_be_there(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_announced", ("later/*",))
    text = describe(recipe, ("model=later/l12",))
    assert "name: later/l12" in text
    assert "not here     model: the model 'later/l12' is not available yet" in text
    assert rows(text)["passes"].startswith("2 forward")
    assert rows(text)["training"].endswith("in 110 epochs")
    assert "parameters" not in rows(text)
    assert "plan" not in rows(text)
    with pytest.raises(BastionError, match="objective.attack.stepps: unknown key; did you mean 'steps'"):
        describe(recipe, ("model=later/l12", "objective.attack={name: pgd, stepps: 2}"))
    with pytest.raises(BastionError, match="data.sise: unknown key; did you mean 'size'"):
        describe(recipe, ("model=later/l12", "data={name: imagenet, sise: 2}"))
    with pytest.raises(BastionError, match="model.name: unknown model 'latter/l12'"):
        describe(recipe, ("model=latter/l12",))


def test_data_and_objective_may_be_announced_too(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "_announced", ("imagenet-21k",))
    monkeypatch.setattr(objectives, "_announced", ("rspc-2",))
    text = describe(recipe, ("data=imagenet-21k",))
    assert "not here     data: the data set 'imagenet-21k' is not available yet" in text
    assert "passes" in rows(text)
    assert "training" not in rows(text)
    text = describe(recipe, ("objective={name: rspc-2, rho: 0.1}",))
    assert "not here     objective: the objective 'rspc-2' is not available yet" in text
    assert rows(text)["parameters"] == "5,717,416"
    assert "passes" not in rows(text)


def test_unknown_data_leave_only_the_passes(recipe: str) -> None:
    said = rows(describe(recipe, ("data={name: imagefolder, root: /nowhere}",)))
    assert said["not here"].startswith("data: /nowhere: no such folder")
    assert "passes" in said
    assert not {"data", "parameters", "training", "total", "plan"} & said.keys()


def test_data_that_are_here_are_asked_themselves() -> None:
    said = rows(describe("tiny/demo-robust"))
    assert "not here" not in said
    assert said["data"] == "cifar10-mini: 3,600 images to train on, 400 held out"
    assert said["training"] == f"{3600 // 128 * 128 * 13:,} images in 13 epochs"


def test_limits_extra_images_and_copies_are_counted_as_training_draws_them() -> None:
    def images(**more: object) -> int:
        base = {"data": "cifar10-mini", "model": "vit/micro", "objective": "standard", "batch": 100}
        load = planning.load_of(planning.look_ahead(Recipe.model_validate(base | {"schedule": {"epochs": 2}} | more)))
        assert load is not None
        return load.images

    assert images() == 2 * 3600
    assert images(train_limit=250) == 2 * 200
    assert images(extra={"data": "cifar10-mini"}) == 2 * 7200
    assert images(extra={"data": "cifar10-mini", "share": 0.5}) == 2 * 7200  # until its own are used up
    assert images(augment={"repeats": 4}) == 2 * 3600  # of fewer different images


def test_extra_images_that_are_not_here_are_named(recipe: str) -> None:
    text = describe("tiny/demo-standard", ("extra={data: {name: imagefolder, root: /nowhere}}",))
    assert re.search(r"^not here     .*/nowhere: no such folder.*; without these extra images$", text, re.M)
    assert f"{3600 // 128 * 128 * 13:,} images" in text


@pytest.mark.parametrize(
    ("target", "on", "utilisation", "message"),
    [
        ("tiny/demo-robust", ("a10:8",), 0.3, r"--on a10:8: unknown device 'a10'; did you mean 'a100'\?"),
        ("tiny/demo-robust", (), 0.0, "--utilisation 0: expected a share of the peak"),
        (
            "vit/micro",
            ("a100",),
            0.3,
            "show vit/micro: --on, and --set but for a model.s name, are for recipes; this is none",
        ),
        ("tiny/demo-robus", ("a100",), 0.3, r"this is none; did you mean 'tiny/demo-robust'\?"),
    ],
)
def test_what_cannot_be_planned_is_refused(target: str, on: tuple[str, ...], utilisation: float, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        describe(target, (), on, utilisation)


def test_a_name_of_both_a_model_and_a_recipe_is_the_model_unless_a_plan_is_asked_for() -> None:
    assert "schedule:" not in describe("zoo/cifar10-linf-vit")
    assert "schedule:" in describe("zoo/cifar10-linf-vit", (), ("a100",))
    assert "seed: 7" in describe("zoo/cifar10-linf-vit", ("seed=7",))


def test_a_model_by_its_name_is_counted_with_its_options() -> None:
    """Patches of 8 on 32 pixels: 16 tokens and that of the class."""
    said = rows(describe("cifar/vit", ("patch_size=8",)))
    assert (said["parameters"], said["input"]) == ("9,835,530", "3×32×32")
    assert said["attention"] == "between tokens: 6 maps of heads×queries×keys 8×17×17"
    assert said["from"].startswith("Dosovitskiy et al. 2021")
    assert rows(describe("resnet/micro"))["attention"] == "none"
    with pytest.raises(BastionError, match="model.patch_siz: unknown key; did you mean 'patch_size'"):
        describe("cifar/vit", ("patch_siz=8",))


def test_a_timm_model_is_told_of_by_its_factory() -> None:
    assert rows(describe("timm/resnet18"))["about"].startswith("A timm model with random weights")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("patch_size=0", "img_size: 32 cannot be cut into patches of 0"),
        ("num_heads=3", "cannot be built: dim should be divisible by num_heads"),
        ("unstride=1", "unstride: 1 does not go with the other layers"),
    ],
)
def test_options_that_a_model_cannot_take_are_told(change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        describe("vit/micro", (change,))


def test_a_network_that_does_not_run_at_its_size_is_told() -> None:
    with pytest.raises(BastionError, match="show timm/vgg11_bn: with these options it does not run on 3×16×16"):
        describe("timm/vgg11_bn", ("img_size=16",))

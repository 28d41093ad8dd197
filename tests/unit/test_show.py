"""What `bastion show` says of a recipe's cost, with and without its data and model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bastion import costs
from bastion.errors import BastionError
from bastion.recipe import load_recipe
from bastion.show import describe

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


def test_an_attack_shows_its_settings_with_defaults_types_and_help() -> None:
    text = describe("apgd-t")
    assert text.startswith("attack apgd-t\n\nAPGD on the targeted DLR")
    assert re.search(r"^restarts +1 +whole number; searches, each from another random point$", text, re.M)
    assert "bastion measure MODEL --attack apgd-t --norm linf --eps 8/255" in text
    assert max(map(len, describe("patch-fool").partition("setting ")[2].splitlines())) <= 80


def test_the_help_of_a_setting_is_for_its_users() -> None:
    text = " ".join(describe("autoattack").split())
    assert "standard | plus | rand; which attacks run, with how many restarts" in text


def test_a_default_that_is_a_plug_in_is_shown_as_its_spec() -> None:
    text = " ".join(describe("trades").split())
    assert "default {name: pgd, steps: 10, rel_step: 0.25, loss: kl, keep: last}" in text
    assert "default {norm: linf, eps: 8/255}" in text and "from bastion.training.objectives import Trades" in text


def test_what_has_one_name_is_shown_as_all_that_it_is() -> None:
    text = describe("occlusion")
    assert text.startswith("probe occlusion\n") and "\nsuite occlusion\n" in text
    assert "mean: [occlusion]" in text and re.search(r"^confidence_std +its standard deviation", text, re.M)


def test_a_study_or_probe_that_is_a_suite_by_itself_is_shown_with_its_command() -> None:
    assert "\nbastion measure MODEL --suite sparsity\n" in describe("sparsity")
    assert "--suite adversarial" not in describe("adversarial")  # it needs a threat


def test_a_suite_and_a_data_set_are_shown() -> None:
    assert re.search(r"^rows +4: clean, pgd-20, sanity, worst case$", describe("demo"), re.M)
    assert "to: [8/255]" in describe("demo")
    assert rows(describe("cifar10-mini"))["images"] == "3,600 train, 400 val, 1,000 test"


def test_a_measured_run_without_a_model_is_shown(tmp_path: Path) -> None:
    from bastion import measure

    suite = {"probes": {"clean": "accuracy"}}
    facts = measure("zoo/cifar10-linf-vit", suite=suite, limit=2, folder=tmp_path / "run")
    text = describe(str(tmp_path / "run"))
    assert facts.table() in text and rows(text)["measured"].startswith(facts.about.created)


def test_imagenet_is_planned_without_imagenet(recipe: str) -> None:
    text = describe(recipe)
    said = rows(text)
    assert said["not here"].startswith("data: data set 'imagenet' is not in ")
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
    assert not {"plan", "time"} & said.keys()
    sam = rows(describe(recipe, ("optimizer.perturb={name: sam, size: 0.1}",)))
    assert sam["passes"].startswith("3 forward, 1 backward to the input, 2 backward to the weights; 8 times")


def test_this_machine_is_timed_if_one_asks_for_it(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time is that of all images at the rate found, and of validation at the same speed."""
    rates = iter([250.0, 0.01])
    monkeypatch.setattr(costs, "images_per_second", lambda _: next(rates))
    changes = ("validate={attack: {name: fgsm}, limit: 100, train: 0, every: 20}", "schedule.epochs=20")
    images, validated = 3600 // 128 * 128 * 20, 100
    units = costs.training_passes(load_recipe("tiny/demo-robust", changes)).units
    hours = (images + validated * 5 / units) / 250 / 3600
    said = rows(describe("tiny/demo-robust", changes, timed=True))
    assert said["time"] == f"{hours * 60:.1f} min on this machine, at 250 images/s"
    assert rows(describe("tiny/demo-robust", changes, timed=True))["time"] == (
        f"{hours * 25_000:,.1f} h on this machine, at 0.01 images/s"
    )
    with pytest.raises(
        BastionError, match="show --time: training cannot be tried here; data: data set 'imagenet' is not in"
    ):
        describe(recipe, timed=True)


def test_unknown_data_leave_only_the_passes(recipe: str) -> None:
    said = rows(describe(recipe, ("data={name: imagefolder, root: /nowhere}",)))
    assert said["not here"].startswith("data: /nowhere: no such folder")
    assert "passes" in said
    assert not {"data", "parameters", "training", "total", "time"} & said.keys()


def test_data_that_are_here_are_asked_themselves() -> None:
    said = rows(describe("tiny/demo-robust"))
    assert "not here" not in said
    assert said["data"] == "cifar10-mini: 3,600 images to train on, 400 held out"
    assert said["training"] == f"{3600 // 128 * 128 * 13:,} images in 13 epochs"


def test_extra_images_that_are_not_here_are_named(recipe: str) -> None:
    text = describe("tiny/demo-standard", ("extra={data: {name: imagefolder, root: /nowhere}}",))
    assert re.search(r"^not here     .*/nowhere: no such folder.*; without these extra images$", text, re.M)
    assert f"{3600 // 128 * 128 * 13:,} images" in text


def test_what_cannot_be_planned_is_refused() -> None:
    with pytest.raises(BastionError, match="show vit/micro: --time, and --set but for a model.s name, are for recipes"):
        describe("vit/micro", timed=True)
    with pytest.raises(BastionError, match=r"this is none; did you mean 'tiny/demo-robust'\?"):
        describe("tiny/demo-robus", timed=True)


def test_a_name_of_both_a_model_and_a_recipe_is_the_model_unless_something_is_changed() -> None:
    assert "schedule:" not in describe("zoo/cifar10-linf-vit")
    assert "seed: 7" in describe("zoo/cifar10-linf-vit", ("seed=7",))


def test_a_model_by_its_name_is_counted_with_its_options() -> None:
    """Patches of 8 on 32 pixels: 16 tokens and that of the class."""
    said = rows(describe("cifar/vit", ("patch_size=8",)))
    assert (said["parameters"], said["input"]) == ("9,835,530", "3×32×32")
    assert said["attention"] == "between tokens: 6 maps of heads×queries×keys 8×17×17"
    assert said["from"].startswith("Dosovitskiy et al. 2021")
    assert rows(describe("resnet/micro"))["attention"] == "none"
    assert rows(describe("tiny/fan"))["blocks"] == "8: blocks.0 … cls_attn_blocks.1; 6 with self-attention"
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

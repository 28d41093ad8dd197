"""Scripts written for AutoAttack or RobustBench: they change one import line."""

from __future__ import annotations

import inspect
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyautoattack
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Resize, ToTensor

from bastion import compat
from bastion.attacks import Attack
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import AutoAttack as OurAutoAttack
from bastion.compat import AUTOATTACK_NORMS, AutoAttack, benchmark
from bastion.data import datasets, imagefolder
from bastion.data.cifar import CIFAR10
from bastion.errors import BastionError

README = """
adversary = AutoAttack(forward_pass, norm='Linf', eps=epsilon, version='standard')
adversary.seed = 0
adversary.apgd.n_iter = adversary.apgd_targeted.n_iter = adversary.fab.n_iter = 10
adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = 2
adversary.square.n_queries = 20

x_adv = adversary.run_standard_evaluation(images, labels, bs=batch_size)
dict_adv = adversary.run_standard_evaluation_individual(images, labels, bs=batch_size)

adversary.attacks_to_run = ['apgd-ce']
x_first = adversary.run_standard_evaluation(images, labels, bs=batch_size)
"""


class Official(pyautoattack.AutoAttack):
    """The official code. The package renames `bs`, and always returns labels."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        self.verbose = False

    def run_standard_evaluation(self, x: Tensor, y: Tensor, *, bs: int = 250, batch_size: int = 0) -> Any:
        found = super().run_standard_evaluation(x, y, batch_size=batch_size or bs)
        return found if batch_size else found[0]

    def run_standard_evaluation_individual(self, x: Tensor, y: Tensor, *, bs: int) -> dict[str, Tensor]:
        return {name: x for name, (x, _) in super().run_standard_evaluation_individual(x, y, batch_size=bs).items()}


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 25, 10)).eval()


@pytest.fixture(scope="module")
def images(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Of 12, the last two have wrong labels."""
    x = torch.rand(12, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    y[10:] = (y[10:] + 1) % 10
    return x, y


def run(script: str, **names: Any) -> dict[str, Any]:
    exec(script, names)
    return names


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_official_example_gives_the_same_with_either_import(
    model: nn.Module, images: tuple[Tensor, Tensor]
) -> None:
    x, y = images
    given = {"forward_pass": model, "epsilon": 0.012, "images": x, "labels": y, "batch_size": 8}
    theirs, ours = run(README, AutoAttack=Official, **given), run(README, AutoAttack=AutoAttack, **given)

    def robust(x: Tensor) -> int:
        return int((model(x).argmax(1) == y).sum())

    assert 0 < robust(ours["x_adv"]) < 10
    assert ours["dict_adv"].keys() == theirs["dict_adv"].keys()
    pairs = [(theirs[name], ours[name]) for name in ("x_adv", "x_first")]
    pairs += [(theirs["dict_adv"][name], ours["dict_adv"][name]) for name in ("apgd-ce", "apgd-t", "fab-t")]
    for one, other in pairs:
        assert robust(one) == robust(other)
        changed = (other != x).flatten(1).any(1)
        assert torch.equal(changed, (one != x).flatten(1).any(1)) and not changed[10:].any()
        assert (other - x).abs().max() <= 0.012 + 1e-6 and 0 <= other.min() <= other.max() <= 1


class Suspect(nn.Module):
    """The model, made such that AutoAttack's number cannot be trusted."""

    def __init__(self, model: nn.Module, how: str) -> None:
        super().__init__()
        self.model, self.how = model, how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "probabilities":
            return (100 * self.model(x)).softmax(1)
        if self.how == "dynamic":
            with torch.enable_grad():
                z = x.detach().clone().requires_grad_()
                x = x + 0 * torch.autograd.grad(self.model(z).sum(), z)[0]
        if self.how == "stochastic":
            x = x + 0.05 * torch.randn_like(x)
        logits: Tensor = self.model((8 * x).round() / 8 if self.how == "zero-gradient" else x)
        return logits


@pytest.mark.parametrize(
    ("how", "codes"),
    [
        ("probabilities", ["probabilities"]),
        ("dynamic", ["dynamic"]),
        ("stochastic", ["stochastic"]),
        ("zero-gradient", ["zero-gradient", "square-beats-white-box", "blind-start"]),
        ("none", []),
    ],
)
def test_where_the_official_code_warns_so_do_we(
    how: str, codes: list[str], model: nn.Module, images: tuple[Tensor, Tensor]
) -> None:
    adversary = AutoAttack(Suspect(model, how), eps=0.05, verbose=False)
    adversary.apgd.n_iter = adversary.apgd_targeted.n_iter = adversary.fab.n_iter = 2
    adversary.apgd_targeted.n_target_classes = adversary.fab.n_target_classes = 2
    adversary.square.n_queries = 50
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        adversary.run_standard_evaluation(*images)
    assert [str(each.message).partition(" ")[0] for each in told] == codes
    if how == "stochastic":
        adversary = AutoAttack(Suspect(model, how), eps=0.05, verbose=False, version="rand")
        adversary.apgd.n_iter, adversary.apgd.eot_iter = 2, 2
        adversary.run_standard_evaluation(*images)  # made for such models: no warning, which would be an error here


@pytest.mark.parametrize("norm", ["Linf", "L2", "L1"])
@pytest.mark.parametrize("version", ["standard", "plus", "rand"])
def test_the_settings_of_a_version_are_the_official_ones(norm: str, version: str) -> None:
    """And those of bastion's own AutoAttack."""
    model = nn.Flatten()
    ours, theirs = AutoAttack(model, norm, 0.1, version=version), Official(model, norm=norm, eps=0.1, version=version)
    assert ours.attacks_to_run == theirs.attacks_to_run
    for part in ("apgd", "apgd_targeted", "fab", "square"):
        for name in getattr(ours, part).__slots__:
            if hasattr(getattr(theirs, part), name) and (part != "apgd_targeted" or version != "rand"):
                assert getattr(getattr(ours, part), name) == getattr(getattr(theirs, part), name), (part, name)
    # `phases` is of l1 alone, where bastion has it on by default.
    own = [
        (name, _without_phases(each, norm))
        for name, each in OurAutoAttack(version=version).named_members(AUTOATTACK_NORMS[norm])
    ]
    assert [(name, ours._member(name)) for name in ours.attacks_to_run] == own


def _without_phases(attack: Attack, norm: str) -> Attack:
    return replace(attack, phases=False) if isinstance(attack, APGD) and norm != "L1" else attack


def test_a_custom_version_runs_what_is_set(
    model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = images
    adversary = AutoAttack(lambda x: model(x), eps=0.5, version="custom", log_path=tmp_path / "log.txt")
    adversary.attacks_to_run = ["apgd-ce", "fab"]
    adversary.apgd.n_restarts, adversary.apgd.n_iter, adversary.fab.n_restarts = 2, 5, 2
    with torch.no_grad():
        x_adv, y_adv = adversary.run_standard_evaluation(x, y, return_labels=True)
    assert torch.equal(y_adv, model(x_adv).argmax(1)) and (y_adv != y).all()
    assert adversary.clean_accuracy(x, y, bs=5) == 10 / 12
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert lines[:2] == ["initial accuracy: 83.33%", "robust accuracy after APGD-CE: 0.00%"]
    assert lines[-1] == "clean accuracy: 83.33%" and capsys.readouterr().out.splitlines() == lines
    with pytest.raises(AttributeError):
        adversary.apgd.n_iters = 50


def test_what_is_not_supported_is_said(images: tuple[Tensor, Tensor]) -> None:
    model = nn.Flatten()
    with pytest.raises(BastionError, match="unknown version 'standart'; did you mean 'standard'?"):
        AutoAttack(model, version="standart")
    with pytest.raises(BastionError, match="unknown norm 'Linfty'; did you mean 'Linf'?"):
        AutoAttack(model, "Linfty")
    with pytest.raises(BastionError, match="attacks_to_run is for version='custom'"):
        AutoAttack(model, attacks_to_run=["fab"])
    with pytest.raises(BastionError, match="TensorFlow"):
        AutoAttack(model, is_tf_model=True)
    with pytest.raises(BastionError, match="attacks_to_run is empty"):
        AutoAttack(model, version="custom").run_standard_evaluation(*images)
    with pytest.raises(BastionError, match="resumes by itself"):
        AutoAttack(model).run_standard_evaluation(*images, state_path="state.json")


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3 * 32 * 32, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(x.flatten(1))
        return logits


@pytest.mark.skipif(not CIFAR10.path.exists(), reason="cifar10 is not here")
def test_benchmark_gives_clean_and_robust_accuracy_as_robustbench_does() -> None:
    torch.manual_seed(0)
    model, data = Linear(), CIFAR10.data_set(CIFAR10.read()).test.batch(range(16))
    model.head.bias.data[data.y.mode().values] += 0.5  # the most frequent class, for the most part
    clean, robust = benchmark(model, n_examples=16, dataset="cifar10", threat_model="Linf", eps=8 / 255)
    assert clean == (model(data.x).argmax(1) == data.y).float().mean().item() > robust == 0


def test_robustbenchs_own_call_writes_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments of `python -m robustbench.eval`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "_clean_data", lambda *_: "cifar10-mini")
    torch.manual_seed(0)
    model, x = Linear(), datasets.build("cifar10-mini").test.batch(range(8))
    model.head.bias.data[x.y.mode().values] += 0.5
    clean, robust = benchmark(
        model,
        n_examples=8,
        dataset="cifar10",
        threat_model="Linf",
        to_disk=True,
        model_name="Mine2026",
        data_dir="./data",
        corruptions_data_dir="./data",
        device=torch.device("cpu"),
        batch_size=4,
        eps=8 / 255,
        log_path="log.txt",
        preprocessing=None,
        aa_state_path=None,
    )
    info = json.loads(Path("model_info/cifar10/Linf/Mine2026.json").read_text())
    assert (info["clean_acc"], info["autoattack_acc"]) == (f"{100 * clean:.2f}", f"{100 * robust:.2f}")
    assert (info["dataset"], info["eps"], info["authors"]) == ("cifar10", "8/255", None)
    assert (info["n"], info["footnote"], info["unreliable"]) == (8, "Measured on 8 images.", False)
    assert "autoattack" in Path("log.txt").read_text()
    assert list(inspect.signature(benchmark).parameters)[4:8] == [
        "to_disk", "model_name", "data_dir", "corruptions_data_dir",
    ]  # fmt: skip


def test_a_benchmark_that_cannot_be_trusted_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compat, "_clean_data", lambda *_: "cifar10-mini")
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        benchmark(Suspect(Linear(), "probabilities"), n_examples=4, eps=1, to_disk=True, model_name="Soft2026")
    assert "probabilities (4 of 4 images): The model returns probabilities" in str(told[0].message)
    assert json.loads(Path("model_info/cifar10/Linf/Soft2026.json").read_text())["unreliable"] is True


def test_imagenet_has_robustbenchs_pixels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Res256Crop224 of RobustBench: `Resize(256)`, which is bilinear, `CenterCrop(224)` and `ToTensor`."""
    path, asked = tmp_path / "val" / "n01440764" / "0.png", []
    path.parent.mkdir(parents=True)
    noise = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)
    Image.fromarray(noise).save(path)
    monkeypatch.setattr(imagefolder, "read_subset", lambda _: (["n01440764/0.png"], "digest"))

    def noted(model: nn.Module, data: Any, **options: Any) -> Any:
        asked.append((datasets.build(data).test.batch([0]).x[0], options["limit"]))
        raise BastionError("enough")

    monkeypatch.setattr(compat, "evaluate", noted)
    for preprocessing in (None, "BicubicRes256Crop224"):
        with pytest.raises(BastionError, match="enough"):
            benchmark(Linear(), dataset="imagenet", eps=4 / 255, data_dir=tmp_path, preprocessing=preprocessing)
    for (x, limit), mode in zip(asked, (InterpolationMode.BILINEAR, InterpolationMode.BICUBIC), strict=True):
        expected = Compose([Resize(256, mode), CenterCrop(224), ToTensor()])(Image.fromarray(noise))
        assert torch.equal(x, expected) and limit == 5000


def test_benchmark_says_what_it_needs() -> None:
    with pytest.raises(BastionError, match="to_disk needs model_name"):
        benchmark(nn.Flatten(), to_disk=True, eps=1)
    with pytest.raises(BastionError, match="aa_state_path is not supported"):
        benchmark(nn.Flatten(), aa_state_path="state.json", eps=1)
    with pytest.raises(BastionError, match="one model on one device at a time"):
        benchmark(nn.Flatten(), device=["cuda:0", "cuda:1"], eps=1)
    with pytest.raises(BastionError, match="unknown preprocessing 'Crop288'"):
        benchmark(nn.Flatten(), dataset="imagenet", preprocessing="Crop288", eps=1)
    with pytest.raises(BastionError, match="preprocessing is for imagenet; cifar10 is measured as it is"):
        benchmark(nn.Flatten(), preprocessing="Res256Crop224", eps=1)
    with pytest.raises(BastionError, match="give eps for Linf"):
        benchmark(nn.Flatten())
    with pytest.raises(BastionError, match="unknown threat_model 'L1'"):
        benchmark(nn.Flatten(), threat_model="L1", eps=1)
    with pytest.raises(BastionError, match="unknown dataset 'cifar'; did you mean 'cifar10'"):
        benchmark(nn.Flatten(), dataset="cifar", eps=1 / 255)
    with pytest.raises(BastionError, match="unknown dataset with corruptions 'imagenet'"):
        benchmark(nn.Flatten(), dataset="imagenet", threat_model="corruptions")

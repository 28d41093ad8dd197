"""What somebody writes who has read nothing: a model and data of their own, a few lines, and a number."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bastion
from bastion import storage
from bastion.attacks import FGSM, PGD, AutoAttack, Square
from bastion.measuring.find import find_run
from bastion.training.objectives.trades import Trades
from bastion.types import Attack, Batch

EPS = 8 / 255


class Net(nn.Module):
    """A third party's network: no base class of ours, no attributes that we know."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(8 * 7 * 7, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def images(model: nn.Module) -> tuple[Tensor, Tensor]:
    """Bytes as in a picture file, under the labels that the model gives them, but for the last four."""
    x = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(0)) / 255
    y = model(x).argmax(1)
    y[8:] = (y[8:] + 1) % 10
    return x, y


def test_settings_of_an_attack_follow_its_name(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    short = bastion.attack(model, *images, "pgd", eps=0.01, steps=3)
    assert torch.equal(short.x, bastion.attack(model, *images, PGD(steps=3), eps=0.01).x)


def test_images_and_labels_in_one_argument(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x = bastion.attack(model, *images, "fgsm").x
    loader = DataLoader(TensorDataset(*images), batch_size=5)
    for given in (images, TensorDataset(*images), loader):
        assert torch.equal(bastion.attack(model, given, attack="fgsm").x, x)


def test_attack_my_tensors(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    adv = bastion.attack(model, x, y, "autoattack", norm="linf", eps=8 / 255)
    assert adv.x.shape == x.shape and (adv.x - x).abs().max() <= EPS + 1e-6 and 0 <= adv.x.min() <= adv.x.max() <= 1
    assert torch.equal(adv.success, model(adv.x).argmax(1) != y) and torch.allclose(adv.logits, model(adv.x), atol=1e-5)
    assert adv.success[8:].all() and (adv.distance[8:] == 0).all() and model.training
    assert (adv.distance[~adv.success] == torch.inf).all() and ((adv.fooled_by >= 0) == adv.success)[:8].all()
    assert "of 12 misclassified" in repr(adv)


def test_an_attack_that_says_nothing_about_robustness_is_doubted(images: tuple[Tensor, Tensor]) -> None:
    class Detached(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.detach())

    torch.manual_seed(0)
    network, x = Detached(), images[0]
    y = network(x).argmax(1)
    with (
        pytest.warns(match="^blind-start .12 of 12 images.: Every search"),
        pytest.warns(match="^zero-gradient .8 of 8"),
    ):
        adv = bastion.attack(network, x, y, "pgd", eps=0.0001)
    assert (adv.distance == torch.inf).all()
    with pytest.warns(match=r"^at-chance \(24 of 24 images\): They are wrong"):
        bastion.attack(network, x.repeat(2, 1, 1, 1), (y.repeat(2) + 1 + torch.arange(24) % 2) % 10, PGD(steps=0))


def test_evaluate_my_module_on_arrays_and_lists(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    result = bastion.evaluate(model, (x.numpy(), y.tolist()), attacks=["apgd-t", PGD(steps=20)], norm="linf", eps=EPS)
    assert result.accuracies()["clean"].value == pytest.approx(8 / 12)
    assert list(result.accuracies()) == ["clean", "apgd-t", "pgd", "worst case"]
    assert f"{result['pgd']:.2%}" == f"{100 * float(result['pgd']):.2f}%" and result["worst case"].n == 12
    assert "ℓ∞ ≤ 8/255" in result.table() and "clean 66.67 %" in repr(result)
    assert "<table>" in result._repr_html_()


def test_another_eps_or_several(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    result = bastion.evaluate(model, images, "pgd", norm="l2", eps=[0, "1/2"], checks=False)
    accuracies = result.accuracies()
    assert accuracies["pgd eps=0"].value == accuracies["clean"].value >= accuracies["pgd eps=0.5"].value


def test_a_label_is_found_with_either_slash(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    result = bastion.evaluate(model, images, "pgd:step=2/255,steps=1", checks=False)
    assert result["pgd:step=2/255,steps=1"] == result.accuracies()["pgd:step=2/255,steps=1"]
    with pytest.raises(bastion.BastionError, match="no accuracy 'clan'; did you mean 'clean'"):
        result["clan"]


class Pairs(Dataset[Any]):
    """PIL pictures and ints, as torchvision's data sets have them."""

    classes = tuple("abcdefghij")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, number: int) -> Any:
        from torchvision.transforms.functional import to_pil_image

        return to_pil_image(self.x[number]), int(self.y[number])


@pytest.mark.parametrize("kind", ["dataset", "pictures", "loader", "channels last", "bytes"])
def test_my_data_set_in_any_form(kind: str, model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    data: Any = {
        "dataset": TensorDataset(x, y),
        "pictures": Pairs(x, y),
        "loader": DataLoader(TensorDataset(x, y), batch_size=5),
        "channels last": (x.permute(0, 2, 3, 1).numpy(), y),
        "bytes": ((255 * x).round().byte(), y),
    }[kind]
    result = bastion.evaluate(model, data, "pgd", limit=10, checks=False)
    expected = bastion.evaluate(model, images, "pgd", limit=10, checks=False)
    assert result.n == 10
    for name in ("clean/correct", "pgd/correct", "pgd/distance"):
        assert np.array_equal(result.columns[name], expected.columns[name], equal_nan=True)
    assert result.about.classes == (Pairs.classes if kind == "pictures" else tuple("0123456789"))


@pytest.mark.parametrize("count", [2, 12])
def test_my_data_are_a_list_of_pairs(count: int, model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = (each[:count] for each in images)
    pairs = [(image, int(label)) for image, label in zip(x.numpy(), y, strict=True)]
    result = bastion.evaluate(model, pairs, "fgsm", checks=False)
    expected = bastion.evaluate(model, (x, y[:, None]), "fgsm", checks=False)
    assert result.n == count and np.array_equal(result.correct("fgsm"), expected.correct("fgsm"))


class Three(Pairs):
    classes = ("tench", "cat", "dog")


@pytest.mark.parametrize("class_map", [[7, 2, 5], np.array([7, 2, 5]), {"dog": 5, "tench": 7, "cat": 2}])
def test_my_classes_are_some_of_the_models(class_map: Any, model: nn.Module) -> None:
    x = torch.randint(0, 256, (12, 3, 32, 32), generator=torch.Generator().manual_seed(0)) / 255
    y = torch.arange(12) % 3
    right = (model.eval()(x)[:, [7, 2, 5]].argmax(1) == y).double().mean()
    result = bastion.evaluate(model, Three(x, y), "fgsm", checks=False, class_map=class_map)
    assert result.accuracies()["clean"].value == pytest.approx(right) and result.about.classes == Three.classes
    if not isinstance(class_map, dict):
        again = bastion.evaluate(model, (x, y), "fgsm", checks=False, class_map=class_map)
        assert np.array_equal(again.correct("fgsm"), result.correct("fgsm"))


@pytest.mark.parametrize(
    ("class_map", "message"),
    [
        (None, "data: the data set has 3 classes, the model 10 outputs; for measuring, class_map= says which"),
        ([1, 2], "class_map: 2 outputs, but 3 classes"),
        ({"cat": 1, "dgo": 2, "tench": 3}, "class_map: no output of the class 'dog'; did you mean 'dgo'"),
        ([1, 2, 10], "the class map of tensors names output 10, but the model has 10"),
        ("imagenet", "class_map: data: 2 of 3 class folders are no ImageNet class: cat, dog"),
    ],
)
def test_a_wrong_class_map_is_told(class_map: Any, message: str, model: nn.Module) -> None:
    data = Three(torch.rand(3, 3, 32, 32), torch.arange(3))
    with pytest.raises(bastion.BastionError, match=message):
        bastion.evaluate(model, data, "fgsm", class_map=class_map)


def test_every_adversarial_image_and_a_table_of_all_examples(
    model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    x, y = images
    result = bastion.evaluate(model, (x, y), "pgd", keep="all", checks=False, device="cpu")
    assert np.array_equal(result.adversarial(), result.adversarial("pgd"))
    wrong = model(torch.from_numpy(result.adversarial("pgd"))).argmax(1) != y
    assert np.array_equal(wrong.numpy(), ~result.correct("pgd"))
    result.to_csv(tmp_path / "facts.csv")
    lines = (tmp_path / "facts.csv").read_text().splitlines()
    assert len(lines) == 13 and lines[0].startswith("index,label,clean/correct,") and lines[0].count("index") == 1
    with pytest.raises(bastion.BastionError, match='kept of 0 of the 12 examples; evaluate with keep="all"$'):
        bastion.evaluate(model, (x, y), "pgd", checks=False).adversarial("pgd")


def test_adversarial_examples_as_files(model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    x, y = images
    result = bastion.evaluate(model, (x, y), "pgd", keep="all")
    result.export(tmp_path / "adv.npz")
    with np.load(tmp_path / "adv.npz") as stored:
        assert np.array_equal(stored["x"], result.adversarial("pgd")) and np.array_equal(stored["y"], y)
        assert np.array_equal(stored["fooled"], ~result.correct("pgd")) and stored["index"].tolist() == [*range(12)]
    result.export(tmp_path / "adv")
    with Image.open(tmp_path / "adv" / "000003.png") as picture:
        assert np.array_equal(np.asarray(picture), np.rint(255 * result.adversarial("pgd")[3]).transpose(1, 2, 0))
    lines = (tmp_path / "adv" / "examples.csv").read_text().splitlines()
    assert lines[0] == "file,y,index,fooled" and lines[12] == f"000011.png,{y[11]},11,True" and len(lines) == 13


def test_adversarial_examples_of_several_attacks(
    model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    result = bastion.evaluate(model, images, ["fgsm", "pgd"], eps=[EPS, 0.1], keep="all", checks=False)
    with pytest.raises(bastion.BastionError, match="adv.npz takes the examples of one of fgsm eps=8/255, fgsm eps="):
        result.export(tmp_path / "adv.npz")
    with pytest.raises(bastion.BastionError, match="adversarial: give one of fgsm eps=8/255, fgsm eps=0.1, pgd"):
        result.adversarial()
    result.export(tmp_path / "adv.npz", "pgd eps=0.1")
    result.export(tmp_path / "adv")
    assert sorted(path.name for path in (tmp_path / "adv").iterdir())[2:] == ["pgd-eps-0.1", "pgd-eps-8-255"]
    with pytest.raises(bastion.BastionError, match="no adversarial examples were kept"):
        bastion.evaluate(model, images, "pgd", checks=False).export(tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_grey_images_are_exported_and_other_channels_are_not_png(tmp_path: Path) -> None:
    for channels in (1, 4):
        network = nn.Sequential(nn.Flatten(), nn.Linear(channels * 16, 3))
        data = torch.rand(4, channels, 4, 4), torch.zeros(4, dtype=torch.long)
        result = bastion.evaluate(network, data, "fgsm", keep="all", checks=False)
        if channels == 4:
            with pytest.raises(bastion.BastionError, match="images of 4 channels are no PNG"):
                result.export(tmp_path / "adv")
        else:
            result.export(tmp_path / "grey")
            with Image.open(tmp_path / "grey" / "000000.png") as picture:
                assert picture.mode == "L" and picture.size == (4, 4)


def test_a_dataframe_of_all_examples(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    result = bastion.evaluate(model, images, ["pgd", "square"], checks=False)
    frame = result.to_frame()
    assert list(frame)[:3] == ["index", "label", "clean/correct"] and len(frame) == 12
    assert frame["clean/correct"].mean() == pytest.approx(result.accuracies()["clean"].value)
    assert frame["label"].tolist() == images[1].tolist()
    right = frame.groupby("label")["pgd/correct"].sum()
    assert right.sum() == result.correct("pgd").sum() and frame["pgd/distance"].dtype == np.float32


def test_two_models_measured_and_compared(
    model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    for name, network in {"a": model, "b": Net()}.items():
        bastion.measure(network, images, {"probes": {"clean": "accuracy"}}, folder=name)
    assert "clean" in bastion.compare("a", "b").table()


def test_attacks_are_measured_without_a_suite(model: nn.Module, images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    facts = bastion.measure(model, images, attacks=["fgsm", PGD(steps=2)], eps="4/255", folder=tmp_path / "run")
    assert list(facts.accuracies()) == ["clean", "fgsm", "pgd(steps=2)", "worst case"] and "ℓ∞ ≤ 4/255" in facts.table()
    for wrong, message in (({"suite": "demo", "attacks": "fgsm"}, "not both"), ({"eps": 0.1}, "go with attacks=")):
        with pytest.raises(bastion.BastionError, match=message):
            bastion.measure(model, images, folder=tmp_path / "run", **wrong)


class Darker(Attack):
    """A user's own, registered nowhere."""

    def __call__(self, model: nn.Module, batch: Batch, threat: Any, *, seed: int) -> Tensor:
        return threat.project(batch.x, batch.x - threat.eps)


def test_my_own_attack_inline(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    adv = bastion.attack(model, x, y, Darker(), eps=EPS)
    assert torch.allclose(adv.x[:8], (x[:8] - EPS).clamp(min=0))
    result = bastion.evaluate(model, images, [Darker(), Square(queries=5)], eps=EPS, checks=False)
    assert len(result.accuracies()) == 4


def test_a_timm_model_with_its_normalisation() -> None:
    network = timm.create_model("resnet10t", num_classes=10)
    model = bastion.wrap(network, normalize="imagenet")
    x, y = torch.rand(2, 3, 64, 64), [0, 1]
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert torch.allclose(model.eval()(x), network.eval()((x - mean) / std), atol=1e-5)
    assert len(model.blocks()) == 4 and bastion.attack(model, x, y, "fgsm").x.shape == x.shape
    assert bastion.load("timm/resnet10t:pretrained=false").num_classes == 1000


def test_grey_images_and_options_of_timm() -> None:
    grey = nn.Sequential(nn.Flatten(), nn.Linear(784, 10))
    for name, mean in {"none": 0.0, "half": 0.5, "mnist": 0.1307}.items():
        wrapped = bastion.wrap(grey, name)
        assert wrapped.shape == (1, 28, 28) and wrapped.mean.item() == pytest.approx(mean)
    model = bastion.load("timm/resnet10t", pretrained=False, in_chans=1, num_classes=10)
    assert model.mean.item() == pytest.approx((0.485 + 0.456 + 0.406) / 3) and model.num_classes == 10
    assert model(torch.rand(1, 1, 64, 64)).shape == (1, 10)


def test_packages_are_there_after_the_import() -> None:
    code = "import bastion; print(bastion.__version__, bastion.attacks.PGD.__name__)\nfrom bastion import PGD"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split()[1] == "PGD" and done.stdout[0].isdigit()
    assert done.stderr.splitlines()[-1] == "ImportError: PGD is an attack: from bastion.attacks import PGD"
    with pytest.raises(AttributeError, match="did you mean 'evaluate'"):
        _ = bastion.evalute


def test_classes_are_where_one_looks_for_them() -> None:
    assert AutoAttack().named_members("linf")[0][0] == "apgd-ce" and FGSM() == PGD(
        steps=1, rel_step=1.0, random_start=False
    )
    with pytest.raises(ImportError, match="Fool"):
        from bastion.attacks import Fool  # noqa: F401


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (torch.rand(2, 3, 32, 32) * 4 - 2, [0, 1], "seem to be normalised already"),
        (torch.rand(2, 3, 32, 32) * 255, [0, 1], "divide them by 255"),
        (torch.rand(3, 32, 32), [0], r"add a batch axis: x\[None\]"),
        (torch.rand(2, 3, 32, 32), [0], "2 images, but 1 labels"),
        (torch.rand(2, 3, 32, 32), [0.5, 1], "got fractions"),
        (torch.rand(2, 3, 32, 32), [0, 10], "labels? (must be|10)"),
        (torch.full((2, 3, 32, 32), torch.nan), [0, 1], "pixels must be in"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(x: Tensor, y: Any, message: str, model: nn.Module) -> None:
    with pytest.raises(bastion.BastionError, match=message):
        bastion.attack(model, x, y, "pgd")
    with pytest.raises(bastion.BastionError, match=message):
        bastion.evaluate(model, (x, y), "pgd")


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (0.7, "data: example 1: labels: expected class numbers, got fractions"),
        (torch.eye(10)[3], r"data: example 1: label: expected one class number, got \(10,\); if one-hot"),
        ("cat", "data: example 1: label: cannot be read as numbers, got str"),
        (None, "data: example 1: label: cannot be read as numbers, got NoneType"),
    ],
)
def test_a_label_that_is_no_class_number_is_named(label: Any, message: str, model: nn.Module) -> None:
    class Labelled(Pairs):
        def __getitem__(self, number: int) -> Any:
            return self.x[number], label if number == 1 else np.array([3])  # (1,), as in MedMNIST

    with pytest.raises(bastion.BastionError, match=message):
        bastion.evaluate(model, Labelled(torch.rand(2, 3, 32, 32), torch.zeros(2)), "pgd")


def test_a_data_set_that_does_not_fit_into_memory_is_refused_after_its_first_image(model: nn.Module) -> None:
    class Endless(Dataset[Any]):
        read = 0

        def __len__(self) -> int:
            return 10**9

        def __getitem__(self, number: int) -> Any:
            self.read += 1
            return torch.zeros(3, 224, 224), 0

    for wrapped in (lambda data: data, lambda data: DataLoader(data, batch_size=2)):
        data = Endless()
        with pytest.raises(bastion.BastionError, match=r"1000000000 images of \(3, 224, 224\): needs .* limit= takes"):
            bastion.evaluate(model, wrapped(data), "pgd")
        assert data.read <= 2


def test_an_eps_in_levels_is_refused(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(bastion.BastionError, match="8/255 meant"):
        bastion.evaluate(model, images, "fgsm", eps=8)


@pytest.mark.parametrize("eps", [np.float32(0.5), torch.tensor(0.5), np.array([0.5], np.float32), torch.tensor([0.5])])
def test_an_eps_of_numpy_or_torch(eps: Any, model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    result = bastion.evaluate(model, images, "fgsm", norm="l2", eps=eps, checks=False)
    assert "ℓ2 ≤ 0.5" in result.table()


def test_a_norm_as_robustbench_writes_it(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    result = bastion.evaluate(model, images, "fgsm", norm="L2", eps=0.5, checks=False)
    assert "ℓ2 ≤ 0.5" in result.table() and bastion.attack(model, *images, "fgsm", norm="Linf").success.shape == (12,)


def test_a_plain_function_is_a_model_too(model: nn.Module, images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    model.eval()
    assert torch.equal(bastion.attack(lambda x: model(x), x, y, "fgsm").x, bastion.attack(model, x, y, "fgsm").x)
    result = bastion.evaluate(lambda x: model(x), images, "fgsm", checks=False)
    assert result.accuracies()["clean"].value == pytest.approx(8 / 12)


@pytest.mark.parametrize(
    "function", [lambda net: lambda x: net(x), lambda net: net.forward, lambda net: partial(nn.Module.__call__, net)]
)
def test_a_function_of_a_network_runs_it_in_eval_mode(function: Any, images: tuple[Tensor, Tensor]) -> None:
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Dropout(0.5), nn.Flatten(), nn.Linear(3 * 32 * 32, 10))
    expected = bastion.attack(deepcopy(network), *images, "pgd", eps=0.001)
    assert torch.equal(bastion.attack(function(network), *images, "pgd", eps=0.001).x, expected.x)
    assert network.training and network[1].training and network[0].num_batches_tracked == 0


def test_a_model_in_float64_is_attacked_in_float64(images: tuple[Tensor, Tensor]) -> None:
    x, y = images
    adv = bastion.attack(Net().double(), x.double(), y, "pgd")
    assert adv.x.dtype == adv.logits.dtype == torch.float64


@pytest.mark.filterwarnings("ignore:at-chance")
@pytest.mark.parametrize("kind", [np.float64, np.float16, np.uint8])
def test_arrays_of_another_precision_are_images_everywhere(kind: Any, model: nn.Module, tmp_path: Path) -> None:
    levels = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32))
    x, y = (levels if kind is np.uint8 else levels / 255).astype(kind), np.arange(40) % 10
    result = bastion.evaluate(model, (x, y), "fgsm", checks=False)
    assert result.accuracies()["fgsm"].value == pytest.approx(
        1 - float(bastion.attack(model, x, y, "fgsm").success.float().mean())
    )
    facts = bastion.measure(model, ([*x], y.tolist()), "accuracy", folder=tmp_path / "measured")
    assert facts.accuracies()["accuracy"].value == result.accuracies()["clean"].value
    assert bastion.train(model=Net(), data=(x, y), epochs=1, folder=tmp_path / "trained").card()


X, Y = torch.rand(2, 3, 32, 32), torch.tensor([0, 1])
WIDE = r"eps: no two images of 3 x 32 x 32 pixels .* 55.43 apart in l2, so 128 is no bound; 128/255 meant\?"
FLOAT64 = r"images are float32, the model's weights float64; convert the model with \.float\(\)"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "eps": (
        lambda: bastion.evaluate(Net(), (X, Y), "fgsm", eps="8 of 255"),
        "eps: expected a number such as 8/255, got",
    ),
    "l2": (lambda: bastion.evaluate(Net(), (X, Y), "fgsm", norm="l2"), "eps: give one, such as 0.5; only linf has a d"),
    "l1": (
        lambda: bastion.attack(Net(), X, Y, "fgsm", norm="L1"),
        "eps: give one, such as 12; only linf has a default",
    ),
    "steps": (
        lambda: bastion.evaluate(Net(), (X, Y), steps=5),
        r'^evaluate: steps is a setting of an attack: attacks=\[{"name": "pgd", "steps": 5}\]$',
    ),
    "queries": (
        lambda: bastion.evaluate(Net(), (X, Y), queries=5),
        r'^evaluate: queries is a setting of an attack: attacks=\[{"name": "square", "queries": 5}\]$',
    ),
    "epsilon": (
        lambda: bastion.evaluate(Net(), (X, Y), epsilon=0.1),
        "^evaluate: unknown argument 'epsilon'; did you mean 'eps'",
    ),
    "lr": (
        lambda: bastion.train(model=Net(), data=(X, Y), lr=0.1),
        r'^train: lr is a setting of the recipe: changes={"optimizer.lr": 0.1}$',
    ),
    "batch": (
        lambda: bastion.train("tiny/demo-standard", batch=64),
        r'^train: batch is a setting of the recipe: changes={"batch": 64}$',
    ),
    "dataset": (
        lambda: bastion.train("tiny/demo-standard", dataset="mnist"),
        "^train: unknown argument 'dataset'; did you mean 'data'",
    ),
    "wide": (lambda: bastion.attack(Net(), X, Y, "fgsm", norm="l2", eps=128), WIDE),
    "wider": (lambda: bastion.evaluate(Net(), (X, Y), "fgsm", norm="l2", eps=128), WIDE),
    "twice": (
        lambda: bastion.wrap(bastion.wrap(Net(), normalize="half"), normalize="half"),
        "normalises its images al",
    ),
    "bytes": (lambda: bastion.wrap(Net(), mean=(124, 116, 104), std=(58, 57, 57)), "mean of 124; divide by 255"),
    "no batch": (lambda: bastion.attack(Net(), X, Y, batch_size=0), "batch_size: must be a whole number of at least 1"),
    "half a batch": (lambda: bastion.attack(Net(), X, Y, batch_size=2.5), "batch_size: must be a whole number"),
    "float64": (lambda: bastion.evaluate(Net().double(), (X, Y), "fgsm"), FLOAT64),
    "wrap": (lambda: bastion.wrap(Net().double(), normalize="imagenet"), FLOAT64),
    "train": (lambda: bastion.train(model=Net().double(), data=(X, Y), epochs=1), FLOAT64),
    "x, y": (lambda: bastion.evaluate(Net(), X, Y), r"give images and labels together: evaluate\(model, \(x, y\), …\)"),
    "dict": (lambda: bastion.evaluate(Net(), {"x": X, "y": Y}), r"data: expected \(x, y\), .* got a dict of x, y$"),
    "one-hot": (lambda: bastion.attack(Net(), X, torch.eye(10)[:2]), r"got \(2, 10\); if one-hot, argmax\(1\)$"),
    "text": (lambda: bastion.attack(Net(), X, ["cat", "dog"]), r"numbers, got list \(such as 'cat'\)$"),
    "grey": (lambda: bastion.attack(Net(), X[:, 0], Y), r"for grey images, a channel axis: x\[:, None\]"),
    "tuple": (lambda: bastion.evaluate(lambda x: (Net()(x), x), (X, Y)), "in .0, 1.; it gave tuple$"),
    "weights": (
        lambda: bastion.attack(Net().state_dict(), X, Y),
        "got a dict of weights; load them into their network",
    ),
    "setting": (lambda: bastion.attack(Net(), X, Y, "pgd", iters=3), "attack.iters: unknown key; did you mean 'steps'"),
    "object": (lambda: bastion.attack(Net(), X, Y, PGD(), steps=3), "steps= goes with the name of an attack"),
    "position": (lambda: PGD(Net()), r"^pgd: settings are given by name, .* bastion.attack\(model, x, y"),
    "suite": (lambda: bastion.measure(Net(), (X, Y), "pgd"), r"no suite 'pgd'.* an attack: `--attack pgd`, in Python"),
    "same eps": (lambda: bastion.evaluate(Net(), (X, Y), "fgsm", eps=[0.1, 0.1]), "^suite: 'fgsm eps=0.1': two rows"),
    "unknown": (
        lambda: bastion.attack(Net(), X, Y, "boundary"),
        "unknown attack 'boundary'; see `bastion list attacks`$",
    ),
    "size": (lambda: bastion.attack(Net(), torch.rand(2, 3, 8, 8), Y), r"does not take images \(B, 3, 8, 8\): Run"),
    "class": (lambda: bastion.attack(Net, X, Y), r"model: expected .* got the class Net; give Net\(…\)"),
    "attack": (lambda: bastion.attack(Net(), X, Y, PGD), r"attack: give PGD\(\), not the class"),
    "attacks": (lambda: bastion.evaluate(Net(), (X, Y), PGD), r"attack: give PGD\(\), not the class"),
    "objective": (lambda: bastion.train("tiny/demo-robust", objective=Trades), r"give Trades\(\), not the class$"),
    "attack's epsilon": (lambda: bastion.attack(Net(), X, Y, epsilon=0.1), r"argument 'epsilon'; did you mean 'eps'\?"),
    "images": (lambda: bastion.attack(Net(), images=X, labels=Y), r"argument 'images'; did you mean 'x'\?"),
    "no labels": (lambda: bastion.attack(Net(), X), r"give images and labels: bastion.attack\(model, x, y, …\)"),
    "changes": (
        lambda: bastion.measure(Net(), (X, Y), "quick", changes={"epsilon": 0.1}),
        r"epsilon: unknown key; did you mean 'eps'\?",
    ),
    "options": (lambda: bastion.load("zoo/cifar10-linf-vit", pretrained=False), "pretrained= is for timm's models"),
    "norm": (lambda: bastion.attack(Net(), X, Y, norm="L0"), "threat.norm: unknown norm 'l0'; known: l1, l2, linf"),
    "no model": (lambda: bastion.evaluate(None, (X, Y)), "model: expected a torch.nn.Module, .* got None"),
    "mean": (lambda: bastion.wrap(Net(), mean=0.5, std=0.5), "wrap: mean and std need one number for each channel"),
    "compare": (lambda: bastion.compare(Net(), Net()), "expected a run directory or the name of .*, got Net; `meas"),
    "report": (lambda: bastion.report(Net(), "report.html"), "expected a run directory or the name of .*, got Net"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_call_is_told_in_one_line(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(bastion.BastionError, match=message):
        call()


def test_studies_alone_have_no_columns_of_examples(images: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    facts = bastion.measure(Net(), images, {"studies": {"sparse": "sparsity"}}, folder=tmp_path / "run")
    with pytest.raises(bastion.BastionError, match="the suite has only studies; use `studies"):
        facts.to_csv(tmp_path / "facts.csv")


def test_files_of_one_name_are_not_taken_for_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for seed, folder in enumerate("abc"):
        path = tmp_path / folder / "mine.py"
        path.parent.mkdir()
        path.write_text(
            f"import torch\n\ndef net():\n    torch.manual_seed({seed})\n"
            "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3072, 10))\n"
        )
    suite = {"probes": {"clean": "accuracy"}}
    a, b = (bastion.measure(f"{folder}/mine.py:net", suite=suite, limit=8).run for folder in "ab")
    assert [find_run(f"{folder}/mine.py:net").folder for folder in "ab"] == [a.folder, b.folder]
    assert find_run(tmp_path / "a" / "mine.py:net").folder == a.folder  # however the path is written
    with pytest.raises(bastion.BastionError, match=f"no run is known to be of this file.*{a.folder} .*a/mine.py:net"):
        bastion.report("c/mine.py:net", "c.html")
    (path,) = b.measurements.iterdir()
    storage.write_json(path, {name: each for name, each in storage.read_json(path).items() if name != "source"})
    shutil.rmtree(a.folder)
    assert find_run("b/mine.py:net").folder == b.folder  # measured before paths were stored, and the only one


def test_a_network_that_a_function_of_my_file_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))\n"
        "\ndef boom():\n    raise OSError('no weights')\n\ndef two(width):\n    return torch.nn.Linear(width, 2)\n"
    )
    facts = bastion.measure("mine.py:net", suite={"probes": {"clean": "accuracy"}}, limit=8)
    assert facts.run.folder.name.startswith("mine.py-net-") and facts.about.model == "mine.py:net"
    bastion.report("mine.py:net", "report.html")
    with pytest.raises(bastion.BastionError, match=r"mine.py: no function 'nett'; did you mean 'net'\?"):
        bastion.load("mine.py:nett")
    with pytest.raises(bastion.BastionError, match=r"mine.py:boom\(\): OSError: no weights"):
        bastion.load("mine.py:boom")
    with pytest.raises(bastion.BastionError, match=r"mine.py:two\(\): TypeError: two\(\) missing 1 required"):
        bastion.load("mine.py:two")
    with pytest.raises(bastion.BastionError, match="mine.py: is a file; give the function .* mine.py:FUNCTION"):
        bastion.load("mine.py")

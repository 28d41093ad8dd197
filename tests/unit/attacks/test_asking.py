"""What attacks refuse to work with, and say so; the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.conftest import MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks import journal
from bastion.attacks.apgd import APGD
from bastion.attacks.ensemble import AutoAttack, Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.minimal import Minimal
from bastion.attacks.patch import PatchNoise, PatchOcclusion, PatchPGD
from bastion.attacks.pgd import PGD
from bastion.attacks.square import Square
from bastion.attacks.transfer import Transferable
from bastion.types import Attack, Batch

THREAT = Threat("linf", 0.1)
ATTACKS: list[Attack] = [
    PGD(steps=2),
    PGD(steps=2, keep="last"),
    APGD(steps=3),
    FAB(steps=2, targets=2),
    Square(queries=5),
    Minimal(fab_steps=2, bisections=1, steps=2),
    PatchPGD(steps=2, size=2),
    PatchNoise(size=2),
    PatchOcclusion(size=2),
    Transferable(steps=2, size=2),
    Ensemble(members=(APGD(steps=2),)),
]
every = pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: type(attack).__name__)


class Answering(nn.Module):
    """A linear model whose logits are made into something else."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.change = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.body(x))


def images(n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, 4, 4, generator=generator)
    return Batch(torch.arange(n), x, Answering(lambda z: z)(x).argmax(1))


@every
def test_inference_mode_is_refused(attack: Attack) -> None:
    """No gradient exists there: every attack would find nothing, and every model look robust."""
    with torch.inference_mode(), pytest.raises(BastionError, match="inside torch.inference_mode"):
        attack(Answering(lambda z: z).eval(), images(), THREAT, seed=0)


@every
def test_images_made_in_inference_mode_are_taken(attack: Attack) -> None:
    with torch.inference_mode():
        batch = images()
    x = attack(Answering(lambda z: z).eval(), batch, THREAT, seed=0)
    assert torch.equal(x, attack(Answering(lambda z: z).eval(), images(), THREAT, seed=0))


@every
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda z: (z, z), "got tuple"),
        (lambda z: {"logits": z}, "got dict"),
        (lambda z: z[:, 0], r"got float32 \(\d,\)"),
        (lambda z: z[:, :, None], r"got float32 \(\d, 4, 1\)"),
        (lambda z: z[:1], r"got float32 \(1, 4\)"),
        (lambda z: z.round().long(), r"got int64 \(\d, 4\)"),
    ],
)
def test_answers_that_are_no_logits_are_refused(attack: Attack, change: Callable[[Tensor], Any], got: str) -> None:
    with pytest.raises(BastionError, match=f"must give logits of at least 2 classes, .* {got}"):
        attack(Answering(change).eval(), images(), THREAT, seed=0)


@every
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (torch.full((6,), 4), "the model has 4 classes, the batch the label 4"),
        (torch.full((6, 7), 1 / 7), "the model has 4 classes, the batch soft labels of 7 classes"),
        (torch.ones(6, 1, dtype=torch.int64), r"got torch.int64 \(6, 1\)"),
        (torch.ones(6, 4, dtype=torch.int64), r"got torch.int64 \(6, 4\)"),
        (torch.ones(6, 4, 1), r"got torch.float32 \(6, 4, 1\)"),
    ],
)
def test_labels_that_do_not_fit_are_refused(attack: Attack, y: Tensor, message: str) -> None:
    """The model does not say how many classes it has: that is known when it has answered."""
    with pytest.raises(BastionError, match=message):
        attack(Answering(lambda z: z).eval(), images()._replace(y=y), THREAT, seed=0)


@every
@pytest.mark.parametrize("kind", [torch.int32, torch.uint8, torch.int16])
def test_labels_may_be_any_integers(attack: Attack, kind: torch.dtype) -> None:
    model, batch = Answering(lambda z: z).eval(), images()
    x = attack(model, batch._replace(y=batch.y.to(kind)), THREAT, seed=0)
    assert torch.equal(x, attack(model, batch, THREAT, seed=0))


@every
@pytest.mark.parametrize("kind", [torch.float64, torch.float16])
def test_a_model_of_another_precision_says_so(attack: Attack, kind: torch.dtype) -> None:
    model = Answering(lambda z: z).eval().to(kind)
    with pytest.raises(BastionError, match=f"images are float32, the model's weights {str(kind)[6:]}"):
        attack(model, images(), THREAT, seed=0)


@every
def test_what_comes_back_has_no_graph(attack: Attack) -> None:
    batch = images()
    batch.x.requires_grad_()
    assert not attack(Answering(lambda z: z).eval(), batch, THREAT, seed=0).requires_grad


@every
def test_a_model_may_write_into_its_input(attack: Attack) -> None:
    class Normalising(Answering):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x.sub_(0.5))

    batch, untouched = images(), images()
    x = attack(Normalising(lambda z: z).eval(), batch, THREAT, seed=0)
    assert torch.equal(batch.x, untouched.x)
    assert THREAT.contains(batch.x, x).all()


def test_batchnorm_in_training_mode_with_one_image_left_is_told() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)).eval()
    body[1].train()
    batch = images(1)
    for attack in (PGD(steps=2), APGD(steps=2)):
        with pytest.raises(BastionError, match="put it in eval mode"):
            attack(body, batch, THREAT, seed=0)
    APGD(steps=2, keep="best")(body, images(6), THREAT, seed=0)  # never asks about one image alone


@every
def test_passes_are_counted(attack: Attack) -> None:
    """As many as really go through the model, example by example."""
    asked: list[int] = []
    model = Answering(lambda z: (asked.append(len(z)), z)[1]).eval()
    batch = images()
    with journal.opened() as notes:
        attack(model, batch, THREAT, seed=0)
    judged = 2 * 6 if isinstance(attack, Ensemble) else 0  # which is no pass of an attack
    calibration = int(isinstance(attack, APGD | FAB | Square | Minimal | Ensemble))
    assert sum(notes.forwards.values()) == sum(asked) - judged - calibration
    assert set(notes.forwards) == set(range(6))


@pytest.mark.parametrize(
    "attack",
    [PGD(steps=3), PGD(steps=3, keep="last"), APGD(steps=3), PatchPGD(steps=3, size=2), Transferable(steps=3, size=2)],
    ids=lambda attack: type(attack).__name__,
)
def test_a_model_that_shows_no_gradient_is_noticed(attack: Attack) -> None:
    with journal.opened() as notes:
        attack(Answering(lambda z: z.detach()).eval(), images(), THREAT, seed=0)
    assert notes.notices == {"blind-start": set(range(6))}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AutoAttack(version="Rand"), "autoattack.version: unknown version 'Rand'; did you mean 'rand'"),
        (lambda: APGD(keep="Fooled"), "apgd.keep: unknown keep 'Fooled'; did you mean 'fooled'"),
        (lambda: APGD(loss="xent"), "apgd.loss: unknown loss 'xent'; known: ce, dlr, margin"),
        (lambda: PGD(keep="lst"), "pgd.keep: unknown keep 'lst'; did you mean 'last'"),
        (lambda: PGD(loss="KL"), "pgd.loss: unknown loss 'KL'"),
        (lambda: FAB(keep="near"), "fab.keep: unknown keep 'near'; did you mean 'nearest'"),
        (lambda: PatchPGD(choose="grad"), "patch-pgd.choose: unknown choose 'grad'; did you mean 'gradient'"),
        (lambda: Transferable(loss="bce"), "transferable.loss: unknown loss 'bce'; did you mean 'ce'"),
    ],
)
def test_misspelt_words_are_refused(make: Callable[[], Attack], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        make()


@pytest.mark.parametrize("mask", [-1e9, -torch.inf])
def test_a_masked_class_changes_nothing(make_linear: MakeLinear, mask: float) -> None:
    """A logit that no image can raise says nothing about how sure a hit is."""
    plain, batch = make_linear(classes=5, n=12)

    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([plain(x), torch.full((len(x), 1), mask, dtype=x.dtype)], 1)

    attacks: list[Attack] = [
        APGD(steps=10, loss="margin", targets=4),
        FAB(steps=10, targets=4, keep="nearest"),
        Minimal(fab_steps=10, fab_targets=4, bisections=4, steps=10),
    ]
    for attack in attacks:
        results, passes = [], []
        for model in (plain, Masked()):
            with journal.opened() as notes:
                results.append(attack(model, batch, Threat("l2", 3.0), seed=0))
            passes.append(notes.forwards)
        assert torch.equal(*results)
        assert passes[0] == passes[1]

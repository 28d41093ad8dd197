"""What attacks refuse to work with, and say so; the same for all of them."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat, journal
from bastion.acceleration import accelerate, for_training
from bastion.attacks.apgd import APGD
from bastion.attacks.cw import CW
from bastion.attacks.deepfool import DeepFool
from bastion.attacks.ensemble import AutoAttack, Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.judge import judge
from bastion.attacks.minimal import Minimal
from bastion.attacks.patch import PatchNoise, PatchOcclusion, PatchPGD
from bastion.attacks.pgd import PGD
from bastion.attacks.square import Square
from bastion.attacks.transfer import Transferable
from bastion.forward import misclassified, predict
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


def combined(names: tuple[str, ...], cases: list[tuple[Any, ...]]) -> pytest.MarkDecorator:
    """Every attack in the first case, and the first attack in every case: one function refuses for all of them."""
    pairs = [(ATTACKS[0], *case) for case in cases] + [(attack, *cases[0]) for attack in ATTACKS[1:]]
    return pytest.mark.parametrize(("attack", *names), pairs)


class Answering(nn.Module):
    """A linear model whose logits are made into something else."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.change = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)), change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.body(x))


class Converting(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16)


def images(n: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, 4, 4, generator=generator)
    return Batch(torch.arange(n), x, Answering(lambda z: z)(x).argmax(1))


@every
def test_inference_mode_is_refused(attack: Attack) -> None:
    """No gradient exists there: every attack would find nothing, and every model look robust."""
    with torch.inference_mode(), pytest.raises(BastionError, match="no attacks inside torch.inference_mode"):
        attack(Answering(lambda z: z).eval(), images(), THREAT, seed=0)


@every
def test_images_made_in_inference_mode_are_taken(attack: Attack) -> None:
    with torch.inference_mode():
        batch = images()
    x = attack(Answering(lambda z: z).eval(), batch, THREAT, seed=0)
    assert torch.equal(x, attack(Answering(lambda z: z).eval(), images(), THREAT, seed=0))


@combined(
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


@combined(
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


@combined(("kind",), [(torch.int32,), (torch.uint8,), (torch.int16,)])
def test_labels_may_be_any_integers(attack: Attack, kind: torch.dtype) -> None:
    model, batch = Answering(lambda z: z).eval(), images()
    x = attack(model, batch._replace(y=batch.y.to(kind)), THREAT, seed=0)
    assert torch.equal(x, attack(model, batch, THREAT, seed=0))


def test_the_judge_takes_any_integers_and_refuses_what_attacks_refuse() -> None:
    model, batch = Answering(lambda z: z).eval(), images()
    verdict = judge(model, batch._replace(y=batch.y.to(torch.uint8)), PGD(steps=2), THREAT, seed=0)
    assert torch.equal(verdict.fooled, judge(model, batch, PGD(steps=2), THREAT, seed=0).fooled)
    for known in (None, 9):
        model.num_classes = known
        with pytest.raises(BastionError, match="the model has 4 classes, the batch the label 7"):
            judge(model, batch._replace(y=torch.full((6,), 7)), PGD(steps=2), THREAT, seed=0)


def test_an_answer_in_better_precision_is_not_rounded() -> None:
    model = Answering(lambda z: torch.tensor([[1, 1 + 1e-9, 0, 0]], dtype=torch.float64).repeat(len(z), 1)).eval()
    batch = images()._replace(y=torch.ones(6, dtype=torch.int64))
    assert not misclassified(predict(model, batch), batch.y).any()
    assert judge(model, batch, PGD(steps=1), THREAT, seed=0).clean.all()


def test_other_errors_of_a_model_are_its_own() -> None:
    def fail(message: str) -> Any:
        raise RuntimeError(message)

    model = Answering(lambda z: fail("out of memory")).eval()
    model.body.to(torch.bfloat16)  # which is not what it fails by
    model.body.insert(0, Converting())
    with pytest.raises(RuntimeError, match="out of memory"):
        PGD(steps=1)(model, images(), THREAT, seed=0)


@combined(("kind",), [(torch.float64,), (torch.float16,)])
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


@pytest.mark.filterwarnings("ignore:.*the model is in training mode")  # which is the point
def test_batchnorm_in_training_mode_with_one_image_left_is_told() -> None:
    body = nn.Sequential(nn.Conv2d(3, 8, 4), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(8, 4)).eval()
    body[1].train()
    batch = images(1)
    for attack in (PGD(steps=2), APGD(steps=2)):
        with pytest.raises(BastionError, match="put the model in eval mode"):
            attack(body, batch, THREAT, seed=0)
    APGD(steps=2, keep="best")(body, images(6), THREAT, seed=0)  # never asks about one image alone


@pytest.mark.parametrize(
    "attack",
    [
        *ATTACKS,
        PGD(steps=2, targets=2, restarts=2),
        PGD(steps=2, loss="kl"),
        PGD(steps=2, loss="dlr"),
        PatchPGD(steps=2, size=2, restarts=2, choose="random"),
        PatchNoise(size=2, draws=3, choose="gradient"),
    ],
    ids=repr,
)
def test_passes_are_counted(attack: Attack) -> None:
    """As many as really go through the model, forwards and backwards."""
    passes = [0, 0]

    def count(logits: Tensor) -> Tensor:
        passes[0] += len(logits)
        if logits.requires_grad:
            logits.register_hook(lambda gradient: passes.__setitem__(1, passes[1] + len(gradient)))
        return logits

    model = accelerate(Answering(count).eval())
    with model.ready(images().x):  # is prepared
        passes[:] = 0, 0
    with journal.opened() as notes:
        attack(model, images(), THREAT, seed=0)
    judged = 6 if isinstance(attack, Ensemble) else 0  # which is no pass of an attack
    assert sum(notes.forwards.values()) == passes[0] - judged
    assert sum(notes.backwards.values()) == passes[1]
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


class Trembling(nn.Module):
    """Two logits that cross at zero and one far below; in a batch they are not quite what they are alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(48, generator=torch.Generator().manual_seed(1)) / 7)

    def forward(self, x: Tensor) -> Tensor:
        z = (x.flatten(1) - 0.5) @ self.weight + (8e-6 if len(x) > 1 else -8e-6)
        return torch.stack([-z, z, torch.full_like(z, -20.0)], 1)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_a_lead_below_the_rounding_of_the_largest_logit_is_none(norm: Any) -> None:
    """However small the two logits are that it is the difference of."""
    model = Trembling()
    x = torch.rand(16, 3, 4, 4, generator=torch.Generator().manual_seed(2))
    x = x[(x.flatten(1) - 0.5) @ model.weight < -1e-3]
    batch = Batch(torch.arange(len(x)), x, torch.zeros(len(x), dtype=torch.int64))
    threat = Threat(norm, {"linf": 1.0, "l2": 4.0, "l1": 40.0}[norm])
    for attack in (FAB(steps=20, targets=2, keep="nearest", overshoot=1.0001), Minimal(fab_steps=10, steps=10)):
        points = attack(model, batch, threat, seed=0)
        assert all(model(point[None]).argmax(1) == 1 for point in points)


@pytest.mark.parametrize("part", [nn.BatchNorm2d(3), nn.Dropout(0.1)], ids=lambda part: type(part).__name__)
def test_a_model_in_training_mode_is_told(part: nn.Module) -> None:
    model = nn.Sequential(part, nn.Flatten(), nn.Linear(12, 3))
    batch = Batch(torch.arange(4), torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.int64))
    for attack in (PGD(steps=1), APGD(steps=1)):
        with pytest.warns(UserWarning, match=r"the model is in training mode, .* call model.eval\(\) first"):
            attack(model.train(), batch, THREAT, seed=0)
        attack(nn.Sequential(model.eval()), batch, THREAT, seed=0)  # the wrapper alone does nothing otherwise
        with for_training(model.train()) as prepared:
            attack(prepared, batch, THREAT, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PGD(steps=2.5), r"pgd.steps: expected a whole number, got 2.5"),
        (lambda: PGD(steps=True), r"pgd.steps: expected a whole number, got True"),
        (lambda: PGD(momentum=float("nan")), r"pgd.momentum: expected a finite number, got nan"),
        (lambda: PGD(rel_step="1"), r"pgd.rel_step: expected a number, got '1'"),
        (lambda: PGD(random_start=1), r"pgd.random_start: expected true or false, got 1"),
        (lambda: APGD(eot=1.5), r"apgd.eot: expected a whole number, got 1.5"),
        (lambda: FAB(overshoot=float("inf")), r"fab.overshoot: expected a finite number, got inf"),
        (lambda: Square(queries="1e3"), r"square.queries: expected a whole number, got '1e3'"),
        (lambda: CW(c=None), r"cw.c: expected a number, got None"),
        (lambda: DeepFool(classes="10"), r"deepfool.classes: expected a whole number, got '10'"),
        (lambda: Minimal(steps=None), r"minimal.steps: expected a whole number, got None"),
    ],
)
def test_settings_of_another_kind_are_refused_in_python_too(make: Callable[[], Attack], message: str) -> None:
    with pytest.raises(BastionError, match=message):
        make()


def test_numbers_of_numpy_are_numbers() -> None:
    assert PGD(steps=np.int64(2), step=np.float32(0.1)).steps == 2
    assert Threat("linf", np.float32(0.1)).eps == np.float32(0.1)
    assert repr(Threat("l2", np.float16(0.5))) == repr(Threat("l2", 0.5))
    with pytest.raises(BastionError, match="threat.eps: expected a number"):
        Threat("linf", Fraction(8, 255))

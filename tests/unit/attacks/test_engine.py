"""Searches share batches and nothing else; what one costs is counted; the model is left as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import Linear, MakeLinear, unaccelerated
from tests.oracles import nearest
from torch import Tensor, nn

from bastion import BastionError, Threat, journal
from bastion.acceleration import Accelerated
from bastion.attacks.apgd import APGD
from bastion.attacks.engine import Jobs, Search, SearchState, attack, initial_state, run_searches
from bastion.attacks.ensemble import AutoAttack, Ensemble
from bastion.attacks.fab import FAB
from bastion.attacks.judge import judge
from bastion.attacks.losses import ce, margin
from bastion.attacks.minimal import Minimal
from bastion.attacks.pgd import PGD
from bastion.attacks.square import Square
from bastion.forward import Best, misclassified
from bastion.threat import Norm
from bastion.types import Attack, Batch

NORMS: list[Norm] = ["linf", "l2", "l1"]
ORDER = [5, 2, 0]  # of some examples
ATTACKS: list[Attack] = [
    APGD(steps=12, restarts=2),
    APGD(steps=7, loss="dlr", targets=3),
    APGD(steps=6, restarts=2, keep="best"),
    FAB(steps=5, restarts=2),
    FAB(steps=6, targets=3),
    Square(queries=25),
]


class Fortress(Linear):
    """Linear, and class 0 wins at every point of the box; its gradients do not vanish."""

    def __init__(self, classes: int = 5, size: int = 90) -> None:
        generator = torch.Generator().manual_seed(1)
        bias = torch.zeros(classes, dtype=torch.float64)
        bias[0] = 30.0
        super().__init__(0.1 * torch.randn(classes, size, generator=generator, dtype=torch.float64), bias)


class Ramp(nn.Module):
    """Grey images of 0.5 + t, t = 0 clean. The wrong class leads by what `lead` says of t."""

    def __init__(self, lead: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lead = lead
        self.asked = 0

    def forward(self, x: Tensor) -> Tensor:
        self.asked += len(x)
        lead = self.lead(x.flatten(1).mean(1) - 0.5)
        return torch.stack([torch.ones_like(lead), 1 + lead], 1) + 0 * x.sum()


def grey(n: int = 3) -> Batch:
    return Batch(torch.arange(n), torch.full((n, 1, 2, 2), 0.5, dtype=torch.float64), torch.zeros(n, dtype=torch.int64))


class Walk(Search[SearchState]):
    """Asks about x0 + 0.1, x0 + 0.2, … and wants no gradient."""

    def __init__(self, steps: int = 4) -> None:
        self.steps = steps

    def start(self, jobs: Jobs, batch: Batch) -> SearchState:
        return SearchState(**initial_state(jobs, batch, batch.x + 0.1))

    def wants_gradient(self, state: SearchState) -> Tensor:
        return torch.zeros_like(state.done)

    def loss(self, state: SearchState, logits: Tensor) -> Tensor:
        return margin(logits, state.y)

    def update(self, state: SearchState, logits: Tensor, gradient: Tensor) -> None:
        state.step = state.step + 1
        state.done = state.step >= self.steps
        state.x = state.x + 0.1


def walked(model: nn.Module, batch: Batch, goal: Any = "hit", *, eps: float = 0.45, restarts: int = 1) -> Best:
    found = Best(batch.x)
    return run_searches(
        Walk(), unaccelerated(model, 8), batch, Threat("linf", eps), found, goal=goal, restarts=restarts
    )


def offsets(found: Best) -> list[float]:
    return [round(value, 9) for value in (found.x - 0.5)[:, 0, 0, 0].tolist()]


def cases(make_linear: MakeLinear, norm: Norm, n: int = 6) -> tuple[Linear, Batch, Threat]:
    """Half of the examples can be fooled."""
    model, batch = make_linear(classes=5, n=n)
    return model, batch, Threat(norm, nearest(norm, model, batch).median().item())


def _in_company(attack: Attack, model: Linear, batch: Batch, threat: Threat) -> list[tuple[Tensor, Tensor]]:
    """What the attack finds one run at a time, and in other company: any batch_size, any order, other examples."""
    alone = attack(unaccelerated(model, 1), batch, threat, seed=2)
    pairs = [(alone, attack(unaccelerated(model, batch_size), batch, threat, seed=2)) for batch_size in (5, 256)]
    order = torch.tensor(ORDER)
    return [*pairs, (alone[order], attack(model, batch.select(order), threat, seed=2))]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "attack",
    [
        APGD(steps=12),
        APGD(steps=6, restarts=2, keep="best"),
        FAB(steps=5),
        FAB(steps=6, targets=1),
        FAB(steps=5, targets=3, restarts=2, keep="nearest"),
        Square(queries=25),
    ],
    ids=repr,
)
def test_runs_do_not_see_each_other(make_linear: MakeLinear, attack: Attack, norm: Norm) -> None:
    for alone, together in _in_company(attack, *cases(make_linear, norm)):
        assert torch.allclose(together, alone, atol=1e-9, rtol=0)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    "attack", [APGD(steps=7, restarts=2), APGD(steps=7, loss="dlr", targets=3), FAB(steps=4, restarts=2)], ids=repr
)
def test_who_is_fooled_does_not_depend_on_the_company(make_linear: MakeLinear, attack: Attack, norm: Norm) -> None:
    model, batch, threat = cases(make_linear, norm)
    y = [batch.y, batch.y, batch.y[ORDER]]
    for (alone, together), labels in zip(_in_company(attack, model, batch, threat), y, strict=True):
        assert torch.equal(misclassified(model(together), labels), misclassified(model(alone), labels))


def test_the_point_found_by_several_runs_does_not_depend_on_the_company(make_linear: MakeLinear) -> None:
    for alone, together in _in_company(APGD(steps=12, restarts=2), *cases(make_linear, "linf")):
        assert torch.allclose(together, alone, atol=1e-9, rtol=0)


class Sizes(Accelerated):
    """Keeps the sizes of the batches that it runs."""

    def __init__(self, model: nn.Module, batch_size: int) -> None:
        super().__init__(model.eval(), enabled=False, batch_size=batch_size)
        self.sizes: list[int] = []

    def logits(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return super().logits(x)


def fortress(n: int = 6) -> tuple[Fortress, Batch]:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(n, 3, 6, 5, generator=generator, dtype=torch.float64)
    return Fortress(), Batch(10 + torch.arange(n), x, torch.zeros(n, dtype=torch.int64))


def test_more_searches_than_fit_are_worked_off_in_full_batches() -> None:
    model, batch = fortress(6)
    model_ = Sizes(model, batch_size=5)
    APGD(steps=3, loss="dlr", targets=4)(model_, batch, Threat("linf", 0.05), seed=0)
    clean, searches = model_.sizes[:2], model_.sizes[2:]
    assert clean == [5, 1]
    assert searches == [5] * 4 * 4 + [4] * 4  # 24 runs: four pools of 5 and one of 4, four passes each


def test_a_run_that_is_over_makes_room_at_once() -> None:
    """Runs of different lengths: no lane is empty while a run waits."""
    lead = torch.tensor([0.15, 9.0, 9.0, 0.15, 9.0, 9.0, 9.0], dtype=torch.float64)

    class Early(nn.Module):
        """Examples are told apart by their last pixel."""

        def forward(self, x: Tensor) -> Tensor:
            which = (x[:, 0, -1, -1] * 1000).round().long() % 100
            fooled = (x[:, 0, 0, 0] > 0.5 + lead[which]).double()
            return torch.stack([1 - fooled, fooled], 1)

    batch = grey(7)
    batch.x[:, 0, -1, -1] = torch.arange(7, dtype=torch.float64) / 1000
    model_ = Sizes(Early(), batch_size=4)
    found = run_searches(Walk(4), model_, batch, Threat("linf", 0.45), Best(batch.x))
    assert found.fooled.tolist() == [True, False, False, True, False, False, False]
    # Passes of the runs: 2, 4, 4, 2, 4, 4, 4.
    assert sum(model_.sizes) == 24
    assert model_.sizes == [4, 4, 4, 4, 3, 3, 1, 1]


@pytest.mark.parametrize(("jobs", "sizes"), [(5, [5]), (7, [7]), (9, [5, 4]), (15, [5, 5, 5]), (2, [2])])
def test_runs_are_shared_out_evenly(jobs: int, sizes: list[int]) -> None:
    """Runs of one length, five batch_size: no small batch is left for the end."""
    model, batch = fortress(jobs)
    model_ = Sizes(model, batch_size=5)
    run_searches(Walk(1), model_, batch, Threat("linf", 0.1), Best(batch.x))
    assert model_.sizes == sizes


def test_batches_are_never_too_large_when_searches_want_different_things(make_linear: MakeLinear) -> None:
    model, batch, threat = cases(make_linear, "l2", n=10)
    model_ = Sizes(model, batch_size=4)
    FAB(steps=6, targets=3)(model_, batch, threat.scaled(0.5), seed=0)
    assert max(model_.sizes) == 4


@pytest.mark.parametrize(("batch_size", "forwards"), [(1, 2), (3, 2), (24, 1 + 8)])
def test_the_other_runs_of_a_settled_example_are_dropped(batch_size: int, forwards: int) -> None:
    """Every point but the clean one fools. Of 8 runs an example, only those that share the first batch are made."""
    model = Ramp(lambda t: torch.where(t == 0, -1.0, 1.0).double())
    batch = grey(3)
    with journal.opened() as notes:
        x = APGD(steps=5, restarts=8)(unaccelerated(model, batch_size), batch, Threat("linf", 0.1), seed=0)
    assert misclassified(model(x), batch.y).all()
    assert notes.forwards == dict.fromkeys(range(3), forwards)
    assert notes.backwards == dict.fromkeys(range(3), forwards - 1)


@pytest.mark.parametrize(
    ("attack", "norm", "forwards", "backwards"),
    [
        (APGD(steps=10), "linf", 1 + 11, 10),
        (APGD(steps=10), "l2", 1 + 11, 10),
        (APGD(steps=10), "l1", 1 + 4 + 4 + 5, 10),  # every ball's first point is asked about
        (APGD(steps=10, phases=False), "l1", 1 + 11, 10),
        (APGD(steps=2), "l1", 1 + 3, 2),
        (APGD(steps=1), "l1", 1 + 2, 1),
        (APGD(steps=0), "linf", 1 + 1, 0),
        (APGD(steps=5, restarts=3), "linf", 1 + 3 * 6, 15),
        (APGD(steps=5, loss="dlr", targets=4), "linf", 1 + 4 * 6, 20),
        (APGD(steps=5, loss="dlr", targets=9), "linf", 1 + 4 * 6, 20),  # five classes have four wrong ones
        (APGD(steps=5, targets=2, restarts=2), "l2", 1 + 4 * 6, 20),
        (APGD(steps=5, eot=3), "linf", 1 + 3 * 6, 15 + 0),
        (APGD(steps=5, keep="best"), "linf", 1 + 6, 5),
        (FAB(steps=6, targets=3), "linf", 1 + 3 * 7, 18),
        (FAB(steps=6, targets=3, restarts=2), "l2", 1 + 6 * 7, 36),
        (FAB(steps=6), "l1", 1 + 7, 6 * 4),  # a gradient for each wrong class
        (FAB(steps=0, targets=2), "l2", 1 + 2, 0),
        (Square(queries=20), "linf", 1 + 21, 0),
        (Square(queries=20, restarts=2), "l2", 1 + 42, 0),
        (Square(queries=0), "l1", 1 + 1, 0),
    ],
    ids=repr,
)
def test_an_example_that_survives_costs_what_the_method_says(
    attack: Attack, norm: Norm, forwards: int, backwards: int
) -> None:
    model, batch = fortress()
    threat = Threat(norm, {"linf": 0.05, "l2": 0.5, "l1": 3.0}[norm])
    with journal.opened() as notes:
        attack(unaccelerated(model, 4), batch, threat, seed=0)
    assert notes.forwards == dict.fromkeys(batch.index.tolist(), forwards)
    assert notes.backwards == dict.fromkeys(batch.index.tolist(), backwards)
    assert notes.notices == {}


def test_the_journal_counts_what_goes_through_the_model(make_linear: MakeLinear) -> None:
    """Fooled or not: the sum over examples is the number of images that the model saw."""
    model, batch, threat = cases(make_linear, "l2")
    for attack_ in ATTACKS:
        model_ = Sizes(model, batch_size=5)
        with journal.opened() as notes:
            attack_(model_, batch, threat, seed=0)
        assert sum(notes.forwards.values()) == sum(model_.sizes), attack_


def test_a_hit_ends_the_run_and_counts_only_inside_the_set() -> None:
    model = Ramp(lambda t: torch.where(t < 0.15, -1.0, 1.0).double())
    found = walked(model, grey(2))
    assert offsets(found) == [0.2, 0.2]
    assert found.settled.all() and model.asked == 2 * 2
    outside = walked(model, grey(2), eps=0.15)
    assert not outside.fooled.any() and not outside.settled.any()
    assert torch.equal(outside.x, grey(2).x)


def test_the_goal_nearest_spends_the_budget_and_keeps_the_nearest() -> None:
    model = Ramp(lambda t: torch.where((t < 0.15) | ((t > 0.25) & (t < 0.35)), -1.0, 1.0).double())
    found = walked(model, grey(2), "nearest", restarts=2)
    assert offsets(found) == [0.2, 0.2]  # 0.4 fools too
    assert found.fooled.all()
    assert model.asked == 2 * 2 * 4


def test_the_goal_loss_takes_the_highest_loss_of_all_runs_fooled_or_not(make_linear: MakeLinear) -> None:
    model, batch, threat = cases(make_linear, "linf")
    batch = batch._replace(y=torch.where(batch.index % 3 == 0, (batch.y + 1) % 5, batch.y))  # a third is wrong
    losses = []
    for restarts in (1, 3):
        with journal.opened() as notes:
            x = APGD(steps=2, restarts=restarts, keep="best")(model, batch, threat, seed=0)
        losses.append(ce(model(x), batch.y))
        assert set(notes.forwards.values()) == {1 + 3 * restarts}
        assert (losses[-1] > ce(model(batch.x), batch.y)).all()
    assert (losses[1] >= losses[0]).all() and (losses[1] > losses[0]).any()


def test_a_doubtful_hit_does_not_end_the_run() -> None:
    """Wrong by a millionth of the logits from 0.15 on, by one from 0.35 on."""
    model = Ramp(lambda t: torch.where(t < 0.15, -1.0, torch.where(t < 0.35, 1e-6 * (1 + t), 1.0)).double())
    found = walked(model, grey(2))
    assert offsets(found) == [0.4, 0.4] and found.settled.all()
    doubtful = walked(model, grey(2), eps=0.32)
    assert offsets(doubtful) == [0.3, 0.3]  # the larger of two doubtful leads
    assert doubtful.fooled.all() and not doubtful.settled.any()


@pytest.mark.parametrize("where", [0.15, 0.35])
def test_no_answer_is_not_the_right_answer(where: float) -> None:
    model = Ramp(lambda t: torch.where(t < where, -1.0, torch.nan).double())
    found = walked(model, grey(2))
    assert found.settled.all()
    assert offsets(found) == [round(where + 0.05, 9)] * 2
    for attack_ in ATTACKS:
        if getattr(attack_, "keep", "fooled") == "fooled" and not isinstance(attack_, FAB):
            x = attack_(
                Ramp(lambda t: torch.where(t == 0, -1.0, torch.nan).double()), grey(2), Threat("l2", 0.2), seed=0
            )
            assert x.isfinite().all() and not torch.equal(x, grey(2).x)


@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_what_is_wrong_already_is_returned_as_it_is_for_one_pass(make_linear: MakeLinear, attack: Attack) -> None:
    if getattr(attack, "keep", "") == "best":
        return
    model, batch, threat = cases(make_linear, "linf")
    wrong = batch.index % 2 == 0
    batch = batch._replace(y=torch.where(wrong, (batch.y + 1) % 5, batch.y))
    with journal.opened() as notes:
        x = attack(model, batch, threat, seed=0)
    assert torch.equal(x[wrong], batch.x[wrong])
    assert all((notes.forwards[i] == 1) == bool(wrong[i]) for i in range(len(wrong)))
    assert all((notes.backwards[i] > 0) <= (not wrong[i]) for i in range(len(wrong)))
    with journal.opened() as notes:
        assert torch.equal(attack(model, batch.select(wrong), threat, seed=0), batch.x[wrong])
    assert set(notes.forwards.values()) == {1}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_eps_zero_one_example_and_none(make_linear: MakeLinear, attack: Attack, norm: Norm) -> None:
    model, batch, threat = cases(make_linear, norm)
    assert torch.equal(attack(model, batch, Threat(norm, 0.0), seed=0), batch.x)
    one = batch.select(torch.tensor([4]))
    assert threat.contains(one.x, attack(model, one, threat, seed=0)).all()
    none = attack(Ramp(lambda t: t / 0), batch.select(torch.tensor([], dtype=torch.int64)), threat, seed=0)
    assert none.shape == (0, 3, 6, 5)


@pytest.mark.parametrize("classes", [2, 3, 4])
@pytest.mark.parametrize(
    ("attack", "least"),
    [
        (APGD(steps=30, loss="dlr"), 3),
        (APGD(steps=30, loss="dlr", targets=9), 4),
        (APGD(steps=30, targets=9), 0),
        (FAB(steps=10, targets=9), 0),
        (FAB(steps=10), 0),
    ],
    ids=repr,
)
def test_few_classes_are_enough_and_the_journal_says_what_was_done(
    make_linear: MakeLinear, attack: Attack, least: int, classes: int
) -> None:
    model, batch = make_linear(classes=classes, n=16)
    away = nearest("linf", model, batch)
    threat = Threat("linf", away.median().item())
    with journal.opened() as notes:
        fooled = misclassified(model(attack(model, batch, threat, seed=0)), batch.y)
    assert notes.notices == ({"few-classes": None} if classes < least else {})
    assert (away[fooled] <= threat.eps * (1 + 1e-6)).all()
    if isinstance(attack, FAB) or attack.targets:  # an untargeted run may climb towards a class that is farther
        assert fooled[away < 0.97 * threat.eps].all()


def test_one_class_is_none() -> None:
    model, batch = Fortress(classes=1), fortress()[1]
    for attack_ in ATTACKS:
        with pytest.raises(BastionError, match=r"logits of at least 2 classes, .* got float64 \(6, 1\)"):
            attack_(model, batch, Threat("linf", 0.1), seed=0)


def test_a_model_without_a_gradient_is_noticed_on_its_examples() -> None:
    class Deaf(Fortress):
        """Answers on example 1 do not depend on its pixels."""

        def forward(self, x: Tensor) -> Tensor:
            deaf = (x[:, 0, 0, :1] == 0).double()
            return super().forward(x) * (1 - deaf) + deaf * self.bias

    _, batch = fortress(3)
    batch.x[1, 0, 0, 0] = 0.0
    with journal.opened() as notes:
        APGD(steps=2, random_start=False)(Deaf(), batch, Threat("linf", 0.1), seed=0)
    assert notes.notices == {"blind-start": {11}}


class Patient(nn.Module):
    """With everything that an attack could disturb: gradients, frozen parameters, a part in train mode, BatchNorm."""

    calls = 0  # of copies too

    def __init__(self, *, convolves: bool, breaks_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Conv2d(3, 4, 3, padding=1) if convolves else nn.Identity()
        self.norm = nn.BatchNorm2d(4 if convolves else 3)
        self.drop = nn.Dropout(0.0)
        self.head = nn.Linear((4 if convolves else 3) * 30, 5)
        self.breaks_at = breaks_at
        self.eval().double()
        self.drop.train()
        self.head.bias.requires_grad_(False)
        self.head.weight.grad = torch.ones_like(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        Patient.calls += bool(x.shape[0] > 0)  # cannot be traced: copies keep this code
        if self.breaks_at is not None and Patient.calls >= self.breaks_at:
            raise ZeroDivisionError("the model broke")
        return self.head(self.drop(self.norm(self.first(x)).flatten(1)))


def _state(model: nn.Module) -> list[Any]:
    parameters = [(p.requires_grad, p.grad is not None and p.grad.tolist(), p.tolist()) for p in model.parameters()]
    flags = [module.training for module in model.modules()]
    buffers = [buffer.tolist() for buffer in model.buffers()]
    noise = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    return [parameters, flags, buffers, noise, torch.is_grad_enabled()]


@pytest.mark.parametrize("convolves", [True, False])
@pytest.mark.parametrize("breaks_at", [None, 1, 6, 8])
def test_the_model_and_the_random_numbers_are_left_as_they_were(convolves: bool, breaks_at: int | None) -> None:
    _, batch = fortress(4)
    for attack_ in ATTACKS:
        model = Patient(convolves=convolves)
        batch = batch._replace(y=model(batch.x).argmax(1))
        model.breaks_at, Patient.calls = breaks_at, 0
        before = _state(model)
        with torch.no_grad():  # an attack needs gradients and sees to them itself
            before[-1] = False
            if breaks_at is None:
                attack_(model, batch, Threat("l2", 0.3), seed=0)
            else:
                with pytest.raises(ZeroDivisionError, match="broke"):
                    attack_(model, batch, Threat("l2", 1e-4), seed=0)
            assert _state(model) == before, attack_


def test_attack_asks_about_targets_in_the_order_of_their_logits() -> None:
    model, batch = fortress(2)
    seen: list[Tensor] = []

    class Note(Walk):
        def start(self, jobs: Jobs, batch: Batch) -> SearchState:
            seen.append(torch.stack([jobs.at, jobs.target, jobs.number, jobs.restart], 1))
            return super().start(jobs, batch)

    attack(
        unaccelerated(model, 64),
        batch,
        Threat("linf", 0.1),
        lambda classes: Note(1),
        name="note",
        targets=3,
        restarts=2,
    )
    ranked = model(batch.x)[:, 1:].argsort(1, descending=True)[:, :3] + 1
    expected = [
        [at, int(ranked[at, rank]), 3 * restart + rank, restart]
        for restart in range(2)
        for rank in range(3)
        for at in range(2)
    ]
    assert seen[0].tolist() == expected


@given(
    offers=st.lists(
        st.tuples(
            st.booleans(),
            st.lists(st.tuples(st.integers(0, 2), st.sampled_from([-1.0, 0.0, 1.0, 2.0, torch.nan])), max_size=5),
        ),
        max_size=5,
    )
)
@settings(max_examples=150, deadline=None)
def test_the_best_is_the_first_of_the_highest(offers: list[tuple[bool, list[tuple[int, float]]]]) -> None:
    """A misclassified one before any other, then the highest score, then the first; NaN is the lowest score."""
    found = Best(torch.zeros(3, 1, 1, 1))
    best: dict[int, tuple[bool, float, int]] = {}
    number = 0
    for fooled, rows in offers:
        numbers = list(range(number + 1, number + 1 + len(rows)))
        number += len(rows)
        at, score = torch.tensor([a for a, _ in rows], dtype=torch.int64), torch.tensor([s for _, s in rows])
        x = torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1, 1)
        found.offer(x, score, torch.full((len(rows),), fooled), at)
        for (a, s), n in zip(rows, numbers, strict=True):
            value = fooled, -torch.inf if s != s else s
            if value > best.get(a, (False, -torch.inf, 0))[:2]:
                best[a] = (*value, n)
    assert found.x.flatten().tolist() == [best[a][2] if a in best else 0 for a in range(3)]
    assert found.fooled.tolist() == [best[a][0] if a in best else False for a in range(3)]


def test_non_finite_inputs_are_ignored() -> None:
    found = Best(torch.zeros(2, 1, 1, 1))
    found.offer(torch.tensor([torch.nan, 0.5]).view(2, 1, 1, 1), torch.ones(2), torch.tensor([True, True]))
    assert found.fooled.tolist() == [False, True]
    assert found.x.flatten().tolist() == [0.0, 0.5]


def test_square_goes_on_where_the_model_cuts_the_gradient(make_linear: MakeLinear) -> None:
    """Gradient attacks see zeros and say so; they do not stop the ensemble before the attack that needs none."""

    class Cut(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model(x.detach())
            return logits

    model, batch = make_linear(classes=4)
    cut, threat = Cut(model).eval(), Threat("linf", 0.1)
    with journal.opened() as notes:
        x = Ensemble(members=(APGD(steps=3), FAB(steps=2, targets=2), PGD(steps=2), Square(queries=200)))(
            cut, batch, threat, seed=0
        )
    assert misclassified(model(x), batch.y).sum() > len(batch.y) / 2
    assert notes.notices["blind-start"] == set(range(len(batch.y)))
    assert notes.notices["square-beats-white-box"]


def test_a_model_that_normalises_in_place_changes_nobodys_image(make_linear: MakeLinear) -> None:
    class InPlace(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model(x.sub_(0.5).mul_(2.0))
            return logits

    class Usual(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = self.model((x - 0.5) * 2.0)
            return logits

    linear, batch = make_linear(classes=4)
    batch = batch._replace(y=Usual(linear)(batch.x).argmax(1))
    before = batch.x.clone()
    for attack_ in (APGD(steps=4), FAB(steps=3), Square(queries=5), PGD(steps=3)):
        got = attack_(InPlace(linear).eval(), batch, Threat("l2", 0.1), seed=0)
        assert torch.equal(batch.x, before)
        assert torch.equal(got, attack_(Usual(linear).eval(), batch, Threat("l2", 0.1), seed=0))


def test_logits_of_another_precision_are_taken(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=5, n=40)

    class Wide(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            logits: Tensor = model(x.double())
            return logits

    batch = batch._replace(x=batch.x.float())
    for attack_ in (APGD(steps=3, targets=3, loss="dlr"), FAB(steps=3, targets=3), FAB(steps=2), Square(queries=9)):
        for threat in (Threat("linf", 0.002), Threat("l2", 0.02), Threat("l1", 0.1)):
            x = attack_(unaccelerated(Wide(), 8), batch, threat, seed=0)
            assert x.dtype == torch.float32 and threat.contains(batch.x, x).all()


def test_a_lead_below_the_rounding_of_the_logits_is_no_proof(make_linear: MakeLinear) -> None:
    """In bfloat16 the next number after 1 is 1.0078: a lead of one such step may be none in another batch."""

    class Coarse(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            lead = torch.where(x.flatten(1).sum(1) > 0, 0.03, -0.03)
            return torch.stack([torch.ones_like(lead), 1 + lead], 1).bfloat16()

    batch = Batch(torch.arange(2), torch.zeros(2, 1, 2, 2), torch.zeros(2, dtype=torch.int64))
    with journal.opened() as notes:
        x = Square(queries=5)(unaccelerated(Coarse(), 8), batch, Threat("linf", 0.1), seed=0)
    assert (x.flatten(1).sum(1) > 0).all()  # the best that was found is given all the same
    assert set(notes.forwards.values()) == {7}  # but the search went on


class Noisy(nn.Module):
    def __init__(self, sigma: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.sigma = nn.Parameter(torch.randn(10, 192)), sigma

    def forward(self, x: Tensor) -> Tensor:
        return (x - 0.5 + self.sigma * torch.randn_like(x)).flatten(1) @ self.weight.T


def test_one_unlucky_draw_of_a_random_model_spares_no_image_the_attack() -> None:
    x = 0.3 + 0.4 * torch.rand(100, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.arange(100), x, Noisy()(x).argmax(1))
    members = APGD(steps=10, eot=5), APGD(steps=10, eot=5, loss="dlr")
    verdict = judge(Noisy(0.15), batch, Ensemble(members=members), Threat("linf", 0.06), seed=0)
    assert verdict.clean.sum() > 20
    assert not ((verdict.x == x).flatten(1).all(1) & verdict.clean).any()
    assert (verdict.clean & ~verdict.fooled).sum() <= 1


def test_a_hit_of_a_random_model_is_not_lost_to_a_higher_loss() -> None:
    """The cross-entropy is highest at the edge, where all three classes are about as likely and the right one wins."""

    class Bump(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            shift = 10 * (x.flatten(1).mean(1) - 0.5)  # 0 to 1 in the ball
            second = torch.where((shift > 0.1) & (shift < 0.6), 0.2, -0.05)
            return torch.stack([torch.zeros_like(shift), second, -3 + 2.95 * shift], 1)

    batch = Batch(torch.arange(8), torch.full((8, 1, 2, 2), 0.5), torch.zeros(8, dtype=torch.int64))
    for eot in (1, 2):
        verdict = judge(Bump(), batch, APGD(steps=10, restarts=20, eot=eot), Threat("linf", 0.1), seed=0)
        assert verdict.fooled.all()


def test_an_ensemble_inside_another_tells_that_its_gradients_are_averaged() -> None:
    inner = Ensemble(members=(APGD(steps=1), APGD(steps=1, eot=4)))
    assert Ensemble(members=(Square(), inner)).eot == 4
    assert Ensemble(members=(AutoAttack(version="rand"),)).eot == 20
    assert AutoAttack().eot == 1


def test_an_image_within_rounding_of_a_tie_is_attacked() -> None:
    """The folded copy may see it on the other side; the model as given is right, and it counts."""
    for seed in range(12):
        torch.manual_seed(seed)
        layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 196, 10)
        model = nn.Sequential(*layers).eval()
        model[1].running_mean.uniform_(-0.3, 0.3)
        model[1].running_var.uniform_(0.5, 2)
        x = torch.rand(1, 3, 16, 16)
        with torch.no_grad():
            logits = model(x)[0]
            first, second = logits.topk(2).indices
            model[4].bias[second] += logits[first] - logits[second]
            batch = Batch(torch.arange(1), x, model(x).argmax(1))
        for steps in (APGD(steps=5), APGD(steps=5, loss="dlr", targets=3)):
            assert judge(model, batch, steps, Threat("linf", 8 / 255), seed=0).fooled.all()
        smallest = Minimal(fab_steps=5, fab_targets=3, steps=3, targets=1, bisections=2)
        assert judge(model, batch, smallest, Threat("linf", 1.0), seed=0).fooled.all()


@pytest.mark.parametrize("masked", [-1e9, -torch.inf])
def test_dlr_sees_though_classes_are_masked(masked: float) -> None:
    class Masked(Noisy):
        def forward(self, x: Tensor) -> Tensor:
            logits = super().forward(x)
            return torch.cat([logits[:, :3], torch.full_like(logits[:, 3:], masked)], 1)

    model, x = Masked(), torch.rand(32, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    batch = Batch(torch.arange(32), x, model(x).argmax(1))
    for steps in (APGD(steps=20, loss="dlr", targets=9), APGD(steps=20, loss="dlr")):
        assert judge(model, batch, steps, Threat("linf", 0.06), seed=0).fooled.sum() >= 31

"""PGD reaches the closed-form optimum of linear classifiers, and keeps the promises of every attack."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.conftest import Linear, MakeLinear
from tests.oracles import best_gain
from torch import Tensor, nn

from bastion import BastionError, Threat, journal
from bastion.attacks import attacks
from bastion.attacks.losses import margin
from bastion.attacks.pgd import PGD, fgsm, fgsm_rs
from bastion.forward import misclassified
from bastion.types import Batch

THREATS = [Threat("linf", 0.06), Threat("l2", 0.4), Threat("l1", 2.0)]
ids = [threat.norm for threat in THREATS]
ATTACKS = [fgsm(), fgsm_rs(), PGD(steps=10), PGD(steps=5, restarts=2, loss="margin"), PGD(steps=3, random_start=False)]


def _best_gain(w: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """(B,) the most that ⟨w, δ⟩ can reach inside ball and box."""
    size = w.flatten(1).abs()
    room = torch.where(w > 0, 1 - x, x).flatten(1)
    if threat.norm == "linf":
        return (size * room.clamp(max=threat.eps)).sum(1)
    if threat.norm == "l1":  # greedy: fill the coordinates with the largest weight
        order = size.argsort(1, descending=True)
        sorted_room = room.gather(1, order)
        before = sorted_room.cumsum(1) - sorted_room
        taken = torch.minimum(sorted_room, (threat.eps - before).clamp(min=0))
        return (size.gather(1, order) * taken).sum(1)
    low, high = torch.zeros(len(x), 1, dtype=x.dtype), torch.full((len(x), 1), 1e6, dtype=x.dtype)
    for _ in range(200):  # δ = min(λ|w|, room) with length eps
        middle = (low + high) / 2
        out = torch.minimum(middle * size, room).norm(dim=1, keepdim=True) > threat.eps
        low, high = torch.where(out, low, middle), torch.where(out, middle, high)
    return (size * torch.minimum(low * size, room)).sum(1)


def _optimum(model: nn.Module, batch: Batch, threat: Threat) -> Tensor:
    """(B,) the highest margin that any point of the set has, for two classes."""
    other = 1 - batch.y
    w = (model.weight[other] - model.weight[batch.y]).view(batch.x.shape).detach()
    return margin(model(batch.x), batch.y).detach() + _best_gain(w, batch.x, threat)


@pytest.mark.parametrize("eps", [0.5, 2.0, 6.0, 12.0])
def test_l1_steps_as_they_come_are_near_the_linear_optimum(make_linear: MakeLinear, eps: float) -> None:
    """From a random start, which the projection wears off pixel by pixel: full ones must not be filled again."""
    model, batch = make_linear(classes=2, n=16)
    threat = Threat("l1", eps)
    clean, best = margin(model(batch.x), batch.y), _optimum(model, batch, threat)
    for attack, share in (
        (fgsm(loss="margin"), 0.95),
        (PGD(loss="margin"), 0.9),
        (PGD(loss="margin", steps=100), 0.95),
    ):
        reached = margin(model(attack(model, batch, threat, seed=0)), batch.y)
        assert (reached <= best + 1e-9).all()
        assert ((reached - clean) / (best - clean)).mean() > share


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_pgd_reaches_the_linear_optimum(make_linear: MakeLinear, threat: Threat) -> None:
    model, batch = make_linear(classes=2, n=32)
    attack = PGD(steps=100, rel_step=0.05, random_start=False, sparsity=1e-9)
    reached = margin(model(attack(model, batch, threat, seed=0)), batch.y)
    best = _optimum(model, batch, threat)
    assert (reached <= best + 1e-9).all()
    assert torch.allclose(reached, best, atol=0, rtol=2e-3) or (best - reached).max() < 2e-3 * (best - best.min()).max()


def test_dense_l1_steps_gain_what_the_gradient_is_worth_to_itself(make_linear: MakeLinear) -> None:
    """In the interior a step gains size·‖w‖₂²/‖w‖₁, a sparse one size·‖w‖_∞; here that is less than half."""
    model, batch = make_linear(classes=2, n=16, interior=True)
    w = (model.weight[1 - batch.y] - model.weight[batch.y]).detach()
    threat, clean = Threat("l1", 0.3), margin(model(batch.x), batch.y)
    settings = {"steps": 20, "rel_step": 0.075, "random_start": False, "loss": "margin"}
    dense, sparse = (
        margin(model(PGD(**settings, dense=each, sparsity=1e-9)(model, batch, threat, seed=0)), batch.y) - clean
        for each in (True, False)
    )
    worth = w.square().sum(1) / w.abs().sum(1)
    assert torch.allclose(dense, 0.3 * worth, rtol=1e-6)  # 20 steps of 0.075 eps, scaled back to the ball
    assert torch.allclose(sparse, 0.3 * w.abs().amax(1), rtol=1e-6)
    assert (dense < 0.5 * sparse).all()
    one = PGD(**{**settings, "steps": 1}, dense=True)(model, batch, threat, seed=0)
    assert torch.allclose(margin(model(one), batch.y) - clean, 0.075 * 0.3 * worth, rtol=1e-6)


def test_dense_steps_stay_in_ball_and_box_and_are_of_l1_alone(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=2, n=16)
    threat = Threat("l1", 20.0)
    x = PGD(dense=True, steps=5)(model.float(), batch._replace(x=batch.x.float()), threat, seed=0)
    assert threat.contains(batch.x.float(), x).all()
    with pytest.raises(BastionError, match="dense is about l1 steps, the threat is l2"):
        PGD(dense=True)(model, batch, Threat("l2", 1.0), seed=0)


def test_fgsm_is_exact_on_two_linear_classes(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=2)
    threat = Threat("linf", 0.06)
    reached = margin(model(fgsm()(model, batch, threat, seed=0)), batch.y)
    assert torch.allclose(reached, _optimum(model, batch, threat), atol=1e-9)


@pytest.mark.parametrize("threat", [Threat("l2", 0.05), Threat("l1", 0.05)], ids=["l2", "l1"])
def test_one_step_is_exact_inside_the_box(make_linear: MakeLinear, threat: Threat) -> None:
    """m - ε‖w‖ in the dual norm."""
    model, batch = make_linear(classes=2, interior=True)
    reached = margin(model(fgsm(sparsity=1e-9)(model, batch, threat, seed=0)), batch.y)
    w = model.weight[1 - batch.y] - model.weight[batch.y]
    dual = w.norm(dim=1) if threat.norm == "l2" else w.abs().amax(1)
    assert torch.allclose(reached, margin(model(batch.x), batch.y) + threat.eps * dual, atol=1e-9)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_points_are_inside_and_never_worse_than_the_clean_image(
    make_linear: MakeLinear, threat: Threat, attack: PGD, dtype: torch.dtype
) -> None:
    model, batch = make_linear(classes=4)
    model, batch = model.to(dtype), batch._replace(x=batch.x.to(dtype), y=batch.y.roll(1))  # some are wrong already
    x = attack(model, batch, threat, seed=0)
    assert x.dtype == dtype
    assert threat.contains(batch.x, x).all()
    before, after = misclassified(model(batch.x), batch.y), misclassified(model(x), batch.y)
    assert (after >= before).all()


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_the_rest_of_the_batch_changes_nothing(make_linear: MakeLinear, threat: Threat) -> None:
    model, batch = make_linear(classes=4)
    attack = PGD(steps=7, restarts=2)
    whole = attack(model, batch, threat, seed=3)
    order = torch.tensor([5, 0, 9])
    # BLAS adds in another order for another batch; an attack that mixed examples would be off by far more.
    assert torch.allclose(attack(model, batch.select(order), threat, seed=3), whole[order], atol=1e-12, rtol=0)


def test_same_seed_same_points_other_seed_other_points(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4)
    attack = PGD(steps=1, rel_step=0.1)
    first = attack(model, batch, THREATS[0], seed=0)
    assert torch.equal(attack(model, batch, THREATS[0], seed=0), first)
    assert not torch.equal(attack(model, batch, THREATS[0], seed=1), first)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_eps_zero_returns_the_image(make_linear: MakeLinear, norm: str) -> None:
    model, batch = make_linear()
    assert torch.equal(PGD(steps=3)(model, batch, Threat(norm, 0.0), seed=0), batch.x)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_memory_format_does_not_matter(make_linear: MakeLinear, threat: Threat) -> None:
    model, batch = make_linear(classes=4)
    expected = PGD(steps=5)(model, batch, threat, seed=0)
    last = batch._replace(x=batch.x.contiguous(memory_format=torch.channels_last))
    expanded = batch._replace(x=batch.x[:1].expand_as(batch.x), y=batch.y[:1].expand_as(batch.y))
    assert torch.allclose(PGD(steps=5)(model, last, threat, seed=0), expected, atol=1e-9)
    assert threat.contains(expanded.x, PGD(steps=5)(model, expanded, threat, seed=0)).all()


def test_the_model_is_left_as_it_was(tiny_model: nn.Module) -> None:
    batch = Batch(torch.arange(4), torch.rand(4, 3, 8, 8), torch.tensor([0, 1, 2, 0]))
    before, noise = copy.deepcopy(tiny_model.eval().state_dict()), torch.get_rng_state()
    with torch.no_grad():  # an attack needs gradients and sees to them itself
        PGD(steps=3)(tiny_model, batch, Threat("linf", 0.1), seed=0)
    assert all(torch.equal(value, before[name]) for name, value in tiny_model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in tiny_model.parameters())
    assert torch.equal(torch.get_rng_state(), noise)
    assert not tiny_model.training


class Counter(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.passes = model, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.model(x)


@pytest.mark.parametrize(
    ("attack", "passes"),
    [
        (PGD(steps=10, random_start=False), 11),
        (PGD(steps=10), 12),
        (PGD(steps=10, restarts=3), 34),
        (PGD(steps=2, keep="last"), 2),
        (fgsm(keep="last"), 1),
        (fgsm_rs(keep="last"), 1),
    ],
    ids=repr,
)
def test_passes_are_what_the_method_costs(make_linear: MakeLinear, attack: PGD, passes: int) -> None:
    model, batch = make_linear()
    counter = Counter(model)
    attack(counter, batch, THREATS[0], seed=0)
    assert counter.passes == passes


def test_a_fooled_iterate_is_preferred_to_a_higher_loss() -> None:
    """Three classes where cross-entropy grows on a point that is still right, and a wrong one has less of it."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            t = x.flatten(1).mean(1, keepdim=True)
            wrong = (t > 0.55).double()
            right = torch.cat([1 + 0 * t, 0.99 + 0 * t, 0.99 + 0 * t], 1)  # three-way tie: CE 1.09, still right
            fooled = torch.cat([1 + 0 * t, 1.01 + 0 * t, -9 + 0 * t], 1)  # CE 0.70, fooled
            return wrong * fooled + (1 - wrong) * right + 0 * x.sum()

    batch = Batch(torch.arange(1), torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64), torch.tensor([0]))
    model = Fixed()
    found = [PGD(steps=0, restarts=20)(model, batch, Threat("linf", 0.2), seed=seed) for seed in range(3)]
    assert all(misclassified(model(x), batch.y).all() for x in found)


def test_an_attack_is_its_own_record() -> None:
    attack = attacks.build({"name": "pgd", "steps": 7, "rel_step": 0.5})
    assert eval(repr(attack)) == attack


class Broken(nn.Module):
    """A linear model whose gradient at one pixel is NaN, though its logits are not."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        corner = x[:, 0, 0, 0]
        return self.model(x) + 0 * (corner - corner.detach()).sqrt()[:, None]


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_a_gradient_that_is_nan_somewhere_does_not_look_like_robustness(
    make_linear: MakeLinear, threat: Threat
) -> None:
    model, batch = make_linear(classes=2, n=64)
    attack = PGD(steps=20)
    fooled = misclassified(model(attack(model, batch, threat, seed=0)), batch.y)
    broken = misclassified(model(attack(Broken(model), batch, threat, seed=0)), batch.y)
    assert fooled.sum() > 5
    assert broken.sum() >= 0.9 * fooled.sum()


def test_momentum_is_that_of_mi_fgsm(make_linear: MakeLinear) -> None:
    """Dong et al. 2018, Algorithm 1, written out."""
    model, batch = make_linear(classes=4)
    threat, steps, decay = Threat("linf", 0.02), 4, 0.7
    x, running = batch.x, torch.zeros_like(batch.x)
    for _ in range(steps):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(torch.nn.functional.cross_entropy(model(x), batch.y, reduction="sum"), x)
        running = decay * running + gradient / gradient.abs().mean((1, 2, 3), keepdim=True)
        x = (x + threat.eps / steps * running.sign()).clamp(batch.x - threat.eps, batch.x + threat.eps).clamp(0, 1)
    last = PGD(steps=steps, rel_step=1 / steps, random_start=False, momentum=decay, keep="last")
    assert torch.allclose(last(model, batch, threat, seed=0), x, atol=1e-12)
    assert attacks.build("mi-fgsm") == PGD(steps=10, rel_step=0.1, random_start=False, momentum=1.0)


def test_targeted_runs_reach_the_targets_optimum(make_linear: MakeLinear) -> None:
    """With one target the margin to it falls by Σ|w|·min(eps, room), the most there is."""
    model, batch = make_linear(classes=6)
    threat = Threat("linf", 0.005)
    logits = model(batch.x)
    target = logits.scatter(1, batch.y[:, None], -torch.inf).argmax(1)
    x = PGD(steps=10, rel_step=0.5, loss="margin", targets=1)(model, batch, threat, seed=0)
    w = (model.weight[target] - model.weight[batch.y]).detach()
    before = (logits.gather(1, target[:, None]) - logits.gather(1, batch.y[:, None]))[:, 0]
    after = (model(x).gather(1, target[:, None]) - model(x).gather(1, batch.y[:, None]))[:, 0]
    assert torch.allclose(after, before + best_gain("linf", w, batch.x, threat.eps), atol=1e-9)


def test_more_targets_find_what_the_likeliest_class_hides() -> None:
    """Class 1 is near in logits but no pixel leads to it; class 2 is further and can be reached."""
    weight = torch.cat([torch.zeros(2, 12), torch.ones(1, 12)]).double()
    model = Linear(weight, torch.tensor([0.0, -0.1, -6.5]).double())
    batch = Batch(torch.arange(4), torch.full((4, 3, 2, 2), 0.5).double(), torch.zeros(4, dtype=torch.int64))
    threat = Threat("linf", 0.1)

    def fooled(targets: int) -> int:
        return int(
            misclassified(model(PGD(loss="margin", targets=targets)(model, batch, threat, seed=0)), batch.y).sum()
        )

    assert (fooled(1), fooled(2)) == (0, 4)


def test_kl_climbs_away_from_the_clean_answer(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4)
    threat = Threat("linf", 0.01)
    x = PGD(steps=10, loss="kl")(model, batch, threat, seed=0)
    clean = model(batch.x).log_softmax(1)

    def away(point: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.kl_div(model(point).log_softmax(1), clean, log_target=True, reduction="none").sum(1)

    random = threat.random_point(batch.x, batch.index, seed=1, draw="test")
    assert (away(x) > away(random)).all()
    with pytest.raises(BastionError, match="no gradient at the clean image"):
        PGD(loss="kl", random_start=False)


@pytest.mark.parametrize("classes", [2, 3])
def test_dlr_falls_back_to_the_margin_where_there_are_too_few_classes(classes: int, make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=classes)
    with journal.opened() as notes:
        x = PGD(loss="dlr", targets=1)(model, batch, Threat("linf", 0.01), seed=0)
    assert torch.equal(x, PGD(loss="margin", targets=1)(model, batch, Threat("linf", 0.01), seed=0))
    assert "few-classes" in notes.notices


def test_a_number_of_steps_given_as_their_length_is_told(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    with pytest.raises(BastionError, match="pgd.step: the length of a step.*For 10 steps, set `steps`"):
        PGD(step=10)(model, batch, Threat("linf", 0.1), seed=0)

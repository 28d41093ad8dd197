"""Transfer attacks take the gradients that the papers say; the probe crafts on one model and judges another."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import AttackBy, MakeLinear
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

import bastion
from bastion import BastionError, Threat
from bastion.attacks.losses import ce, margin
from bastion.attacks.pgd import PGD
from bastion.attacks.transfer import (
    Transferable,
    block_logits,
    blurred,
    constant_attention,
    patchout,
    pna,
    self_ensemble,
    shrunk,
)
from bastion.forward import misclassified
from bastion.models import Classifier, checkpoint
from bastion.patches import Grid
from bastion.probes import probes
from bastion.probes.adversarial import Adversarial
from bastion.probes.transfer import Transfer
from bastion.suite import Suite
from bastion.types import Batch, DataSet

THREATS = [Threat("linf", 0.06), Threat("l2", 0.4), Threat("l1", 2.0)]
ids = [threat.norm for threat in THREATS]
LINF = THREATS[0]


def _gradient(model: nn.Module, batch: Batch) -> Tensor:
    x = batch.x.clone().requires_grad_()
    return torch.autograd.grad(ce(model(x), batch.y).sum(), x)[0]


class Frozen(nn.Module):
    """timm's attention with the map made and detached by hand."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.inner = attention

    def forward(self, x: Tensor, **_: object) -> Tensor:
        b, n, d = x.shape
        heads = self.inner.num_heads
        q, k, v = self.inner.qkv(x).reshape(b, n, 3, heads, d // heads).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-2, -1) * (d // heads) ** -0.5).exp()
        weights = (scores / scores.sum(-1, keepdim=True)).detach()
        return self.inner.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("class_token", [True, False])
def test_pna_is_the_gradient_with_attention_detached_by_hand(class_token: bool, fused: bool) -> None:
    model, hand = small_vit(class_token), small_vit(class_token)
    for block in model.network.blocks:
        block.attn.fused_attn = fused
    for block in hand.network.blocks:
        block.attn = Frozen(block.attn)
    batch = right_batch(model)
    plain = _gradient(model, batch)
    with constant_attention():
        logits, got = model(batch.x), _gradient(model, batch)
    expected = _gradient(hand, batch)
    assert torch.allclose(logits, model(batch.x), atol=1e-12)  # what the model says is the same
    assert torch.allclose(got, expected, atol=1e-12, rtol=1e-9)
    assert (plain - expected).abs().max() > 1e-2 * plain.abs().max()


def test_pna_sees_into_torch_multihead_attention() -> None:
    class Torch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.attention = nn.MultiheadAttention(12, 2, batch_first=True).double().eval()

        def forward(self, x: Tensor, weights: Tensor | None = None) -> Tensor:
            tokens = x.flatten(2).transpose(1, 2)
            if weights is None:
                return self.attention(tokens, tokens, tokens)[0].mean(1)
            v = F.linear(tokens, self.attention.in_proj_weight[24:], self.attention.in_proj_bias[24:])
            heads = torch.cat([weights[:, h] @ v[:, :, 6 * h : 6 * h + 6] for h in range(2)], 2)
            return self.attention.out_proj(heads).mean(1)

    model = Torch()
    x = torch.rand(2, 12, 3, 3, dtype=torch.float64).requires_grad_()
    tokens = x.flatten(2).transpose(1, 2)
    weights = model.attention(tokens, tokens, tokens, average_attn_weights=False)[1].detach()
    (expected,) = torch.autograd.grad(model(x, weights).square().sum(), x)
    with constant_attention():
        (got,) = torch.autograd.grad(model(x).square().sum(), x)
    assert torch.allclose(got, expected, atol=1e-12)


def test_pna_refuses_a_model_that_does_not_attend(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    with pytest.raises(BastionError, match="no attention to pay none to"):
        pna()(model, batch, LINF, seed=0)


def test_transfer_is_mi_fgsm_by_hand() -> None:
    model = small_vit()
    batch = right_batch(model)
    x, g = batch.x, torch.zeros_like(batch.x)
    for _ in range(10):
        gradient = _gradient(model, batch._replace(x=x))
        g = g + gradient / gradient.abs().mean((1, 2, 3), keepdim=True)
        x = (x + 0.006 * g.sign()).clamp(batch.x - 0.06, batch.x + 0.06).clamp(0, 1)
    last = ce(model(x), batch.y) > ce(model(batch.x), batch.y)
    got = Transferable()(model, batch, LINF, seed=0)
    assert last.any()
    assert torch.allclose(got[last], x[last], atol=1e-12)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_ten_steps_of_a_tenth_are_exact_on_two_linear_classes(make_linear: MakeLinear, momentum: float) -> None:
    """The margin grows by Σ|w|·min(ε, room)."""
    model, batch = make_linear(classes=2)
    w = (model.weight[1 - batch.y] - model.weight[batch.y]).detach().view(batch.x.shape)
    room = torch.where(w > 0, 1 - batch.x, batch.x).clamp(max=0.06)
    best = margin(model(batch.x), batch.y) + (w.abs() * room).flatten(1).sum(1)
    reached = margin(model(Transferable(momentum=momentum)(model, batch, LINF, seed=0)), batch.y)
    assert torch.allclose(reached, best, atol=1e-9)


class Hill(nn.Module):
    """Worst for class 0 a little away from the image: one long step goes past it."""

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(1).mean(1)
        return torch.stack([(t - 0.52).square() * 100, torch.zeros_like(t)], 1)


def test_the_last_iterate_counts_unless_the_image_itself_is_worse() -> None:
    batch = Batch(torch.arange(1), torch.full((1, 1, 2, 2), 0.5, dtype=torch.float64), torch.tensor([0]))
    far = Transferable(steps=1)(Hill(), batch, Threat("linf", 0.1), seed=0)
    assert torch.equal(far, batch.x)
    near = Transferable(steps=2, momentum=0.0)(Hill(), batch, Threat("linf", 0.03), seed=0)
    assert torch.allclose(near, batch.x + 0.015 + torch.tensor(0.015))  # past the top at 0.52, and still the last


def _moved(x0: Tensor, x: Tensor) -> Tensor:
    return Grid(16, 16, 4).sums((x != x0).any(1).double()) > 0


def test_patchout_moves_only_the_patches_it_sees() -> None:
    """One step without the length term: 11 of 16 patches (130 of 196, rounded), others in each example and step."""
    model = small_vit()
    batch = right_batch(model, 12)
    step = patchout(steps=1, size=4, spread=0.0)
    mask = step._mask(batch, 0, 0)
    moved = _moved(batch.x, step(model, batch, Threat("linf", 1e-3), seed=0))
    assert (Grid(16, 16, 4).sums(mask[:, 0].double()).gt(0).sum(1) == 11).all()
    assert moved.any()
    assert torch.equal(moved[moved.any(1)], (Grid(16, 16, 4).sums(mask[:, 0].double()) > 0)[moved.any(1)])
    assert not torch.equal(mask[0], mask[1])
    assert not torch.equal(mask, step._mask(batch, 0, 1))
    assert not torch.equal(mask, step._mask(batch, 1, 0))


def test_patchout_sees_the_perturbation_through_the_mask_and_pushes_by_its_own_length() -> None:
    model = small_vit()
    batch = right_batch(model)
    attack = patchout(size=4, spread=0.1)
    x = (batch.x + 0.03 * torch.randn(batch.x.shape, generator=torch.Generator().manual_seed(0))).clamp(0, 1).double()
    mask = attack._mask(batch, 0, 4)
    away = (x - batch.x).requires_grad_()
    value = ce(model(batch.x + away * mask), batch.y) + 0.1 * away.flatten(1).norm(dim=1)  # each example's own length
    (expected,) = torch.autograd.grad(value.sum(), away)
    assert torch.allclose(attack._gradient(model, batch, x, seed=0, step=4), expected, atol=1e-12)


@pytest.mark.parametrize("class_token", [True, False])
def test_block_logits_are_norm_pooling_and_head_on_each_block(class_token: bool) -> None:
    model = small_vit(class_token)
    batch = right_batch(model)
    with model.tap("blocks") as taps:
        model(batch.x)
    network = model.network
    expected = [network.forward_head(network.norm(tokens)) for tokens in taps.blocks.values()]
    got = block_logits(model, batch.x)
    assert len(got) == 3
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-12)
    assert torch.equal(got[-1], model(batch.x))  # and the blocks do again what they did
    assert not any("forward" in block.module.__dict__ for block in model.blocks())
    x = batch.x.clone().requires_grad_()
    (through_first,) = torch.autograd.grad(block_logits(model, x)[0].square().sum(), x)
    assert through_first.abs().max() > 0


def test_the_self_ensemble_of_one_block_is_mi_fgsm() -> None:
    model = small_vit(depth=1)
    batch = right_batch(model)
    plain = Transferable()(model, batch, LINF, seed=0)
    assert torch.equal(self_ensemble()(model, batch, LINF, seed=0), plain)
    deep = small_vit(depth=3)
    assert not torch.equal(self_ensemble()(deep, batch, LINF, seed=0), Transferable()(deep, batch, LINF, seed=0))


def test_self_ensemble_refuses_models_whose_head_fits_the_last_block_only(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    with pytest.raises(BastionError, match="which modules of Linear are residual blocks"):
        self_ensemble()(model, batch, LINF, seed=0)
    resnet = checkpoint.build({"name": "timm/resnet18", "num_classes": 3}, mean=(0.5,) * 3, std=(0.5,) * 3).eval()
    batch = Batch(torch.arange(1), torch.rand(1, 3, 32, 32), torch.tensor([0]))
    with pytest.raises(BastionError, match="only if all have one shape, these have 128×4×4, 256×2×2"):
        self_ensemble()(resnet, batch, LINF, seed=0)


def test_shrunk_images_lie_in_a_black_frame() -> None:
    x = torch.ones(64, 1, 20, 20, dtype=torch.float64)
    assert torch.allclose(shrunk(x, torch.arange(64), 1.0, seed=0, step=0), x)
    small = shrunk(x, torch.arange(64), 0.5, seed=0, step=0)
    side = small.flatten(1).sum(1).sqrt() / 20
    assert (side > 0.49).all() and (side < 1.001).all()
    assert side.mean().item() == pytest.approx(0.75, abs=0.05)
    again = shrunk(x[:3], torch.tensor([9, 5, 0]), 0.5, seed=0, step=0)
    assert torch.allclose(again, small[[9, 5, 0]])


def test_the_blur_of_three_pixels_is_a_gaussian_of_fifteen() -> None:
    point = torch.zeros(1, 2, 31, 31, dtype=torch.float64)
    point[0, 0, 15, 15] = 1
    spread = blurred(point, 3.0)
    assert spread[0, 0].sum().item() == pytest.approx(1)
    assert (spread[0, 0] > 0).sum() == 15 * 15 and not spread[0, 1].any()
    assert (spread[0, 0, 15, 18] / spread[0, 0, 15, 15]).item() == pytest.approx(torch.tensor(-0.5).exp().item())


VARIANTS = [
    Transferable(),
    pna(),
    patchout(size=4),
    self_ensemble(),
    Transferable(
        constant_attention=True, every_block=True, seen=0.5, size=4, spread=0.1, shrink=0.8, blur=1.0, steps=4
    ),
]


@pytest.mark.parametrize(
    ("attack", "threat"),
    [*((attack, THREATS[0]) for attack in VARIANTS), *((VARIANTS[-1], threat) for threat in THREATS[1:])],
    ids=["mi-fgsm", "pna", "patchout", "self-ensemble", "all", *(f"all {norm}" for norm in ids[1:])],
)
def test_promises_of_every_attack(attack: Transferable, threat: Threat) -> None:
    model = small_vit()
    batch = right_batch(model)
    batch = batch._replace(y=torch.cat([batch.y[:4], (batch.y[4:] + 1) % 3]))  # two are wrong already
    x = attack(model, batch, threat, seed=0)
    assert threat.contains(batch.x, x).all() and (x != batch.x).any()
    before, after = misclassified(model(batch.x), batch.y), misclassified(model(x), batch.y)
    assert (after >= before).all()
    assert (ce(model(x), batch.y) >= ce(model(batch.x), batch.y))[after == before].all()
    order = torch.tensor([4, 0])
    assert torch.allclose(attack(model, batch.select(order), threat, seed=0), x[order], atol=1e-9, rtol=0)
    assert torch.equal(attack(model, batch, threat.scaled(0), seed=0), batch.x)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert eval(repr(attack)) == attack


SPEC = {"name": "vit/micro", "img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}


def _save(folder: Path, seed: int = 0, classes: int = 3) -> str:
    flat = (0.4,) * 3
    spec = {**SPEC, "num_classes": classes}
    checkpoint.save(checkpoint.build(spec, mean=flat, std=flat, shape=(3, 8, 8), seed=seed), folder)
    return str(folder)


def test_transfer_from_a_model_to_itself_is_the_white_box_result(tmp_path: Path, tiny_data: DataSet) -> None:
    source = _save(tmp_path / "a")
    model, threat, attack = bastion.load(source), Threat("linf", 0.01), PGD(steps=5)
    batch = tiny_data.test.batch(range(40))
    batch = batch._replace(y=model(batch.x).argmax(1))
    facts = Transfer(source, threat, attack)(model, batch, seed=0)
    white = Adversarial(threat, attack)(model, batch, seed=0)
    assert 5 < white["correct"].sum() < 35
    assert facts.keys() - white.keys() == {"source_fooled"}
    shared = (facts.keys() & white.keys()) - {"forwards"}  # the judge's clean pass is not the attack's
    assert {"correct", "in_budget", "distance", "prediction", "adversarial"} <= shared
    assert all(torch.equal(facts[name].nan_to_num(), white[name].nan_to_num()) for name in shared)
    assert torch.equal(facts["source_fooled"], ~white["correct"])


def test_points_are_made_for_the_source_and_judged_on_the_model(tmp_path: Path, tiny_data: DataSet) -> None:
    source = _save(tmp_path / "a")
    batch, threat, attack = tiny_data.test.batch(range(40)), Threat("linf", 0.1), PGD(steps=5)
    made = attack(bastion.load(source), batch, threat, seed=7)

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (
                9.0 * F.one_hot(batch.y, 3)
                - 18.0 * F.one_hot(batch.y, 3) * (x != batch.x).any(-1).any(-1).any(-1)[:, None]
            )

    facts = Transfer(source, threat, attack)(Fixed(), batch, seed=7)
    assert torch.equal(facts["adversarial"], made)
    assert torch.equal(facts["correct"], (made == batch.x).flatten(1).all(1))
    assert torch.allclose(facts["distance"].nan_to_num(), threat.distance(batch.x, made).float(), atol=1e-7)
    assert facts["in_budget"].all()


def test_points_outside_the_threat_fool_nobody(tmp_path: Path, tiny_data: DataSet) -> None:
    def outside(model: nn.Module, batch: Batch, threat: Threat, *, seed: int) -> Tensor:
        return 1 - batch.x

    model = bastion.load(_save(tmp_path / "a"))
    batch = tiny_data.test.batch(range(12))
    facts = Transfer(str(tmp_path / "a"), Threat("linf", 0.01), AttackBy(outside))(model, batch, seed=0)
    assert not facts["in_budget"].any() and not facts["source_fooled"].any()
    assert torch.equal(facts["correct"], ~misclassified(model(batch.x), batch.y))


def _probe(source: str) -> Transfer:
    threat = {"norm": "linf", "eps": 8 / 255}
    probe = probes.build({"name": "transfer", "source": source, "threat": threat, "attack": "fgsm"})
    assert isinstance(probe, Transfer)
    return probe


def test_the_record_tells_one_source_from_another(tmp_path: Path) -> None:
    source = _save(tmp_path / "a", seed=0)
    first = _probe(source)
    assert first.identity in repr(first)
    assert repr(_probe(source)) == repr(first)
    assert pickle.loads(pickle.dumps(first)) == first
    _save(tmp_path / "a", seed=1)  # trained on
    second = _probe(source)
    assert repr(second) != repr(first)
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(BastionError, match="changed on the disk while it was used"):
        first(bastion.load(source), batch, seed=0)


def test_sources_that_do_not_fit_are_refused(tmp_path: Path, tiny_model: Classifier) -> None:
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(BastionError, match="no model 'nowhere'"):
        _probe("nowhere")
    with pytest.raises(BastionError, match="has 5 classes, the measured model 3"):
        _probe(_save(tmp_path / "five", classes=5))(tiny_model.eval(), batch, seed=0)
    larger = batch._replace(x=torch.rand(2, 3, 12, 12))
    with pytest.raises(BastionError, match="probe transfer, source .*made for images of 8×8 and does not take 12×12"):
        _probe(_save(tmp_path / "a"))(tiny_model, larger, seed=0)


def test_it_is_measured_like_any_probe(tmp_path: Path, tiny_data: DataSet) -> None:
    source, target = _save(tmp_path / "a"), _save(tmp_path / "b", seed=1)
    attack = {"name": "ensemble", "members": ["fgsm", {"name": "apgd-dlr", "steps": 2}]}
    spec = {"name": "transfer", "source": source, "threat": {"norm": "linf", "eps": 0.1}, "attack": attack}
    suite = Suite.model_validate({"probes": {"clean": {"name": "accuracy"}, "moved": spec}})
    facts = bastion.measure(target, tiny_data, suite, folder=tmp_path / "run")
    assert "moved" in facts.table()
    assert {f"moved/{name}" for name in ("warning.blind-start", "backwards", "before")} <= facts.columns.keys()
    assert (facts.correct("moved") <= facts.correct("clean")).all()
    assert facts.columns["moved/source_fooled"].dtype == bool
    assert str(facts.case("moved").threat) == "ℓ∞ ≤ 0.1"

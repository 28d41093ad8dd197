"""Attacks on patches reach the optimum inside them, and touch nothing outside."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import Linear, MakeLinear
from torch import Tensor, nn

from bastion import BastionError, Threat
from bastion.attacks import attacks
from bastion.attacks.losses import ce, margin
from bastion.attacks.patch import (
    PatchGaussian,
    PatchNoise,
    PatchOcclusion,
    PatchPGD,
    choose_patches,
    patch_attention,
)
from bastion.forward import misclassified
from bastion.models import Classifier, checkpoint
from bastion.patches import Grid
from bastion.types import Attack, Batch

FREE = Threat("linf", 1.0)
THREATS = [Threat("linf", 0.06), Threat("l2", 0.4), Threat("l1", 2.0), FREE]
ids = ["linf", "l2", "l1", "free"]
ATTACKS: list[Attack] = [
    PatchPGD(patches=2, size=4, steps=5, restarts=2),
    PatchPGD(patches=2, size=4, steps=3, choose="random", restarts=3),
    PatchNoise(patches=2, size=4, draws=3),
    PatchOcclusion(share=0.5, size=4, draws=3),
    PatchPGD(share=0.33, size=4, steps=3),
    PatchGaussian(share=0.33, size=4, draws=3),
]


class Wary(nn.Module):
    """The further a point is from the image, the worse it is for class 0."""

    def __init__(self, x0: Tensor) -> None:
        super().__init__()
        self.x0 = x0

    def forward(self, x: Tensor) -> Tensor:
        moved = (x - self.x0[: len(x)]).square().flatten(1).sum(1)
        return torch.stack([1 - moved, moved], 1)


def _changed(grid: Grid, x0: Tensor, x: Tensor) -> Tensor:
    """(B, patches) bool."""
    return grid.sums((x != x0).any(1).double()) > 0


def _vit(class_token: bool) -> Classifier:
    """16×16 images in 16 tokens, 6 blocks."""
    sizes = {"num_classes": 3, "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 6, "num_heads": 2}
    name = "timm/vit_tiny_patch16_224" if class_token else "vit/micro"
    model = checkpoint.build({"name": name, **sizes}, mean=(0.5,) * 3, std=(0.25,) * 3).eval().double()
    for block in model.network.blocks:
        nn.init.normal_(block.attn.qkv.weight, std=0.5)  # attention that is not all the same
    return model


def test_patches_at_the_edges_are_cut_off() -> None:
    grid = Grid(9, 6, 4)
    assert grid.shape == (3, 2) and grid.count == 6
    assert grid.sums(torch.ones(2, 9, 6)).tolist() == [[16, 8, 16, 8, 4, 2]] * 2
    mask = grid.mask(torch.tensor([[5, 0], [1, 1]]))
    assert mask.shape == (2, 1, 9, 6)
    assert mask[0, 0, 8:, 4:].all() and mask[0, 0, :4, :4].all() and mask[0].sum() == 18
    assert mask[1].sum() == 8


def _gain(w: Tensor, x: Tensor, threat: Threat) -> Tensor:
    """(B,) the most that ⟨w, δ⟩ can reach inside ball and box."""
    size, room = w.flatten(1).abs(), torch.where(w > 0, 1 - x, x).flatten(1)
    if threat.norm == "linf":
        return (size * room.clamp(max=threat.eps)).sum(1)
    if threat.norm == "l1":
        order = size.argsort(1, descending=True)
        ranked = room.gather(1, order)
        taken = torch.minimum(ranked, (threat.eps - ranked.cumsum(1) + ranked).clamp(min=0))
        return (size.gather(1, order) * taken).sum(1)
    low, high = torch.zeros(len(x), 1, dtype=x.dtype), torch.full((len(x), 1), 1e6, dtype=x.dtype)
    for _ in range(200):
        middle = (low + high) / 2
        out = torch.minimum(middle * size, room).norm(dim=1, keepdim=True) > threat.eps
        low, high = torch.where(out, low, middle), torch.where(out, middle, high)
    return (size * torch.minimum(low * size, room)).sum(1)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
def test_patch_pgd_reaches_the_linear_optimum_of_its_patches(make_linear: MakeLinear, threat: Threat) -> None:
    """Two classes: the gradient is ±w, so the chosen patches are those with the largest Σ|w|."""
    model, batch = make_linear(classes=2, n=32, shape=(3, 9, 7))
    w = (model.weight[1 - batch.y] - model.weight[batch.y]).detach().view(batch.x.shape)
    grid = Grid(9, 7, 4)
    mask = grid.mask(grid.sums(w.abs().sum(1)).topk(2, dim=1).indices)
    best = margin(model(batch.x), batch.y) + _gain(w * mask, batch.x, threat)
    attack = PatchPGD(patches=2, size=4, steps=300, rel_step=0.02, random_start=False, sparsity=1e-9)
    x = attack(model, batch, threat, seed=0)
    reached = margin(model(x), batch.y)
    assert ((x == batch.x) | mask).all()
    assert (reached <= best + 1e-9).all()
    assert ((best - reached) <= 2e-3 * _gain(w * mask, batch.x, threat)).all()


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_few_patches_change_inside_the_threat_and_nothing_gets_better(
    make_linear: MakeLinear, threat: Threat, attack: Attack, dtype: torch.dtype
) -> None:
    model, batch = make_linear(classes=4, shape=(3, 9, 6))
    model, batch = model.to(dtype), batch._replace(x=batch.x.to(dtype), y=batch.y.roll(1))
    x = attack(model, batch, threat, seed=0)
    allowed = 3 if isinstance(attack, PatchOcclusion) else 2
    changed = _changed(Grid(9, 6, 4), batch.x, x).sum(1)
    assert x.dtype == dtype and threat.contains(batch.x, x).all()
    assert (changed <= allowed).all() and changed.max() > 0  # bit-equal elsewhere
    assert (ce(model(x), batch.y) >= ce(model(batch.x), batch.y))[~misclassified(model(x), batch.y)].all()
    assert (misclassified(model(x), batch.y) >= misclassified(model(batch.x), batch.y)).all()


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("attack", ATTACKS, ids=repr)
def test_the_rest_of_the_batch_and_eps_zero_change_nothing(
    make_linear: MakeLinear, threat: Threat, attack: Attack
) -> None:
    model, batch = make_linear(classes=4, shape=(3, 9, 6))
    whole, order = attack(model, batch, threat, seed=3), torch.tensor([5, 0, 9])
    assert torch.allclose(attack(model, batch.select(order), threat, seed=3), whole[order], atol=1e-12, rtol=0)
    assert torch.allclose(attack(model, batch, threat.scaled(0), seed=3), batch.x, atol=1e-12, rtol=0)
    assert not torch.equal(attack(model, batch, threat, seed=4), whole)


def test_occlusion_replaces_a_tenth_of_the_patches_by_uniform_noise() -> None:
    """Eq. 1 of RSPC with free pixels: 7 of 64 patches, noise of mean 1/2 and variance 1/12 that forgets the image."""
    x0 = torch.rand(32, 3, 32, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    batch = Batch(torch.arange(32), x0, torch.zeros(32, dtype=torch.int64))
    x = PatchOcclusion(share=0.1, size=4)(Wary(x0), batch, FREE, seed=0)
    changed = _changed(Grid(32, 32, 4), x0, x)
    assert (changed.sum(1) == 7).all()
    noise, image = x[x != x0], x0[x != x0]
    assert len(noise) == 32 * 7 * 16 * 3
    assert noise.mean().item() == pytest.approx(0.5, abs=0.01)
    assert noise.var().item() == pytest.approx(1 / 12, rel=0.03)
    assert abs(torch.corrcoef(torch.stack([noise, image]))[0, 1].item()) < 0.03
    assert changed.any(0).sum() > 55  # every example has its own patches


def test_gaussian_noise_on_a_tenth_of_the_patches_has_the_asked_deviation_where_the_box_does_not_cut_it() -> None:
    x0 = torch.full((64, 3, 32, 32), 0.5, dtype=torch.float64)
    batch = Batch(torch.arange(64), x0, torch.zeros(64, dtype=torch.int64))
    small = PatchGaussian(share=0.1, size=4, sigma=0.1)(Wary(x0), batch, FREE, seed=0)
    assert (_changed(Grid(32, 32, 4), x0, small).sum(1) == 7).all()
    moved = (small - x0)[small != x0]
    assert moved.mean().item() == pytest.approx(0, abs=0.002) and moved.std().item() == pytest.approx(0.1, rel=0.02)
    strong = PatchGaussian(share=0.1, size=4)(Wary(x0), batch, FREE, seed=0)
    cut = ((strong == 0) | (strong == 1)).double().sum().item() / (64 * 7 * 16 * 3)
    assert cut == pytest.approx(0.188, abs=0.01)  # P(|N| > 0.5 / 0.38)


@pytest.mark.parametrize("norm", ["linf", "l2", "l1"])
def test_patch_noise_is_uniform_in_the_ball_of_the_patch(norm: str) -> None:
    """In n dimensions the radius over eps has mean n / (n + 1); for linf each coordinate has mean size eps / 2."""
    x0 = torch.full((400, 1, 8, 8), 0.5, dtype=torch.float64)
    batch = Batch(torch.arange(400), x0, torch.zeros(400, dtype=torch.int64))
    threat = Threat(norm, 0.3)
    x = PatchNoise(patches=1, size=2)(Wary(x0), batch, threat, seed=0)
    assert (_changed(Grid(8, 8, 2), x0, x).sum(1) == 1).all()
    assert threat.distance(x0, x).mean().item() / 0.3 == pytest.approx(4 / 5, abs=0.02)
    if norm == "linf":
        assert (x - x0)[x != x0].abs().mean().item() == pytest.approx(0.15, abs=0.005)


def test_more_draws_and_restarts_only_help(make_linear: MakeLinear) -> None:
    model, batch = make_linear(classes=4, shape=(3, 9, 6))
    for one, many in [
        (PatchNoise(size=4), PatchNoise(size=4, draws=8)),
        (PatchOcclusion(size=4), PatchOcclusion(size=4, draws=8)),
        (PatchGaussian(size=4), PatchGaussian(size=4, draws=8)),
        (PatchPGD(size=4, choose="random", steps=3), PatchPGD(size=4, choose="random", steps=3, restarts=8)),
    ]:
        few, more = (margin(model(attack(model, batch, FREE, seed=0)), batch.y) for attack in (one, many))
        assert (more >= few - 1e-9).float().mean() > 0.8  # by cross-entropy always, by margin nearly
        assert more.mean() > few.mean()


@pytest.mark.parametrize("class_token", [True, False])
def test_attention_chooses_the_patches_that_the_fifth_block_looks_at(class_token: bool) -> None:
    model = _vit(class_token)
    x = torch.rand(4, 3, 16, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    batch = Batch(torch.arange(4), x, torch.zeros(4, dtype=torch.int64))
    with torch.no_grad(), model.tap("attention") as taps:
        model(x)
    attention = taps.attention["blocks.4"].mean((1, 2))[:, 1 if class_token else 0 :]
    assert attention.shape == (4, 16)
    chosen = choose_patches(model, batch, Grid(16, 16, 4), "attention", 3, seed=0, draw=0, where="here")
    assert torch.equal(chosen, attention.topk(3, dim=1).indices)
    # patches of four tokens get what their tokens get
    coarse = attention.view(4, 2, 2, 2, 2).sum((2, 4)).flatten(1)
    chosen = choose_patches(model, batch, Grid(16, 16, 8), "attention", 1, seed=0, draw=0, where="here")
    assert torch.equal(chosen[:, 0], coarse.argmax(1))
    x = PatchPGD(size=4, choose="attention", steps=2)(model, batch, FREE, seed=0)
    assert (
        _changed(Grid(16, 16, 4), batch.x, x)
        <= Grid(16, 16, 4).mask(attention.argmax(1)[:, None])[:, 0, ::4, ::4].flatten(1)
    ).all()


def test_class_and_register_tokens_are_no_patches_and_rectangles_have_rectangular_grids() -> None:
    sizes = {"num_classes": 3, "img_size": [16, 24], "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    spec = {"name": "timm/vit_tiny_patch16_224", "reg_tokens": 4, **sizes}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    logits, maps = patch_attention(model, torch.rand(2, 3, 16, 24), "here")
    assert logits.shape == (2, 3)
    assert [tuple(each.shape) for each in maps] == [(2, 29, 4, 6)] * 2


@pytest.mark.parametrize(
    ("name", "message"),
    [("timm/resnet18", "needs the attention maps"), ("timm/swin_tiny_patch4_window7_224", "attends over all tokens")],
)
def test_models_without_attention_over_patches_are_refused(name: str, message: str) -> None:
    model = checkpoint.build({"name": name, "num_classes": 3}, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    x = torch.rand(2, *model.shape)
    batch = Batch(torch.arange(2), x, torch.tensor([0, 1]))
    with pytest.raises(BastionError, match=message):
        PatchPGD(choose="attention", steps=1)(model, batch, FREE, seed=0)


def test_a_module_that_shows_no_attention_is_refused(make_linear: MakeLinear) -> None:
    model, batch = make_linear()
    assert isinstance(model, Linear)
    with pytest.raises(BastionError, match="which modules of Linear are residual blocks .*; give a bastion Classifier"):
        PatchNoise(size=2, choose="attention")(model, batch, FREE, seed=0)


def test_more_patches_than_there_are_is_an_error(make_linear: MakeLinear) -> None:
    model, batch = make_linear(shape=(3, 9, 6))
    with pytest.raises(BastionError, match="7 patches of 4×4 pixels asked for, an image of 9×6 has 6; ask for fewer"):
        PatchPGD(patches=7, size=4)(model, batch, FREE, seed=0)
    assert _changed(Grid(9, 6, 4), batch.x, PatchPGD(patches=6, size=4)(model, batch, FREE, seed=0)).all()


def test_an_attack_is_its_own_record() -> None:
    for attack in ATTACKS:
        assert eval(repr(attack)) == attack


@pytest.mark.parametrize("name", ["patch-pgd", "patch-noise", "patch-occlusion", "patch-gaussian", "patchout"])
def test_a_patch_larger_than_the_image_is_refused(make_linear: MakeLinear, name: str) -> None:
    model, batch = make_linear(n=2)
    with pytest.raises(BastionError, match=r"patches of 1000×1000 pixels are larger than the image of"):
        attacks.build({"name": name, "size": 1000})(model, batch, Threat("linf", 0.1), seed=0)

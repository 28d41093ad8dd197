"""Patch-Fool: its gradients are what the paper says, and it keeps to its patches, pixels and threat."""

from __future__ import annotations

import pytest
import torch
from tests.conftest import MakeLinear
from tests.vits import right_batch, small_vit
from torch import Tensor

from bastion import BastionError, Threat, rng
from bastion.attacks.losses import ce
from bastion.attacks.patch import patch_attention, random_patch
from bastion.attacks.patchfool import (
    PatchFool,
    PatchOptimizer,
    attention_blocks,
    log_attention,
    losses_and_grads,
    merged,
    without_conflict,
)
from bastion.forward import misclassified
from bastion.models import Classifier, checkpoint
from bastion.patches import Grid
from bastion.types import Batch

FREE = Threat("linf", 1.0)
THREATS = [FREE, Threat("linf", 0.1), Threat("l2", 0.8), Threat("l1", 4.0)]
ids = ["free", "linf", "l2", "l1"]


@pytest.fixture
def vit() -> Classifier:
    return small_vit(class_token=True, depth=6)


@pytest.fixture(params=[True, False], ids=["class-token", "mean-pooled"])
def either_vit(request: pytest.FixtureRequest) -> Classifier:
    """Tokens of the image are found behind a class token, or where there is none."""
    return small_vit(request.param, depth=6)


def _changed_pixels(x0: Tensor, x: Tensor) -> Tensor:
    return (x != x0).any(1).flatten(1).sum(1)


def _inner(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def test_conflicting_gradients_lose_what_opposes_the_main_one_and_others_are_left() -> None:
    generator = torch.Generator().manual_seed(0)
    main, other = (torch.randn(64, 3, 4, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    freed = without_conflict(other, main)
    before = _inner(other, main)
    conflict = before < 0
    assert 10 < conflict.sum() < 54
    assert (_inner(freed, main) >= -1e-6).all()
    assert torch.equal(freed[~conflict], other[~conflict])
    expected = other - (before / _inner(main, main)).view(-1, 1, 1, 1) * main
    assert torch.allclose(freed[conflict], expected[conflict], atol=1e-12)
    assert torch.allclose(without_conflict(other, 1e-20 * main), freed, atol=1e-12)  # its length has no part in it
    assert torch.equal(merged([main], 0.5), main)
    assert torch.allclose(merged([main, other], 0.5), main + 0.5 * freed)


def test_attention_paid_is_the_mean_log_attention_to_the_token(either_vit: Classifier) -> None:
    batch = right_batch(either_vit)
    _, maps = patch_attention(either_vit, batch.x, "here")
    with either_vit.tap("attention") as taps:
        either_vit(batch.x)
    token = 5 + (1 if taps.attention["blocks.2"].shape[3] == 17 else 0)
    expected = taps.attention["blocks.2"].mean(1)[:, :, token].log().mean(1)
    patch = Grid(16, 16, 4).mask(torch.full((6, 1), 5))
    assert torch.allclose(log_attention(maps[2], patch), expected, atol=1e-12)


def test_the_gradient_of_attention_is_that_of_finite_differences(either_vit: Classifier) -> None:
    batch = right_batch(either_vit, 3)
    first = Grid(16, 16, 4).mask(torch.tensor([[5], [0], [15]]))
    gradients = losses_and_grads(either_vit, batch, first).gradients
    assert len(gradients) == 3  # cross-entropy, and blocks 1 and 2 of 6
    direction = torch.randn(batch.x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def total(x: Tensor, block: int) -> Tensor:
        return log_attention(patch_attention(either_vit, x, "here")[1][block], first)

    step = 1e-6 * direction
    with torch.no_grad():
        for block, gradient in ((1, gradients[1]), (2, gradients[2])):
            slope = (total(batch.x + step, block) - total(batch.x - step, block)) / 2e-6
            assert slope.abs().min() > 1e-3
            assert torch.allclose(_inner(gradient, direction), slope, rtol=1e-6, atol=1e-8)


def test_half_of_the_blocks_but_the_first_are_misled() -> None:
    assert attention_blocks(12) == [1, 2, 3, 4, 5]
    assert attention_blocks(4) == [1]
    assert attention_blocks(3) == attention_blocks(1) == [0]


def test_without_weight_it_is_adam_on_the_cross_entropy_of_the_patch(vit: Classifier) -> None:
    """By hand: Adam with the learning rate decayed every ten steps, the best iterate kept."""
    batch = right_batch(vit)
    attack = PatchFool(weight=0.0, steps=25, size=4)
    _, maps = patch_attention(vit, batch.x, "here")
    mask = Grid(16, 16, 4).mask(maps[4].mean(1).flatten(1).argmax(1)[:, None])
    x0 = batch.x
    delta = random_patch(FREE, x0, mask, batch.index, seed=2, draw=rng.key("patch-fool", "start")).requires_grad_()
    adam = torch.optim.Adam([delta], lr=0.05, eps=1e-12)
    decay = torch.optim.lr_scheduler.StepLR(adam, 10, 0.95)
    points = [x0]
    for _ in range(25):
        x = torch.where(mask, delta, x0)
        points.append(x.detach())
        delta.grad = -torch.autograd.grad(ce(vit(x), batch.y).sum(), delta)[0]
        adam.step()
        decay.step()
        delta.data.clamp_(0, 1)
    points.append(torch.where(mask, delta, x0).detach())
    with torch.no_grad():
        worth = torch.stack([ce(vit(x), batch.y) + 1e3 * misclassified(vit(x), batch.y) for x in points])
    expected = torch.stack(points)[worth.argmax(0), range(6)]
    assert torch.allclose(attack(vit, batch, FREE, seed=2), expected, atol=1e-9)


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize(("patches", "pixels"), [(1, None), (3, 5)])
def test_it_keeps_to_its_patches_pixels_and_threat(
    vit: Classifier, threat: Threat, patches: int, pixels: int | None
) -> None:
    batch = right_batch(vit)
    batch = batch._replace(y=torch.cat([batch.y[:3], (batch.y[3:] + 1) % 3]))  # half are wrong already
    x = PatchFool(patches=patches, pixels=pixels, steps=12)(vit, batch, threat, seed=0)
    _, maps = patch_attention(vit, batch.x, "here")
    mask = Grid(16, 16, 4).mask(maps[4].mean(1).flatten(1).topk(patches, dim=1).indices)
    assert ((x == batch.x) | mask).all()
    assert threat.contains(batch.x, x).all()
    assert (_changed_pixels(batch.x, x) <= (pixels or 16 * patches)).all()
    assert _changed_pixels(batch.x, x).max() > 0
    assert (misclassified(vit(x), batch.y) >= misclassified(vit(batch.x), batch.y)).all()


@pytest.mark.parametrize("threat", THREATS, ids=ids)
@pytest.mark.parametrize("pixels", [None, 5])
def test_the_rest_of_the_batch_changes_nothing(vit: Classifier, threat: Threat, pixels: int | None) -> None:
    batch = right_batch(vit)
    attack = PatchFool(patches=2, pixels=pixels, steps=6, weight=0.5)
    whole, order = attack(vit, batch, threat, seed=1), torch.tensor([4, 0])
    assert torch.allclose(attack(vit, batch.select(order), threat, seed=1), whole[order], atol=1e-9, rtol=0)


def test_it_is_stronger_than_noise_and_weight_draws_attention(vit: Classifier) -> None:
    batch = right_batch(vit, 16)
    first = Grid(16, 16, 4).mask(patch_attention(vit, batch.x, "here")[1][4].mean(1).flatten(1).argmax(1)[:, None])
    found = {weight: PatchFool(steps=40, weight=weight)(vit, batch, FREE, seed=0) for weight in (0.0, 100.0)}
    start = PatchFool(steps=0)(vit, batch, FREE, seed=0)
    total = {weight: log_attention(patch_attention(vit, x, "here")[1][1], first) for weight, x in found.items()}
    assert ce(vit(found[0.0]), batch.y).mean() > ce(vit(start), batch.y).mean() + 0.1
    assert total[100.0].mean() > total[0.0].mean()


def test_the_pixel_scores_get_the_straight_through_gradient(vit: Classifier) -> None:
    """That of the loss with respect to a soft mask m in x0 + m·(colour - x0), at the hard mask."""
    batch = right_batch(vit)
    allowed = Grid(16, 16, 4).mask(torch.tensor([[3, 7]]).expand(6, 2))
    optimizer = PatchOptimizer(PatchFool(pixels=5, weight=0.0), batch, FREE, allowed, seed=0)
    x = optimizer.image()
    soft = (x != batch.x).any(1, keepdim=True).double().requires_grad_()
    colours = optimizer.colours.clone()
    value = ce(vit(batch.x + soft * (colours - batch.x)), batch.y).sum()
    (expected,) = torch.autograd.grad(value, soft)
    optimizer.step(losses_and_grads(vit, batch.at(x), None).gradients, 0)
    assert torch.allclose(optimizer.scores.grad, expected * allowed, atol=1e-12)
    untouched = (soft == 0).expand_as(colours)
    assert torch.equal(optimizer.colours[untouched], colours[untouched])


def test_ties_between_pixels_do_not_add_pixels(vit: Classifier) -> None:
    batch = right_batch(vit)
    optimizer = PatchOptimizer(
        PatchFool(pixels=7), batch, FREE, Grid(16, 16, 4).mask(torch.zeros(6, 1, dtype=torch.int64)), seed=0
    )
    optimizer.scores.fill_(0.5)
    assert (_changed_pixels(batch.x, optimizer.image()) == 7).all()


def test_the_choice_of_pixels_becomes_final(vit: Classifier) -> None:
    batch = right_batch(vit)
    optimizer = PatchOptimizer(
        PatchFool(pixels=4, pixel_steps=1, pixel_step=10.0), batch, FREE, torch.ones(6, 1, 16, 16) > 0, seed=0
    )
    scores = [optimizer.scores.clone()]
    for step in range(3):
        optimizer.step(losses_and_grads(vit, batch.at(optimizer.image()), None).gradients, step)
        scores.append(optimizer.scores.clone())
    assert not torch.equal(scores[0], scores[1])
    assert torch.equal(scores[1], scores[2]) and torch.equal(scores[2], scores[3])


def test_shallow_models_are_attacked_by_their_last_block() -> None:
    model = small_vit(class_token=True, depth=2)
    batch = right_batch(model)
    chosen = patch_attention(model, batch.x, "here")[1][1].mean(1).flatten(1).argmax(1)
    x = PatchFool(steps=3)(model, batch, FREE, seed=0)
    assert ((x == batch.x) | Grid(16, 16, 4).mask(chosen[:, None])).all()


def test_the_model_is_left_as_it_was(vit: Classifier) -> None:
    noise = torch.get_rng_state()
    with torch.no_grad():  # an attack needs gradients and sees to them itself
        PatchFool(steps=2)(vit, right_batch(vit), FREE, seed=0)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in vit.parameters())
    assert torch.equal(torch.get_rng_state(), noise)


def test_models_without_attention_are_refused(make_linear: MakeLinear, tiny_model: Classifier) -> None:
    model, batch = make_linear()
    with pytest.raises(BastionError, match="patch-fool: which modules of .* are residual blocks is not known"):
        PatchFool()(model, batch, FREE, seed=0)
    batch = Batch(torch.arange(2), torch.rand(2, 3, 8, 8), torch.tensor([0, 1]))
    with pytest.raises(BastionError, match="patch-fool: needs the attention maps .*residual blocks is not known"):
        PatchFool()(tiny_model.eval(), batch, FREE, seed=0)


def test_images_that_do_not_divide_into_tokens_need_a_size() -> None:
    sizes = {"num_classes": 3, "img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    flat = (0.5,) * 3
    model = checkpoint.build({"name": "vit/micro", **sizes}, mean=flat, std=flat, shape=(3, 10, 10), resize="bicubic")
    batch = Batch(torch.arange(2), torch.rand(2, 3, 10, 10), torch.tensor([0, 1]))
    with pytest.raises(BastionError, match="10×10 does not divide into the model's 4×4 tokens; give the size"):
        PatchFool(steps=1)(model.eval(), batch, FREE, seed=0)
    x = PatchFool(steps=3, size=3)(model, batch, FREE, seed=0)
    assert (_changed_pixels(batch.x, x) <= 9).all()

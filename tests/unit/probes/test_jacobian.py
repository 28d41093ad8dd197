"""Singular values of a network's parts are those of the dense Jacobians, in every family and whatever a block does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.cube import CubeForward
from tests.vits import small_vit
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bastion import memory
from bastion.errors import BastionError
from bastion.jacobians.parts import Chain
from bastion.models import Backbone, Classifier, checkpoint
from bastion.models.classifier import Blocks
from bastion.probes import jacobian as module
from bastion.probes.jacobian import JacobianSpectra
from bastion.types import Batch

FAMILIES = {
    "tiny/vit": 8,
    "tiny/xcit": 8,
    "tiny/covit": 8,
    "tiny/vit-cauchy": 8,
    "tiny/cait": 8,
    "tiny/fan": 8,
    "tiny/rvt": 8,
    "resnet/micro": 4,
}


def family(name: str, size: int) -> Classifier:
    """With BatchNorm statistics that are not the first ones, and weights whose branches matter."""
    torch.manual_seed(0)
    model = checkpoint.build({"name": name, "img_size": size, "num_classes": 4}, mean=(0.5,) * 3, std=(0.25,) * 3)
    for parameter in model.parameters():
        parameter.data *= 1.5
    model.train()(torch.rand(8, 3, size, size))
    return model.eval()


def batch(size: int, n: int = 2, dtype: torch.dtype = torch.float32) -> Batch:
    x = torch.rand(n, 3, size, size, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return Batch(torch.arange(n), x, torch.zeros(n, dtype=torch.int64))


def dense(function: Any, x: Tensor, row: int = 0) -> Tensor:
    """(m, n) of one example of a batch: all rows of the identity go back along the graph at once."""
    x = x.detach().clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        y = function(x.clone())[row].flatten()
    (rows,) = torch.autograd.grad(y, x, torch.eye(len(y), dtype=x.dtype), is_grads_batched=True)
    return rows[:, row].flatten(1).double()


def close(found: Tensor, right: Tensor) -> bool:
    return bool((found.double() - right).abs().max() <= 1e-3 * right[0])


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_have_the_singular_values_of_their_dense_jacobians(name: str) -> None:
    model, images = family(name, FAMILIES[name]), batch(FAMILIES[name])
    top = 3 if name == "tiny/vit" else 1
    facts = JacobianSpectra(parts=("branch", "block"), top=top)(model, images, seed=0)
    assert not facts["warning.unconverged"].any()
    chain, compared = Chain(model.requires_grad_(False), images.x, "test"), 0
    assert facts["block"].shape == (2, len(chain.names), top)
    for number, call in enumerate(chain.calls):
        if call.x[1].numel() > 512:
            continue  # the oracle would take minutes
        whole = dense(call.function, call.x, row=1)
        assert close(facts["block"][1, number], torch.linalg.svdvals(whole)[:top]), call.name
        if call.x.shape == call.y.shape:
            branch = whole - torch.eye(len(whole))
            assert close(facts["branch"][1, number], torch.linalg.svdvals(branch)[:top]), call.name
        else:
            assert facts["branch"][1, number].isnan().all()
        compared += 1
    assert compared >= 4


@pytest.mark.parametrize("name", ["tiny/vit", "resnet/micro"])
def test_embedding_head_and_network_have_the_singular_values_of_their_dense_jacobians(name: str) -> None:
    model, images = family(name, 4 if name == "resnet/micro" else 8), batch(4 if name == "resnet/micro" else 8)
    facts = JacobianSpectra(parts=("embedding", "head", "network"), top=3)(model, images, seed=0)
    model.requires_grad_(False)
    chain = Chain(model, images.x, "test")
    first, last = chain.calls[0].block.module, chain.calls[-1].block.module
    seen: dict[str, Tensor] = {}

    def from_pixels(x: Tensor) -> Tensor:
        hook = first.register_forward_pre_hook(lambda _, inputs: seen.update(z=inputs[0]))
        model(x)
        hook.remove()
        return seen["z"]

    def to_logits(z: Tensor) -> Tensor:
        hook = last.register_forward_hook(lambda *_: z)
        logits: Tensor = model(images.x)
        hook.remove()
        return logits

    for part, function, at in (
        ("embedding", from_pixels, images.x),
        ("head", to_logits, chain.calls[-1].y),
        ("network", model, images.x),
    ):
        assert close(facts[part][0], torch.linalg.svdvals(dense(function, at))[:3]), part


def test_patches_that_do_not_overlap_repeat_every_singular_value_of_their_projection() -> None:
    """The Jacobian of the patch embedding is the projection once for each patch."""
    model = small_vit(class_token=True)
    facts = JacobianSpectra(parts=("embedding",), top=5)(model, batch(16, dtype=torch.float64), seed=0)
    projection = model.network.patch_embed.proj.weight.flatten(1) / 0.25
    right = torch.linalg.svdvals(projection.detach())[0]
    assert torch.allclose(facts["embedding"].double(), right.expand(2, 5), rtol=1e-5)


def test_chunks_and_the_rest_of_the_batch_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = small_vit(), batch(16, n=5, dtype=torch.float64)
    probe = JacobianSpectra(parts=("branch", "block", "head"), top=2)
    whole = probe(model, images, seed=0)
    monkeypatch.setattr(module, "MOST", 2)
    for name, fact in probe(model, images, seed=0).items():
        assert torch.allclose(fact.double(), whole[name].double(), rtol=1e-9, atol=1e-9, equal_nan=True), name
    assert torch.equal(whole["block"], probe(model, images, seed=0)["block"].to(whole["block"]))


def test_aggregates_are_those_of_the_paper() -> None:
    model, images = small_vit(), batch(16, n=6, dtype=torch.float64)
    images = images._replace(y=(model(images.x).argmax(1) + torch.tensor([0, 0, 0, 1, 1, 1])) % 3)
    facts = JacobianSpectra(parts=("branch", "block"), top=2)(model, images, seed=0)
    right = model(images.x).argmax(1) == images.y
    assert right.any() and not right.all()
    assert torch.equal(facts["table_1"][right], facts["block"][right, :, 0].amax(1))
    assert facts["table_1"][~right].isnan().all()
    assert torch.allclose(facts["exponent"], facts["branch"][:, :, 0].sum(1))


def test_a_tolerance_that_is_not_reached_warns_and_shows_its_residual() -> None:
    facts = JacobianSpectra(parts=("block",), products=4)(small_vit(), batch(16, dtype=torch.float64), seed=0)
    assert facts["warning.unconverged"].all()
    assert (facts["block_residual"] > 1e-4).any(1).all()


def classifier(*layers: nn.Module, blocks: str | None) -> Classifier:
    torch.manual_seed(0)
    declared = (Blocks(blocks),) if blocks else ()
    head = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 3))
    network = nn.Sequential(nn.Sequential(*layers), head)
    return Classifier(Backbone(network, 3, (3, 8, 8), blocks=declared), (0.0,) * 3, (1.0,) * 3).eval()


class InPlace(nn.Module):
    """2x + ReLU(conv(2x)), written over its input; returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        x.mul_(2)
        return x + self.conv(x).relu_(), "and something else"


class First(nn.Module):
    def forward(self, x: tuple[Tensor, str]) -> Tensor:
        return x[0]


def test_blocks_that_change_their_input_in_place_and_return_tuples() -> None:
    model = classifier(InPlace(), First(), blocks="0.0")
    images = batch(8)
    facts = JacobianSpectra(top=2)(model, images, seed=0)
    conv = model.network[0][0].conv
    block = dense(lambda z: 2 * z + conv(2 * z).relu(), images.x)
    head = model.network[1][1].weight.detach().double()
    for part, right in {
        "block": block,
        "branch": block - torch.eye(len(block)),
        "head": head,
        "network": head @ block,
        "embedding": torch.eye(len(block)),
    }.items():
        assert close(facts[part].reshape(2, 2)[0], torch.linalg.svdvals(right)[:2]), part


class CubeBlock(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        cubed: Tensor = x + CubeForward.apply(x)
        return cubed


class RootBlock(nn.Module):
    """x + √ReLU(x): the slope at 0 is not finite."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.relu().sqrt()


def test_a_block_whose_jacobian_is_not_finite_makes_no_aggregate_of_the_others() -> None:
    model, images = classifier(RootBlock(), nn.Conv2d(3, 3, 1), blocks="0.*"), batch(8)
    images.x[0, 0, 0, 0] = 0
    images = Batch(images.index, images.x, model(images.x).argmax(1))
    facts = JacobianSpectra(parts=("branch", "block"))(model, images, seed=0)
    assert facts["block"].isnan()[..., 0].tolist() == [[True, False], [False, False]]
    assert facts["table_1"].isnan().tolist() == facts["exponent"].isnan().tolist() == [True, False]


def test_a_block_without_second_derivatives_takes_forward_mode_and_says_so() -> None:
    images = batch(8)
    facts = JacobianSpectra(parts=("block", "head"), top=2)(classifier(CubeBlock(), blocks="0.0"), images, seed=0)
    right = (1 + 3 * images.x[0].flatten() ** 2).sort(descending=True).values.double()[:2]
    assert close(facts["block"][0, 0], right)
    assert facts["forward_mode"].tolist() == [1, 1]


def test_a_model_without_residual_blocks_is_one_clear_line_but_has_a_jacobian_as_a_whole() -> None:
    plain = classifier(nn.Tanh(), blocks=None)
    with pytest.raises(BastionError, match="which of its modules are residual blocks is not known"):
        JacobianSpectra()(plain, batch(8), seed=0)
    stranger = nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).eval()
    with pytest.raises(BastionError, match="which modules of Sequential are residual blocks is not known"):
        JacobianSpectra()(stranger, batch(8), seed=0)
    facts = JacobianSpectra(parts=("network",), top=3)(stranger, batch(8), seed=0)
    assert close(facts["network"][0], torch.linalg.svdvals(stranger[1].weight.detach().double()))


def test_a_branch_that_is_lost_in_rounding_warns_and_takes_few_products() -> None:
    block = nn.Conv2d(3, 3, 3, padding=1)
    block.weight.data *= 1e-7

    class Residual(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + block(x)

    facts = JacobianSpectra(parts=("branch",))(classifier(Residual(), blocks="0.0"), batch(8), seed=0)
    assert facts["warning.unconverged"].all() and (facts["products"] < 200).all()


def test_memory_that_does_not_suffice_is_told_before_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available", lambda device: 1000)
    monkeypatch.setattr(module, "Jacobian", None)
    with pytest.raises(BastionError, match=r"one example with 64 vectors of 1,\d+ numbers: needs .* 0\.0 GiB are free"):
        JacobianSpectra()(small_vit(), batch(16, dtype=torch.float64), seed=0)


def test_a_search_without_a_step_is_refused() -> None:
    """It would end with the value 0 and the residual 0."""
    with pytest.raises(BastionError, match="products: .*greater than or equal to 2"):
        JacobianSpectra(products=1)


def test_a_basis_that_is_too_small_is_refused() -> None:
    with pytest.raises(BastionError, match="basis: 6 vectors are too few for top=5, it needs 7"):
        JacobianSpectra(top=5, basis=6)

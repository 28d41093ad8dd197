from __future__ import annotations

import pytest
import torch
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

from bastion import memory
from bastion.errors import BastionError
from bastion.jacobians.parts import Chain
from bastion.models import Backbone, Classifier
from bastion.models.classifier import Blocks
from bastion.probes import jacobian_norms
from bastion.probes.jacobian_norms import JacobianNorms
from bastion.studies.complexity import peak_memory
from bastion.types import Batch


def dense_blocks(model: torch.nn.Module, batch: Batch) -> list[Tensor]:
    """(n, n) of each block at the first image."""
    calls = Chain(model, batch.x[:1], "test").calls
    made = [
        torch.autograd.functional.jacobian(lambda z, call=call: call.function(z).flatten(), call.x) for call in calls
    ]
    return [each.reshape(len(each), -1) for each in made]


@pytest.mark.parametrize("rows", [2, 7, 64])
def test_norms_are_those_of_the_dense_jacobian_however_many_rows_are_made_at_once(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jacobian_norms, "ROWS", rows)
    model = small_vit(depth=2).requires_grad_(False)
    batch = right_batch(model, n=2)
    facts = JacobianNorms()(model, batch, seed=0)
    for number, block in enumerate(dense_blocks(model, batch)):
        for name, order in (("norm_1", 1), ("norm_inf", torch.inf), ("frobenius", "fro"), ("sigma", 2)):
            right = torch.linalg.matrix_norm(block, order)  # type: ignore[call-overload]
            assert facts[name][0, number] == pytest.approx(float(right), rel=1e-5), (name, number)


def test_the_bound_takes_the_largest_block_of_each_norm_and_is_no_smaller_than_the_exact_value() -> None:
    model = small_vit(depth=2)
    facts = JacobianNorms()(model, right_batch(model, n=2), seed=0)
    by_hand = (facts["norm_1"].amax(1) * facts["norm_inf"].amax(1)).sqrt()
    assert torch.equal(facts["table_2"], by_hand)
    assert torch.allclose(facts["looseness"], by_hand / facts["sigma"].amax(1))
    assert (facts["looseness"] >= 1).all()
    assert (facts["sigma_residual"] <= 1e-4).all()
    assert not facts["warning.unconverged"].any()


def test_memory_that_does_not_suffice_is_told_before_the_first_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_available", lambda device: 1000)
    monkeypatch.setattr(jacobian_norms, "Jacobian", None)
    model = small_vit(depth=2)
    with pytest.raises(BastionError, match=r"64 rows .* of 2 images: needs .* GiB of memory, 0\.0 GiB are free"):
        JacobianNorms()(model, right_batch(model, n=2), seed=0)


@pytest.mark.parametrize("examples", [1, 8])
def test_the_memory_that_is_asked_for_is_what_is_used(examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(jacobian_norms, "check_memory", lambda needed, *_: asked.append(needed))
    monkeypatch.setattr(jacobian_norms, "ROWS", 8)
    model = small_vit(depth=1).requires_grad_(False)
    batch = right_batch(model, n=1)
    batch = Batch(torch.arange(examples), batch.x.repeat(examples, 1, 1, 1), batch.y.repeat(examples))
    used = peak_memory(lambda: JacobianNorms()(model, batch, seed=0), torch.device("cpu"))
    assert 0.7 * used < asked[0] < 1.5 * used


def test_a_block_that_is_too_large_is_refused_before_the_first_product() -> None:
    model = small_vit(depth=2)
    with pytest.raises(BastionError, match=r"block blocks\.0 puts out 272 numbers .* raise `most`"):
        JacobianNorms(most=200)(model, right_batch(model, n=1), seed=0)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x).relu()


class LeavesOut(nn.Module):
    """Three blocks, of which the second is not run."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Residual(), Residual(), Residual()])
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks[2](self.blocks[0](x)).flatten(1))
        return logits


def test_a_block_that_is_not_run_has_no_norm_and_spoils_none() -> None:
    torch.manual_seed(0)
    backbone = Backbone(LeavesOut(), 3, (3, 4, 4), blocks=(Blocks("blocks.*"),))
    model = Classifier(backbone, (0.0,) * 3, (1.0,) * 3).eval()
    facts = JacobianNorms()(model, Batch(torch.arange(2), torch.rand(2, 3, 4, 4), torch.zeros(2, dtype=int)), seed=0)
    assert facts["sigma"].isnan().tolist() == [[False, True, False]] * 2
    by_hand = (facts["norm_1"][:, [0, 2]].amax(1) * facts["norm_inf"][:, [0, 2]].amax(1)).sqrt()
    assert torch.equal(facts["table_2"], by_hand)
    assert torch.allclose(facts["looseness"], by_hand / facts["sigma"][:, [0, 2]].amax(1))
    assert not facts["warning.unconverged"].any()

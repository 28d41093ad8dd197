"""An objective's own networks: trained by its own optimizer, left alone by all that is the model's, and stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import QUICK
from tests.rival import Rival
from torch import Tensor, nn

from bastion import BastionError
from bastion.recipe import load_recipe
from bastion.run import Run
from bastion.training.distributed import Processes
from bastion.training.trainer import Trainer
from bastion.types import Losses, Prepared

RIVAL = (*QUICK, "objective={name: rival}")


def _trainer(folder: Path, *changes: str) -> Trainer:
    return Trainer(load_recipe("base/micro", (*RIVAL, *changes)), Run(folder), Processes())


def _own(trainer: Trainer) -> list[nn.Parameter]:
    assert trainer.objective.networks
    return list(trainer.objective.networks.parameters())


def _gradients(parameters: Any) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in parameters]


def _one_step(folder: Path, *changes: str) -> tuple[Trainer, dict[str, Tensor]]:
    trainer = _trainer(folder, *changes)
    _, _, norms = trainer.train_step(next(trainer.batches()))
    return trainer, norms


def test_they_climb_with_the_settings_of_their_own_optimizer(tmp_path: Path) -> None:
    """The first step of SGD with Nesterov momentum 0.9: 1.9 times the gradient, uphill, and weight decay downhill."""
    trainer = _trainer(tmp_path)
    before = [parameter.detach().clone() for parameter in _own(trainer)]
    trainer.train_step(next(trainer.batches()))
    for now, then in zip(_own(trainer), before, strict=True):
        assert now.grad is not None and now.grad.any()
        assert torch.allclose(now, then + 0.1 * 1.9 * (now.grad - 0.05 * then), atol=1e-7)
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)  # the schedule's first; theirs is 0.1


def test_the_model_goes_down_the_same_loss(tmp_path: Path) -> None:
    """Its gradient is the plain one, although that of the networks is climbed."""
    trainer = _trainer(tmp_path)
    batch = next(trainer.batches())
    trainer.step_loss.train()
    expected = torch.autograd.grad(
        trainer.objective.loss(trainer.model, Prepared(batch, batch.x, {})).total, list(trainer.model.parameters())
    )
    trainer.train_step(batch)
    clip = min(1.0, 1.0 / torch.cat([each.flatten() for each in expected]).norm().item())
    assert trainer.recipe.optimizer.clip_grad == 1.0
    for got, plain in zip(_gradients(trainer.model.parameters()), expected, strict=True):
        assert torch.allclose(got, clip * plain, atol=1e-6)


def test_clipping_is_each_ones_own(tmp_path: Path) -> None:
    free, norms = _one_step(tmp_path, "optimizer.clip_grad=null")
    clipped, _ = _one_step(tmp_path, "optimizer.clip_grad=1e-3", "objective.clip=1e-4")
    only_model, _ = _one_step(tmp_path, "optimizer.clip_grad=1e-3")
    size = [torch.cat([grad.flatten() for grad in _gradients(_own(each))]).norm() for each in (free, clipped)]
    assert size[0].item() == pytest.approx(norms["objective_grad_norm"].item()) and size[0] > 1e-3
    assert size[1].item() == pytest.approx(1e-4, rel=1e-3)
    for one, other in zip(_gradients(_own(free)), _gradients(_own(only_model)), strict=True):
        assert torch.equal(one, other)
    models = [torch.cat([g.flatten() for g in _gradients(each.model.parameters())]) for each in (free, clipped)]
    assert models[1].norm().item() == pytest.approx(1e-3, rel=1e-3)
    assert models[0].norm().item() == pytest.approx(norms["grad_norm"].item())


@pytest.mark.parametrize("name", ["sam", "awp"])
def test_sam_and_awp_do_not_move_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[tuple[list[Tensor], list[Tensor]]] = []
    loss = Rival.loss

    def look(self: Rival, model: nn.Module, prepared: Prepared) -> Losses:
        assert self.networks
        seen.append(tuple([p.detach().clone() for p in module.parameters()] for module in (model, self.networks)))  # type: ignore[arg-type]
        return loss(self, model, prepared)

    monkeypatch.setattr(Rival, "loss", look)
    trainer, _ = _one_step(tmp_path, f"optimizer.perturb={{name: {name}, size: 0.05}}", "objective.norm=true")
    (model, networks), (nearby, same) = seen
    assert any(not torch.equal(one, other) for one, other in zip(model, nearby, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(networks, same, strict=True))
    assert trainer.objective.networks is not None
    assert trainer.objective.networks[1].num_batches_tracked == 1  # the second pass is not remembered


EVERYTHING = ("ema=0.9", "augment.mixup=0.8", "optimizer.perturb={name: sam, size: 0.05}", "accumulate=2")


@pytest.mark.parametrize("changes", [("objective.norm=true", *EVERYTHING), ("precision=bf16",)])
def test_a_resumed_run_ends_with_the_same_bits(
    whole_and_resumed: Callable[[tuple[str, ...]], tuple[Run, Run]], changes: tuple[str, ...]
) -> None:
    whole, _ = whole_and_resumed((*RIVAL, *changes))
    step = [record for record in whole.history() if record["kind"] == "step"][-1]
    assert step["objective_grad_norm"] > 0 and "robust_accuracy" in step


def test_a_batch_in_parts_gives_them_the_same_gradient(tmp_path: Path) -> None:
    whole, _ = _one_step(tmp_path)
    parts, _ = _one_step(tmp_path, "accumulate=4")
    for one, other in zip(_gradients(_own(whole)), _gradients(_own(parts)), strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-7)


def test_they_begin_with_weights_that_the_seed_gives(tmp_path: Path) -> None:
    def weights(*changes: str) -> Tensor:
        torch.rand(3)  # the global generator has no say
        return torch.cat([parameter.detach().flatten() for parameter in _own(_trainer(tmp_path, *changes))])

    assert torch.equal(weights(), weights())
    assert not torch.equal(weights(), weights("seed=1"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("objective.forgets=true", "objective: the optimizer of 'rival' must train its own networks, all of them"),
        ("objective={name: rival, norm: true}", "objective: norm: does not go with precision bf16"),
    ],
)
def test_what_cannot_be_trained_is_refused(tmp_path: Path, change: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        _trainer(tmp_path, change, "precision=bf16")


def test_sharding_them_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe("base/micro", (*RIVAL, "parallel=fsdp"))
    with pytest.raises(BastionError, match="fsdp does not go with an objective with networks of its own; leave it out"):
        Trainer(recipe, Run(tmp_path), Processes(rank=0, size=2))

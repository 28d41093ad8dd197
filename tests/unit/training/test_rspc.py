"""RSPC: its loss against a naive one, who goes down and who climbs, and that it goes with all that training does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.conftest import QUICK
from tests.vits import right_batch, small_vit
from torch import Tensor, nn

from bastion import BastionError
from bastion.models import Classifier, checkpoint
from bastion.models.corruption_model import CorruptionModel, load_corruption_model
from bastion.patches import default_patch_size
from bastion.recipe import load_recipe
from bastion.run import Run
from bastion.training.build import set_up_objective
from bastion.training.checkpoints import read_state
from bastion.training.distributed import Processes
from bastion.training.objectives.rspc import RSPC, alignment
from bastion.training.trainer import Trainer, train
from bastion.types import Batch, DataSet, Prepared, TrainingContext

RECIPE = ("objective={name: rspc, label_smoothing: 0.1}", "optimizer.clip_grad=null")


@pytest.fixture(scope="module")
def model() -> Classifier:
    return small_vit()


@pytest.fixture(scope="module")
def batch(model: Classifier) -> Batch:
    """With soft labels, as MixUp makes them."""
    batch = right_batch(model)
    return batch._replace(y=0.7 * F.one_hot(batch.y, 3).double() + 0.1)


def _set_up(model: Classifier, data: DataSet, **changes: Any) -> RSPC:
    """With a corruption model in float64 that has large enough weights for its choice to differ between images."""
    scale = {} if changes.get("patches") == "random" else {"grad_scale": 1.0}
    objective = RSPC(label_smoothing=0.1, rho=0.2, **{**scale, **changes})
    shaped = data.__class__(**{**vars(data), "shape": model.shape})
    set_up_objective(objective, TrainingContext(model, shaped, load_recipe("base/micro")))
    if objective.networks is not None:
        objective.networks.double()
    return objective


def _prepared(objective: RSPC, model: nn.Module, batch: Batch, seed: int = 0) -> Prepared:
    return objective.prepare(model, batch, progress=0.0, seed=seed)


def _features(model: Classifier, image: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits and the outputs of all blocks of a plain ViT, by hooks of this test's own."""
    outputs: list[Tensor] = []
    network: Any = model.network
    handles = [each.register_forward_hook(lambda *io: outputs.append(io[2])) for each in network.blocks]
    logits = model(image)
    for handle in handles:
        handle.remove()
    return logits, outputs


def _naive_loss(
    model: Classifier, batch: Batch, mask: Tensor, fill: Tensor, weight: float, only_cross_entropy: bool = False
) -> Tensor:
    """Image by image, one pass for the clean and one for the occluded; the mask is (B, 16), 1 to keep a patch."""
    losses = []
    for x, y, keep, filled in zip(batch.x, batch.y, mask, fill, strict=True):
        pixels = keep.view(4, 4).repeat_interleave(4, 0).repeat_interleave(4, 1)
        (clean, before), (corrupted, after) = (
            _features(model, image[None]) for image in (x, pixels * x + (1 - pixels) * filled)
        )
        target = 0.9 * y + 0.1 / 3
        natural, other = (-(target * logits[0].log_softmax(0)).sum() for logits in (clean, corrupted))
        changes = [(one - two).square().mean() for one, two in zip(before, after, strict=True)]
        aligned = sum(changes) / len(changes)
        losses.append((natural + other) / 2 if only_cross_entropy else natural + weight * aligned)
    return torch.stack(losses).mean()


def _mask(objective: RSPC, x: Tensor) -> Tensor:
    """(B, 16), by sorting each image's scores."""
    network = objective.networks
    assert isinstance(network, CorruptionModel)
    keep = torch.ones(len(x), 16, dtype=x.dtype)
    for row, scores in zip(keep, network(x), strict=True):
        row[scores.topk(4).indices] = 0  # ⌈0.2 · 16⌉
    return keep


@pytest.mark.parametrize("fill", ["noise", "zero"])
@pytest.mark.parametrize("minimize", ["alignment", "cross-entropy"])
def test_the_loss_is_that_of_two_passes(
    model: Classifier, batch: Batch, tiny_data: DataSet, fill: str, minimize: str
) -> None:
    weight = {"weight": 0.3} if minimize == "alignment" else {}
    objective = _set_up(model, tiny_data, fill=fill, minimize=minimize, **weight)
    prepared = _prepared(objective, model, batch)
    assert (prepared.x == 0).all() == (fill == "zero")
    mask = _mask(objective, batch.x)
    assert len({tuple(row) for row in mask.tolist()}) > 1  # it looks at the image
    expected = _naive_loss(model, batch, mask, prepared.x, 0.3, minimize == "cross-entropy")
    assert torch.allclose(objective.loss(model, prepared).total, expected, rtol=0, atol=1e-12)


def test_random_patches_are_as_many_others_each_step_and_any_batch(
    model: Classifier, batch: Batch, tiny_data: DataSet
) -> None:
    objective = _set_up(model, tiny_data, weight=0.3, patches="random")
    prepared = _prepared(objective, model, batch)
    changed = (prepared.x != batch.x).all(1).unfold(1, 4, 4).unfold(2, 4, 4).flatten(1, 2).flatten(2)
    occluded = changed.all(2)
    assert torch.equal(occluded, changed.any(2)) and (occluded.sum(1) == 4).all()
    assert prepared.x.min() >= 0 and prepared.x.max() < 1
    some = Batch(batch.index[3:], batch.x[3:], batch.y[3:])
    assert torch.equal(_prepared(objective, model, some).x, prepared.x[3:])
    assert not torch.equal(_prepared(objective, model, batch, seed=1).x, prepared.x)
    expected = _naive_loss(model, batch, (~occluded).double(), prepared.x, 0.3)
    assert torch.allclose(objective.loss(model, prepared).total, expected, rtol=0, atol=1e-12)
    assert objective.networks is None and objective.optimizer is None


def test_the_noise_is_uniform_and_fresh_in_each_step(model: Classifier, batch: Batch, tiny_data: DataSet) -> None:
    objective = _set_up(model, tiny_data)
    noise, later = _prepared(objective, model, batch).x, _prepared(objective, model, batch, seed=1).x
    assert noise.min() >= 0 and noise.max() < 1
    assert abs(noise.mean() - 0.5) < 4 / (12 * noise.numel()) ** 0.5
    assert not torch.equal(noise, later)


def _gradients(parameters: Any) -> list[Tensor]:
    return [each.grad.clone() for each in parameters if each.grad is not None]


def _slopes(model: Classifier, batch: Batch, objective: RSPC, fill: Tensor, weight: float) -> Tensor:
    """Of the naive loss by the mask, (B, 16)."""
    mask = _mask(objective, batch.x).requires_grad_()
    (slopes,) = torch.autograd.grad(_naive_loss(model, batch, mask, fill, weight), mask)
    return slopes


def test_the_model_gets_the_plain_gradient_and_the_corruption_model_the_one_straight_through(
    model: Classifier, batch: Batch, tiny_data: DataSet
) -> None:
    objective = _set_up(model, tiny_data, weight=0.3)
    network = objective.networks
    assert network is not None
    prepared = _prepared(objective, model, batch)
    model.zero_grad()
    objective.loss(model, prepared).total.backward()  # type: ignore[no-untyped-call]
    found = _gradients(model.parameters())
    plain = torch.autograd.grad(
        _naive_loss(model, batch, _mask(objective, batch.x).detach(), prepared.x, 0.3), list(model.parameters())
    )
    for one, other in zip(found, plain, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    slopes = _slopes(model, batch, objective, prepared.x, 0.3)
    assert 0 < (slopes.abs() > 1).sum() < slopes.numel() / 2  # those are clipped
    straight = torch.autograd.grad((-slopes.clamp(-1, 1) * network(batch.x)).sum(), list(network.parameters()))
    for one, other in zip(_gradients(network.parameters()), straight, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-14)


def test_the_corruption_model_climbs_what_the_model_goes_down(
    model: Classifier, batch: Batch, tiny_data: DataSet
) -> None:
    """The first Nesterov step is 1.9 times the gradient, uphill; weight decay shrinks all the same."""
    objective = _set_up(model, tiny_data, weight=0.3)
    network, optimizer = objective.networks, objective.optimizer
    assert network is not None and optimizer is not None and objective.clip_grad == 5.0
    prepared = _prepared(objective, model, batch)
    slopes = _slopes(model, batch, objective, prepared.x, 0.3)
    scores, before = network(batch.x).detach(), [each.detach().clone() for each in network.parameters()]
    objective.loss(model, prepared).total.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    for now, then in zip(network.parameters(), before, strict=True):
        assert now.grad is not None
        assert torch.allclose(now, then + 1e-4 * 1.9 * (now.grad - 0.05 * then), rtol=0, atol=1e-15)
    moved = network(batch.x).detach() - scores
    # To keep less of a patch changes the loss by minus its slope: scores rise where that is a gain.
    assert (moved * -slopes).sum() > 0


def test_what_the_corruption_model_climbs_can_be_another_term(
    model: Classifier, batch: Batch, tiny_data: DataSet
) -> None:
    def gradients(**changes: Any) -> tuple[float, list[Tensor], list[Tensor]]:
        objective = _set_up(model, tiny_data, **changes)
        prepared = _prepared(objective, model, batch)
        model.zero_grad()
        total = objective.loss(model, prepared).total
        total.backward()  # type: ignore[no-untyped-call]
        assert objective.networks is not None
        return total.item(), _gradients(model.parameters()), _gradients(objective.networks.parameters())

    usual, same = gradients(weight=0.3), gradients(weight=0.3, maximize="alignment")
    crossed = gradients(weight=0.3, maximize="cross-entropy")
    only = gradients(minimize="cross-entropy")
    other_way = gradients(weight=0.3, minimize="cross-entropy", maximize="alignment")
    assert usual[0] == same[0] == pytest.approx(crossed[0], abs=1e-12) and only[0] == pytest.approx(other_way[0])
    for left, right in ((usual, crossed), (only, other_way)):
        assert all(torch.allclose(one, two, atol=1e-12) for one, two in zip(left[1], right[1], strict=True))
    # ½ CE(x̂) in the mean of both halves, CE(x̂) where it is climbed alone.
    assert all(torch.allclose(one, two / 2, atol=1e-14) for one, two in zip(only[2], crossed[2], strict=True))
    assert all(torch.allclose(one, two, atol=1e-14) for one, two in zip(usual[2], other_way[2], strict=True))
    assert not torch.allclose(usual[2][0], crossed[2][0])


def test_alignment_is_the_mean_over_blocks_of_the_mean_over_elements() -> None:
    one = torch.tensor([[1.0, 2.0], [4.0, 6.0]])  # (1, 2) and its change of 3 and 4: 25 / 2
    two = torch.tensor([[[5.0]], [[2.0]]])  # 9
    assert alignment([one, two]).item() == (12.5 + 9) / 2
    assert alignment([one.bfloat16()]).dtype == torch.float32


def test_alignment_is_zero_where_nothing_is_occluded(model: Classifier, batch: Batch, tiny_data: DataSet) -> None:
    objective = _set_up(model.eval(), tiny_data)
    losses = objective.loss(model, Prepared(batch, batch.x, {}))
    assert losses.terms["alignment"].item() == 0
    assert losses.total.item() == losses.terms["natural"].item() == losses.terms["corrupted"].item()


@pytest.mark.parametrize(
    ("outputs", "shape", "size"),
    [
        ([(197, 384)], (3, 224, 224), 16),  # DeiT
        ([(196, 192), (49, 384)], (3, 224, 224), 16),  # RVT-Ti
        ([(784, 384)], (3, 224, 224), 8),  # XCiT with patches of 8
        ([(56, 56, 96), (28, 28, 192), (14, 14, 384), (7, 7, 768)], (3, 224, 224), 16),  # Swin, channels last
        ([(56, 56, 96), (28, 28, 192)], (3, 224, 224), 8),
        ([(96, 14, 14)], (3, 224, 224), 16),  # CoAtNet, channels first
        ([(65, 96)], (3, 32, 32), 4),
        ([(66, 96)], (3, 32, 32), 4),  # with a register
        ([(96, 96)], (3, 32, 48), 4),  # 8 × 12
        ([(49, 96)], (1, 28, 28), 4),
    ],
)
def test_patches_are_the_tokens_by_default(
    outputs: list[tuple[int, ...]], shape: tuple[int, int, int], size: int
) -> None:
    assert default_patch_size(outputs, shape) == size


def test_images_that_the_model_resizes_are_occluded_at_its_size(tmp_path: Path) -> None:
    """As in the paper, which trains on CIFAR at 224 pixels: patches are tokens, and their noise is not interpolated."""
    model = "model={name: vit/micro, stem: [4, 8, 16, 16], img_size: 64, patch_size: 16, depth: 1}"
    trainer = _trainer(tmp_path / "run", model, "resize=bicubic", "objective.patches=random")
    prepared = trainer.objective.prepare(trainer.model, next(trainer.batches()), progress=1.0, seed=0)
    changed = (prepared.x != prepared.clean.x).any(1)
    assert changed.shape[1:] == (64, 64)
    assert (changed.unfold(1, 16, 16).unfold(2, 16, 16).float().mean((3, 4)) > 0.99).sum((1, 2)).eq(2).all()  # of 16
    run = train("base/micro", changes=(*QUICK, *RECIPE, model, "resize=bicubic"), folder=tmp_path / "learned")
    assert load_corruption_model(run.folder).choose(torch.rand(1, 3, 64, 64), 0.1).shape == (1, 2)


@pytest.mark.parametrize("patches", ["learned", "random"])
def test_copies_of_an_image_are_occluded_each_in_its_own_way(tmp_path: Path, patches: str) -> None:
    still = "augment={crop: none, hflip: 0, repeats: 2}"
    trainer = _trainer(tmp_path, still, f"objective.patches={patches}")
    batch = next(trainer.batches())
    assert len(batch.x.unique(dim=0)) == len(batch.x) / 2
    x = trainer.prepare(batch).x
    assert len(x.unique(dim=0)) == len(x)
    parts = [trainer.prepare(part).x for part in batch.chunk(4)]
    assert torch.equal(torch.cat(parts), x)


@pytest.mark.parametrize(
    ("spec", "aligned"),
    [
        ("tiny/fan", [f"blocks.{n}" for n in range(6)]),  # not its two class-attention blocks
        ("tiny/cait", [f"blocks.{n}" for n in range(4)]),
        ({"name": "fan/hybrid-t", "img_size": 32, "num_classes": 3}, [f"blocks.{n}" for n in range(8)]),  # nor the stem
        ("tiny/rvt", [*(f"transformers.0.blocks.{n}" for n in range(5)), "transformers.1.blocks.0"]),
        ("tiny/coatnet", ["stages.2.0", "stages.2.1", "stages.3.0", "stages.3.1"]),  # not the convolutions
    ],
)
def test_attention_blocks_count_and_no_others(spec: Any, aligned: list[str], tiny_data: DataSet) -> None:
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3)
    objective = _set_up(model, tiny_data, patches="random")
    assert objective._aligned == aligned


def _trainer(folder: Path, *changes: str) -> Trainer:
    return Trainer(load_recipe("base/micro", (*QUICK, *RECIPE, *changes)), Run(folder), Processes())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["model={name: resnet/micro, widths: [8, 16], depths: [1, 1]}"], "this model has none; take another model"),
        (["objective.patch_size=5"], "patch_size: patches of 5 pixels do not tile images of 32×32; of 1, 2, 4, 8, 16"),
        (["objective={name: rspc, patches: random, maximize: alignment}"], "maximize: random patches maximize nothing"),
        (["objective={name: rspc, patches: random, corruption_lr: 3}"], "corruption_lr: random patches need no corrup"),
        (["objective={name: rspc, patches: random, grad_scale: 2}"], "grad_scale: random patches need no corruption"),
        (["objective={name: rspc, minimize: cross-entropy, weight: 7}"], "weight: weighs the alignment, which nothing"),
        (["objective.rho=0"], "objective.rho"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_line(tmp_path: Path, changes: list[str], message: str) -> None:
    with pytest.raises(BastionError, match=message) as error:
        _trainer(tmp_path, *changes)
    assert "\n" not in str(error.value)


def test_sharding_is_refused(tmp_path: Path) -> None:
    recipe = load_recipe("base/micro", (*QUICK, *RECIPE, "parallel=fsdp"))
    with pytest.raises(BastionError, match="fsdp does not go with an objective with networks of its own; leave it out"):
        Trainer(recipe, Run(tmp_path), Processes(rank=0, size=2))


def test_cross_entropy_on_occluded_images_needs_no_attention(tmp_path: Path) -> None:
    trainer = _trainer(
        tmp_path,
        "model={name: resnet/micro, widths: [8, 16], depths: [1, 1]}",
        "objective={name: rspc, minimize: cross-entropy, patch_size: 8}",
    )
    _, losses, norms = trainer.train_step(next(trainer.batches()))
    assert losses.terms.keys() == {"natural", "corrupted"} and norms["objective_grad_norm"] > 0


def test_cross_entropy_on_occluded_images_does_not_look_at_attention(
    model: Classifier, tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise BastionError("the outputs of block 0 are not of tokens")

    monkeypatch.setattr("bastion.training.objectives.rspc.attention_outputs", fail)
    assert _set_up(model, tiny_data, minimize="cross-entropy", patch_size=4).networks is not None
    with pytest.raises(BastionError, match="not of tokens"):
        _set_up(model, tiny_data, minimize="cross-entropy", maximize="alignment", patch_size=4)


EVERYTHING = (
    "model.drop_path_rate=0.2",
    "augment={mixup: 0.8, cutmix: 1.0, repeats: 2}",
    "ema=0.9",
    "accumulate=2",
    "optimizer.perturb={name: sam, size: 0.05}",
    "precision=bf16",
)


@pytest.mark.parametrize("changes", [("objective.maximize=cross-entropy",), EVERYTHING], ids=["plain", "everything"])
def test_a_resumed_run_ends_with_the_same_bits(
    whole_and_resumed: Callable[[tuple[str, ...]], tuple[Run, Run]], changes: tuple[str, ...]
) -> None:
    whole, parts = whole_and_resumed((*QUICK, *RECIPE, *changes))
    names = {path.name for path in whole.model.glob("*.safetensors")}
    assert len(names) == 2 and names == {path.name for path in parts.model.glob("*.safetensors")}  # by their digests
    stored, last_state = load_corruption_model(parts.folder).state_dict(), read_state(max(whole.checkpoints.iterdir()))
    assert all(torch.equal(stored[name], tensor) for name, tensor in last_state["objective"].items())
    steps = [record for record in whole.history() if record["kind"] == "step"]
    assert all(record["objective_grad_norm"] > 0 and record["alignment"] > 0 for record in steps)


def test_the_corruption_model_is_clipped_by_itself(tmp_path: Path) -> None:
    def gradient(*changes: str) -> Tensor:
        trainer = _trainer(tmp_path, *changes)
        trainer.train_step(next(trainer.batches()))
        assert trainer.objective.networks is not None
        return torch.cat([each.flatten() for each in _gradients(trainer.objective.networks.parameters())])

    free = gradient()
    assert free.any() and torch.equal(free, gradient("optimizer.clip_grad=1e-3"))
    every_slope_clipped = gradient("objective.grad_scale=1e9")
    assert every_slope_clipped.norm().item() == pytest.approx(5.0, rel=1e-4)  # and then the whole


def test_a_batch_in_parts_gives_the_same_gradients(tmp_path: Path) -> None:
    whole, parts = (_trainer(tmp_path, change) for change in ("accumulate=1", "accumulate=4"))
    for trainer in (whole, parts):
        trainer.train_step(next(trainer.batches()))
    for one, other in zip(
        _gradients(whole.step_loss.parameters()), _gradients(parts.step_loss.parameters()), strict=True
    ):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-7)

"""Weights of one model for another: every tensor accounted for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bastion import BastionError
from bastion.models import Classifier, checkpoint
from bastion.models.adapt import resized, transfer


def _vit(seed: int = 0, **changes: Any) -> Classifier:
    spec = {"name": "vit/micro", "embed_dim": 16, "depth": 2, "num_heads": 2, "img_size": 16, **changes}
    return checkpoint.build(spec, mean=(0.0,) * 3, std=(1.0,) * 3, seed=seed)


def _weights(model: Classifier) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.network.state_dict().items()}


def test_the_same_model_gets_everything() -> None:
    source, model = _vit(0), _vit(1)
    done = transfer(source, model)
    assert checkpoint.digest(model) == checkpoint.digest(source)
    assert set(done.loaded) == set(_weights(model)) and not (done.new or done.resized or done.unused)


def test_a_new_stem_stays_random_and_the_rest_is_loaded() -> None:
    source, model = _vit(0), _vit(1, stem=(8, 16))
    before = _weights(model)
    done = transfer(source, model, ["patch_embed"])
    after, given = _weights(model), _weights(source)
    assert done.new and all(name.startswith("patch_embed.") for name in done.new)
    assert done.unused == ["patch_embed.proj.weight", "patch_embed.proj.bias"]
    assert set(done.loaded) | set(done.new) == set(after)
    assert all(torch.equal(after[name], before[name]) for name in done.new)
    assert all(torch.equal(after[name], given[name]) for name in done.loaded)
    assert f"{len(done.new)} new (patch_embed.layers.0.weight, " in str(done)


def test_another_number_of_classes_means_a_new_head() -> None:
    source, model = _vit(0), _vit(1, num_classes=7)
    done = transfer(source, model)
    assert done.new == ["head.weight", "head.bias"]


def test_position_embeddings_are_resized_bicubically() -> None:
    source, model = _vit(0), _vit(1, img_size=32)
    done = transfer(source, model)
    assert done.resized == ["pos_embed"]
    grid = source.network.pos_embed.reshape(1, 4, 4, 16).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.interpolate(grid, scale_factor=8.1 / 4, mode="bicubic")
    assert torch.allclose(model.network.pos_embed, wanted.permute(0, 2, 3, 1).reshape(1, 64, 16), atol=1e-6)


def test_what_does_not_fit_is_named() -> None:
    model = _vit(1, depth=1)
    before = checkpoint.digest(model)
    with pytest.raises(BastionError, match=r"blocks.1.norm1.weight \(only the source has it\).* more; name the parts"):
        transfer(_vit(0), model)
    assert checkpoint.digest(model) == before  # refused is untouched
    with pytest.raises(BastionError, match=r"blocks.2.norm1.weight \(the source has none\)"):
        transfer(_vit(0), _vit(1, depth=3))
    with pytest.raises(BastionError, match=r"pos_embed \(\(1, 16, 16\) in the source, \(1, 16, 32\) here\)"):
        transfer(_vit(0), _vit(1, embed_dim=32))
    with pytest.raises(BastionError, match="init.new: the network has no part 'stem'; its parts are patch_embed, "):
        transfer(_vit(0), _vit(1), ["stem"])


def test_a_model_at_another_size_has_the_same_weights() -> None:
    model = _vit(0)
    larger = resized(model, 32)
    assert larger.shape == (3, 32, 32) and larger.spec is not None and larger.spec["img_size"] == 32
    assert torch.equal(larger.network.head.weight, model.network.head.weight)
    assert larger(torch.rand(2, 3, 32, 32)).isfinite().all()
    back = resized(larger, 16)  # a smooth embedding comes back nearly as it was
    assert back.network.pos_embed.shape == model.network.pos_embed.shape


def test_a_mixer_says_why_it_stays_at_its_size() -> None:
    model = checkpoint.build("tiny/mixer", mean=(0.0,) * 3, std=(1.0,) * 3)
    with pytest.raises(BastionError, match=r"resized: Mixer does not go to 64: more than its position.*mlp_tokens"):
        resized(model, 64)

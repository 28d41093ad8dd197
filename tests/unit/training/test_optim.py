"""Weight decay spares what it should, and settings reach the optimizer."""

from __future__ import annotations

import pytest

from bastion import recipe
from bastion.models import checkpoint
from bastion.training.optim import make_optimizer


def _optimizer(settings: recipe.Optimizer = recipe.Optimizer()):  # noqa: B008
    model = checkpoint.build({"name": "vit/micro", "depth": 1}, mean=(0.0,) * 3, std=(1.0,) * 3)
    return model, make_optimizer(model, settings)


def test_norms_biases_and_position_embeddings_are_not_decayed() -> None:
    model, optimizer = _optimizer()
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    named = dict(model.named_parameters())
    assert decay.keys() == {id(p) for p in named.values()}
    for name, parameter in named.items():
        spared = parameter.ndim == 1 or name == "network.pos_embed"
        assert decay[id(parameter)] == (0.0 if spared else 0.05), name


def test_settings_reach_the_optimizer() -> None:
    _, adamw = _optimizer(recipe.Optimizer(lr=3e-4, betas=(0.9, 0.95)))
    assert type(adamw).__name__ == "AdamW"
    assert all(group["lr"] == 3e-4 and group["betas"] == (0.9, 0.95) for group in adamw.param_groups)
    _, sgd = _optimizer(recipe.Optimizer(name="sgd", lr=0.1, momentum=0.8))
    assert all(group["momentum"] == 0.8 and group["nesterov"] for group in sgd.param_groups)


@pytest.mark.parametrize(("rule", "expected"), [("none", 0.1), ("linear", 0.4), ("sqrt", 0.2)])
def test_the_rate_grows_with_the_batch(rule: str, expected: float) -> None:
    assert recipe.Optimizer(lr=0.1, lr_rule=rule, lr_batch=512).peak(2048) == pytest.approx(expected)

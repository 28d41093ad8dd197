"""Every model of the registry keeps its contract; being registered is being tested."""

from __future__ import annotations

import json
import runpy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from bastion.errors import BastionError
from bastion.models import checkpoint, complexity, models
from bastion.models.classifier import Backbone, Classifier
from bastion.models.meta import meta
from bastion.models.model_stats import count, stored
from bastion.models.weight_kinds import weights

NAMES = [name for name in models.names() if not name.endswith("/*")]
KNOWN = stored()
TABLES = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "models_table.py"))


def _costly(name: str) -> bool:
    """Those are run with the slow tests; what they are made of, the small ones of their family are made of too."""
    return name in KNOWN and (KNOWN[name].parameters > 6e6 or KNOWN[name].macs > 0.5e9)


def _build(name: str, seed: int = 0) -> Classifier:
    return checkpoint.build(name, mean=(0.5,) * 3, std=(0.25,) * 3, seed=seed).eval()


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) if _costly(name) else name for name in NAMES]
)
def model(request: pytest.FixtureRequest) -> Classifier:
    return _build(request.param)


def test_logits_are_finite_and_the_gradient_reaches_the_input(model: Classifier) -> None:
    x = torch.rand(2, *model.shape, requires_grad=True)
    logits = model(x)
    assert logits.shape == (2, model.num_classes)
    assert logits.isfinite().all()
    (gradient,) = torch.autograd.grad(logits.square().sum(), x)
    assert (gradient.flatten(1).abs().sum(1) > 0).all()


def test_blocks_and_taps_agree(model: Classifier) -> None:
    blocks = [block.name for block in model.blocks()]
    with torch.no_grad(), model.tap("blocks") as taps:
        model(torch.rand(1, *model.shape))
    assert list(taps.blocks) == blocks
    assert all(output.isfinite().all() for output in taps.blocks.values())


def test_outputs_of_attention_blocks_have_the_batch_in_front(model: Classifier) -> None:
    """So that the halves of a batch can be compared block by block, windows or not."""
    x = torch.rand(2, *model.shape)
    with torch.no_grad(), model.tap("blocks") as both:
        model(x)
    with torch.no_grad(), model.tap("blocks") as second:
        model(x[1:])
    for name in (block.name for block in model.blocks() if block.attends):
        assert both.blocks[name].ndim in (3, 4)
        assert torch.allclose(both.blocks[name][1:], second.blocks[name], atol=1e-4), name


def test_attention_maps_are_distributions_or_an_error_says_there_are_none(model: Classifier) -> None:
    assert model.spec is not None
    name = model.spec["name"]
    if not KNOWN[name].attention:
        with pytest.raises(BastionError, match="this model has no attention maps"), model.tap("attention"):
            model(torch.rand(1, *model.shape))
        return
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(2, *model.shape))
    assert list(taps.attention) == [block.name for block in model.blocks() if block.attention]
    for attention in taps.attention.values():
        assert attention.ndim == 4 and attention.shape[0] % 2 == 0
        assert torch.allclose(attention.sum(-1), torch.ones(()), atol=1e-4)


def test_attending_blocks_have_weights_of_every_kind_that_attention_has(model: Classifier) -> None:
    assert model.spec is not None
    found = weights(model)
    expected = {"qkv"} if "botnet" in model.spec["name"] else {"qkv", "projection", "feed-forward"}
    for number, block in enumerate(model.blocks()):
        if block.attends:
            assert expected <= {weight.kind for weight in found if weight.block == number}
    assert {"qkv", "projection"}.isdisjoint(weight.kind for weight in found) or KNOWN[model.spec["name"]].attention


def test_saved_and_loaded_is_the_same(model: Classifier, tmp_path: Path) -> None:
    assert model.spec is not None
    checkpoint.save(model, tmp_path)
    x = torch.rand(1, *model.shape)
    with torch.no_grad():
        assert torch.equal(checkpoint.load(tmp_path)(x), model(x))


def test_the_seed_alone_makes_the_weights(model: Classifier) -> None:
    assert model.spec is not None
    torch.manual_seed(torch.seed() % 1000)
    assert checkpoint.digest(_build(model.spec["name"])) == checkpoint.digest(model)


def test_an_example_does_not_see_the_others(model: Classifier) -> None:
    assert model.spec is not None
    precise = _build(model.spec["name"]).double()
    x = torch.rand(3, *model.shape, dtype=torch.float64)
    with torch.no_grad():
        assert torch.allclose(precise(x)[1:2], precise(x[1:2]), atol=1e-9)


CATEGORIES = {  # Sec. 3.1 of Tang et al. 2022
    "CNN": {"resnet", "resnext", "wrn", "preact-resnet", "vgg", "densenet"},
    "Transformer": {"vit", "mixer", "poolformer", "swin"},
    "hybrid": {"vitae", "cct", "mobilevit", "cpvt", "botnet", "ceit", "coatnet", "cvt", "levit", "pvtv2"},
}


def _backbone(spec: Any) -> Backbone:
    return _built(json.dumps(spec))


@cache
def _built(spec: str) -> Backbone:
    """Without numbers."""
    with meta():
        return models.build(json.loads(spec))


def test_parameters_are_as_listed_and_the_category_is_declared() -> None:
    backbones = {name: _backbone(name) for name in NAMES}
    parameters = {name: complexity.parameters(backbone.network) for name, backbone in backbones.items()}
    listed = {name: KNOWN[name].parameters for name in NAMES}
    assert parameters == listed, "count again: python scripts/models_table.py"
    for name, backbone in backbones.items():
        assert backbone.category in CATEGORIES, name
        for category, members in CATEGORIES.items():
            assert category == backbone.category or name.removeprefix("cifar/") not in members, name


@pytest.mark.parametrize("paper", TABLES["PUBLISHED"])
def test_published_counts_are_met_or_the_row_says_why_not(paper: str) -> None:
    for row in TABLES["PUBLISHED"][paper]:
        if not row.why:
            parameters = complexity.parameters(_backbone(row.spec).network)
            assert parameters / 1e6 == pytest.approx(row.parameters, rel=0.01), row.label


@pytest.mark.slow  # a pass through every model
def test_the_page_is_up_to_date_and_its_rows_agree() -> None:
    assert {name: count(name) for name in NAMES} == KNOWN, "count again: python scripts/models_table.py"
    page = TABLES["PAGE"].read_text()
    assert page == TABLES["rendered"](page, KNOWN), "write it again: python scripts/models_table.py"
    assert all(row.agrees(count(row.spec)) for rows in TABLES["PUBLISHED"].values() for row in rows)


def test_tiny_models_are_tiny() -> None:
    for name in NAMES:
        if name.startswith("tiny/"):
            assert KNOWN[name].parameters <= 1.5e6, name
            assert KNOWN[name].shape == (3, 32, 32), name

from __future__ import annotations

import pytest
import torch
from tests.vits import small_vit
from torch import Tensor, nn

from bastion import memory
from bastion.errors import BastionError
from bastion.models import Classifier, checkpoint
from bastion.studies import attention_lipschitz
from bastion.studies.attention_lipschitz import AttentionLipschitz
from bastion.studies.complexity import peak_memory
from bastion.types import DataSet

SIZES = {"num_classes": 3, "img_size": 8}


def build(name: str, **options: int) -> Classifier:
    torch.manual_seed(0)
    model = checkpoint.build({"name": name} | SIZES | options, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    for name, parameter in model.named_parameters():
        if "qkv" in name or "qk" in name:
            nn.init.normal_(parameter, std=0.3)  # so that attention is not the mean of the tokens
    return model


@pytest.mark.parametrize("name", ["tiny/vit-cauchy", "vit/micro"])
def test_what_is_measured_is_the_jacobians_norm_and_below_the_bound(name: str, tiny_data: DataSet) -> None:
    model = build(name)
    study = AttentionLipschitz(images=2)
    assert study.parts(model, tiny_data) == len(model.blocks())
    facts = study(model, tiny_data, 1, seed=0)
    attention = next(each for each in model.blocks()[1].module.children() if "Attention" in type(each).__name__)
    seen = []
    hook = attention.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    with torch.no_grad():
        model(tiny_data.test.batch(range(2)).x)
    hook.remove()
    dense = torch.autograd.functional.jacobian(lambda z: attention(z[None])[0], seen[0][0])
    norm = torch.linalg.matrix_norm(dense.reshape(seen[0][0].numel(), -1), 2)
    assert facts["measured"][0] == pytest.approx(float(norm), rel=1e-3)
    assert facts["scaled"][2] == facts["measured"].max()  # at scale 1
    assert facts["residual"] <= 1e-4 and not facts["warning.unconverged"]
    assert (facts["scaled"] <= facts["scaled_bound"]).all()
    assert facts["reached"] <= facts["domain"]
    assert facts["scaled_bound"][2] <= facts["bound"]


def test_layer_norm_bounds_the_domain(tiny_data: DataSet) -> None:
    """Without weight and bias all tokens have the length √D, up to the eps of the variance."""
    facts = AttentionLipschitz(images=1)(build("tiny/vit-cauchy"), tiny_data, 0, seed=0)
    assert facts["domain"] == pytest.approx(96**0.5)
    assert facts["reached"] == pytest.approx(96**0.5, rel=1e-3)


@pytest.mark.parametrize(("name", "size"), [("tiny/xcit", 8), ("tiny/covit", 8), ("tiny/mobilevit", 32)])
def test_a_model_without_such_attention_has_no_numbers(name: str, size: int, tiny_data: DataSet) -> None:
    """So that it can stand in one table with those that have."""
    facts = AttentionLipschitz(images=2)(build(name, img_size=size), tiny_data, 0, seed=0)
    other = AttentionLipschitz(images=2)(build("tiny/vit-cauchy"), tiny_data, 0, seed=0)
    assert {name: fact.shape for name, fact in facts.items()} == {name: fact.shape for name, fact in other.items()}
    assert not facts.pop("warning.unconverged")
    assert all(fact.isnan().all() for fact in facts.values())


def test_a_layer_norm_behind_attention_bounds_nothing(tiny_data: DataSet) -> None:
    """timm's ResPostBlock is x + norm(attention(x)), and has a norm1 too."""
    model = build("timm/vit_base_patch16_rpn_224", patch_size=4, embed_dim=32, depth=1, num_heads=2)
    facts = AttentionLipschitz(images=2, scales=(1.0,))(model, tiny_data, 0, seed=0)
    assert facts["domain"].isnan() and facts["bound"].isnan()
    assert facts["measured"].max() <= facts["reached_bound"]


def test_each_image_is_searched_by_itself(tiny_data: DataSet) -> None:
    model = build("tiny/vit-cauchy")
    one, three = (AttentionLipschitz(images=n, scales=(2.0,))(model, tiny_data, 0, seed=0) for n in (1, 3))
    assert torch.equal(three["measured"][:1], one["measured"])


def test_memory_does_not_grow_with_the_number_of_images(tiny_data: DataSet) -> None:
    model, device = small_vit(depth=1, size=8).float(), torch.device("cpu")
    one, eight = (
        peak_memory(lambda n=n: AttentionLipschitz(images=n, scales=(1.0,))(model, tiny_data, 0, seed=0), device)  # type: ignore[misc]
        for n in (1, 8)
    )
    assert eight < 1.5 * one


def test_a_search_that_was_cut_short_warns(tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch) -> None:
    full = attention_lipschitz.largest
    monkeypatch.setattr(attention_lipschitz, "largest", lambda *given, **options: full(*given, **options, limit=6))
    facts = AttentionLipschitz(images=2)(build("vit/micro"), tiny_data, 0, seed=0)
    assert facts["warning.unconverged"] and facts["residual"] > 1e-4


def test_memory_that_does_not_suffice_is_told_before_the_search(
    tiny_data: DataSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untouched(*given: object, **options: object) -> Tensor:
        raise AssertionError("searched")

    monkeypatch.setattr(memory, "_available", lambda device: 1000)
    monkeypatch.setattr(attention_lipschitz, "largest", untouched)
    with pytest.raises(BastionError, match=r"attention-lipschitz: 128 vectors of [\d,]+ numbers: needs .* GiB"):
        AttentionLipschitz(images=2)(build("tiny/vit-cauchy"), tiny_data, 0, seed=0)

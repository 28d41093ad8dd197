"""ViT and CPVT for CIFAR-10: sizes, the scale of the logits, where positions come from."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bastion.models import complexity, models
from bastion.models.cifar_vit import PEG
from bastion.models.classifier import Backbone, Classifier
from bastion.models.meta import meta

cifar_cpvt = models.factory("cifar/cpvt")
cifar_vit = models.factory("cifar/vit")
tiny_cpvt = models.factory("tiny/cpvt")


def _classifier(backbone: Backbone) -> Classifier:
    return Classifier(backbone, (0.5,) * 3, (0.25,) * 3).eval()


def _shuffled(x: Tensor, patch: int) -> Tensor:
    """Patches of the image in reversed order."""
    side = x.shape[-1] // patch
    patches = x.unfold(2, patch, patch).unfold(3, patch, patch).flatten(2, 3).flip(2)  # (B, C, N, p, p)
    return patches.unflatten(2, (side, side)).permute(0, 1, 2, 4, 3, 5).reshape(x.shape)


@pytest.mark.parametrize(("patch_size", "expected"), [(8, 9_835_530), (4, 9_786_378), (2, 9_866_250)])
def test_the_vit_has_the_parameters_of_the_paper(patch_size: int, expected: int) -> None:
    with meta():
        assert complexity.parameters(cifar_vit(patch_size=patch_size).network) == expected


def test_cpvt_has_the_parameters_of_the_paper() -> None:
    with meta():
        assert complexity.parameters(cifar_cpvt().network) == 9_495_562
        assert complexity.parameters(cifar_cpvt(global_pool="avg").network) == 9_495_050
        assert complexity.parameters(tiny_cpvt().network) <= 1_500_000


@pytest.mark.parametrize("factory", [cifar_vit, cifar_cpvt])
def test_patches_of_16_serve_images_of_224(factory: type[Backbone]) -> None:
    with meta():
        network = factory(img_size=224, patch_size=16).network.eval()
        assert network.patch_embed.grid_size == (14, 14)
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 10)


def test_logits_of_the_attention_are_scaled_by_the_whole_width() -> None:
    model = _classifier(cifar_vit(patch_size=8))
    x, seen = torch.rand(2, 3, 32, 32), []
    model.network.blocks[0].attn.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0]))
    with torch.no_grad(), model.tap("attention") as taps:
        model(x)
        q, k, _ = model.network.blocks[0].attn.qkv(seen[0]).view(2, 17, 3, 8, 64).permute(2, 0, 3, 1, 4)
    expected = (q @ k.transpose(2, 3) / 512**0.5).softmax(-1)
    torch.testing.assert_close(taps.attention["blocks.0"], expected)


def test_the_source_starts_with_unit_normal_tokens_and_drops_a_tenth_in_training() -> None:
    torch.manual_seed(0)
    network = cifar_vit(patch_size=2).network
    assert 0.9 < network.pos_embed.std() < 1.1
    assert 0.9 < network.cls_token.std() < 1.1
    rates = {name: module.p for name, module in network.named_modules() if isinstance(module, nn.Dropout)}
    assert {name for name, rate in rates.items() if rate == 0.1} == {
        *("pos_drop", "head.2"),
        *(f"blocks.{i}.{part}" for i in range(6) for part in ("attn.proj_drop", "mlp.drop1", "mlp.drop2")),
    }


def test_a_peg_adds_a_convolution_of_the_grid_and_leaves_the_class_token() -> None:
    peg, x = PEG(5, (3, 4), prefix=1), torch.randn(2, 13, 5)
    expected = x.clone()
    for row in range(3):
        for column in range(4):
            total = peg.proj.bias.expand(2, 5)
            for i in range(3):
                for j in range(3):
                    if 0 <= row + i - 1 < 3 and 0 <= column + j - 1 < 4:
                        total = total + peg.proj.weight[:, 0, i, j] * x[:, 1 + (row + i - 1) * 4 + column + j - 1]
            expected[:, 1 + row * 4 + column] += total
    torch.testing.assert_close(peg(x), expected)


@pytest.mark.parametrize("global_pool", ["token", "avg"])
def test_without_its_peg_cpvt_does_not_see_the_order_of_patches(global_pool: str) -> None:
    model = _classifier(tiny_cpvt(global_pool=global_pool)).double()
    x = torch.rand(1, 3, 32, 32, dtype=torch.float64)
    with torch.no_grad():
        assert not torch.allclose(model(x), model(_shuffled(x, 4)), atol=1e-6)
        model.network.pos_block.proj.weight.zero_()
        torch.testing.assert_close(model(x), model(_shuffled(x, 4)))


@pytest.mark.parametrize("factory", [cifar_vit, cifar_cpvt, tiny_cpvt])
def test_images_that_patches_do_not_fill_are_refused(factory: type[Backbone]) -> None:
    with pytest.raises(ValueError, match="img_size: 32 cannot be cut into patches of 5"):
        factory(patch_size=5)

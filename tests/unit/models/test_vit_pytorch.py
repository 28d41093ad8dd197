"""CCT, CvT and MobileViT give the logits of vit-pytorch when they have its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from bastion.models.cct import Tokenizing
from bastion.models.mobilevit import Stride

pytest.importorskip("vit_pytorch")
# After bastion, which makes torchvision importable beside a CPU build of torch.
from vit_pytorch.cct import cct_7
from vit_pytorch.cvt import CvT
from vit_pytorch.mobile_vit import MobileViT

from bastion.models import models

cifar_cct = models.factory("cifar/cct")
cifar_cvt = models.factory("cifar/cvt")
cifar_mobilevit = models.factory("cifar/mobilevit")

CCT = {
    r"^patch_embed\.layers\.(\d)": lambda m: f"tokenizer.conv_layers.{int(m[1]) // 3}.{int(m[1]) % 3}",
    r"^pos_embed": "classifier.positional_emb",
    r"^head": "classifier.fc",
    r"^(blocks|norm|attention_pool)": r"classifier.\1",
    r"norm1": "pre_norm",
    r"norm2": "norm1",
    r"\battn\b": "self_attn",
    r"mlp\.fc": "linear",
}
CVT = {
    r"^stages\.(\d)\.embed\.": r"layers.\1.",
    r"^stages\.(\d)\.blocks\.(\d)\.": r"layers.\1.2.layers.\2.",
    r"norm1\.": "0.norm.",
    r"attn\.(q|kv)\.": r"0.to_\1.net.",
    r"attn\.proj": "0.to_out.0",
    r"norm2\.": "1.net.0.",
    r"mlp\.fc1": "1.net.1",
    r"mlp\.fc2": "1.net.4",
    r"^head": "to_logits.2",
}
MOBILEVIT = {
    r"^trunk\.(\d)": lambda m: f"trunk.{int(m[1]) // 2}.{int(m[1]) % 2}",
    r"\.conv\.([23])\.(?=[a-z])": lambda m: f".conv.{4 + int(m[1])}.",  # the first two of ours hold three each
    r"\.conv\.([01])\.(\d)": lambda m: f".conv.{3 * int(m[1]) + int(m[2])}",
    r"transformer\.(\d)": r"transformer.layers.\1",
    r"norm1": "0.norm",
    r"attn\.qkv": "0.to_qkv",
    r"attn\.proj": "0.to_out.0",
    r"norm2": "1.net.0",
    r"mlp\.fc1": "1.net.1",
    r"mlp\.fc2": "1.net.4",
    r"^conv2": "to_logits.0",
    r"^head": "to_logits.2",
}


def _assert_same_logits(ours: nn.Module, theirs: nn.Module, names: Mapping[str, object], img_size: int) -> None:
    """Copy all weights of theirs, under our names, with BatchNorms that have seen something; compare."""
    x = torch.rand(2, 3, img_size, img_size)
    with torch.no_grad():
        for module in theirs.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 1.5)
        ours.load_state_dict(_named(theirs.state_dict(), ours.state_dict(), names))
        expected = theirs.eval()(x)
        assert expected.std() > 1e-3
        torch.testing.assert_close(ours.eval()(x), expected, atol=1e-5, rtol=1e-5)


def _named(theirs: Mapping[str, Tensor], ours: Mapping[str, Tensor], names: Mapping[str, object]) -> dict[str, Tensor]:
    named = {}
    for name, tensor in ours.items():
        other = name
        for pattern, replacement in names.items():
            other = re.sub(pattern, replacement, other)
        if other not in theirs:  # a channel norm of theirs
            other = re.sub(r"weight$", "g", re.sub(r"bias$", "b", other))
        named[name] = theirs[other].reshape(tensor.shape)
    assert len(named) == len(theirs)
    return named


@pytest.mark.parametrize(("tokenizer", "img_size"), [("3x1", 32), ("7x2", 64)])
def test_cct(tokenizer: Tokenizing, img_size: int) -> None:
    kernel, layers = map(int, tokenizer.split("x"))
    theirs = cct_7(
        img_size=img_size,
        kernel_size=kernel,
        n_conv_layers=layers,
        num_classes=10,
        positional_embedding="learnable",
    )
    nn.init.normal_(theirs.classifier.attention_pool.weight)  # else nearly the mean
    _assert_same_logits(cifar_cct(img_size=img_size, tokenizer=tokenizer).network, theirs, CCT, img_size)


@pytest.mark.parametrize(("patch_size", "kernel"), [(2, 3), (4, 7)])
def test_cvt(patch_size: int, kernel: int) -> None:
    theirs = CvT(num_classes=10, s1_emb_kernel=kernel, s1_emb_stride=patch_size)
    _assert_same_logits(cifar_cvt(patch_size=patch_size).network, theirs, CVT, 32)


@pytest.mark.parametrize(("stride", "img_size"), [(8, 32), (16, 64), (32, 64)])
def test_mobilevit(stride: Stride, img_size: int) -> None:
    """Its own stride is 32; the two strides that ours changes are set in it."""
    theirs = MobileViT(
        (img_size, img_size),
        dims=(144, 192, 240),
        channels=(16, 32, 64, 64, 96, 96, 128, 128, 160, 160, 640),
        num_classes=10,
    )
    if stride < 32:
        theirs.stem[1].conv[3].stride = (1, 1)
    if stride < 16:
        theirs.conv1[0].stride = (1, 1)
    _assert_same_logits(cifar_mobilevit(img_size=img_size, stride=stride).network, theirs, MOBILEVIT, img_size)

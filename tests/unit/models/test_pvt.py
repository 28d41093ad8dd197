"""Pyramid Vision Transformers."""

from __future__ import annotations

import pytest
import torch

from bastion import BastionError
from bastion.models import models
from bastion.models.import_checkpoint import _renamed
from bastion.models.meta import meta
from bastion.models.pvt import ReducedAttention


def test_keys_and_values_are_those_of_the_coarser_grid() -> None:
    """By hand, for one head: softmax over 4 patches of 2×2 tokens."""
    torch.manual_seed(0)
    attention = ReducedAttention(6, 1, 2)
    x = torch.randn(1, 16, 6)
    coarse = attention.sr(x.transpose(1, 2).reshape(1, 6, 4, 4)).flatten(2).transpose(1, 2)
    k, v = attention.kv(attention.norm(coarse)).chunk(2, dim=-1)
    weights = (attention.q(x) @ k.transpose(1, 2) / 6**0.5).softmax(-1)
    assert weights.shape == (1, 16, 4)
    assert torch.allclose(attention(x, (4, 4)), attention.proj(weights @ v), atol=1e-6)


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(BastionError, match="img_size: 100 does not divide into the patches of all four stages"):
        models.build({"name": "pvt/ti", "img_size": 100})
    with meta():
        assert models.build({"name": "pvt/ti", "img_size": 32}).network(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)


def test_the_names_of_the_authors_are_known() -> None:
    with meta():
        backbone = models.build("tiny/pvt")
    theirs = {}
    for name, tensor in backbone.network.state_dict().items():
        parts = name.split(".")
        if parts[0] == "stages":
            number, part = int(parts[1]) + 1, parts[2]
            begin = {"blocks": f"block{number}", "cls_token": "cls_token"}.get(part, f"{part}{number}")
            name = ".".join([begin, *parts[3:]])
        theirs[name] = tensor
    assert "patch_embed1.proj.weight" in theirs and "block4.0.attn.kv.weight" in theirs and "pos_embed2" in theirs
    assert _renamed(theirs, backbone).keys() == backbone.network.state_dict().keys()

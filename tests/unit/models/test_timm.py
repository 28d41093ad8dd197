"""timm's families at the size of small images."""

from __future__ import annotations

import logging
import time
from typing import Any

import huggingface_hub
import pytest
import torch

import bastion
from bastion import BastionError
from bastion.models import Classifier, checkpoint, models
from bastion.models.meta import meta

FAMILIES = (
    *("deit_tiny_patch16_224", "vit_tiny_patch16_224", "cait_xxs24_224", "xcit_nano_12_p16_224", "convnext_atto"),
    *(
        "swin_tiny_patch4_window7_224",
        "pvt_v2_b0",
        "coatnet_nano_rw_224",
        "mobilevit_xxs",
        "levit_128s",
        "mixer_s16_224",
    ),
    *("poolformer_s12", "resnet18", "resnext50_32x4d", "wide_resnet50_2", "vgg11_bn", "densenet121", "botnet26t_256"),
    *("convit_tiny", "twins_pcpvt_small", "twins_svt_small"),
)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_images_of_32(name: str) -> None:
    with meta():
        backbone = models.build({"name": f"timm/{name}", "img_size": 32, "num_classes": 10})
        assert backbone.shape == (3, 32, 32) and backbone.paper
        assert backbone.network.eval()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)


@pytest.mark.parametrize(("name", "maps"), [("tiny/twins", 7), ("timm/botnet26t_256", 3)])
def test_attention_is_seen_whatever_its_axes(name: str, maps: int) -> None:
    """Twins has an axis of windows, timm's BoTNet has the heads in the batch."""
    spec = {"name": name, "img_size": 32, "num_classes": 10}
    model = checkpoint.build(spec, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    with torch.no_grad(), model.tap("attention") as taps:
        model(torch.rand(2, 3, 32, 32))
    assert len(taps.attention) == maps
    for attention in taps.attention.values():
        assert attention.ndim == 4 and attention.shape[0] % 2 == 0
        assert torch.allclose(attention.sum(-1), torch.ones(()), atol=1e-5)


def test_the_attention_of_convit_is_of_content_and_position() -> None:
    """Its first blocks take the mean of two softmaxes, of which the last does not look at the image."""
    model = checkpoint.build({"name": "tiny/convit"}, mean=(0.5,) * 3, std=(0.25,) * 3).eval()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), model.tap("attention", "blocks") as taps:
        model(x)
        first, second = (block.module for block in model.blocks()[:2])
        expected = second.attn.get_attention(second.norm1(taps.blocks["blocks.0"]))
    assert torch.equal(taps.attention["blocks.1"], expected)
    assert all(not torch.equal(*attention) for attention in taps.attention.values())  # the images differ
    assert not first.attn.attn_drop._forward_pre_hooks


def test_blocks_of_a_family_that_is_not_declared_are_an_error() -> None:
    with meta():
        model = Classifier(models.build("timm/crossvit_tiny_240"), (0.5,) * 3, (0.25,) * 3)
    with pytest.raises(BastionError, match="CrossVit: which of its modules are residual blocks is not known"):
        model.blocks()


def test_options_of_an_untrained_model_are_used() -> None:
    model = bastion.load("timm/vit_tiny_patch16_224:pretrained=False,num_classes=10,img_size=32")
    assert (model.num_classes, model.shape) == (10, (3, 32, 32)) and model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert model.spec == {"name": "timm/vit_tiny_patch16_224", "num_classes": 10, "img_size": 32}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm/resnet10t:num_classes=10", "num_classes: goes only with pretrained=false"),
        ("timm/resnet10t:pretrained=no way", "pretrained: expected true or false, got 'no way'"),
        ("timm/resnet10t:pretrained=false,deepness=3", "timm cannot make 'resnet10t' with .*deepness"),
        ("timm/resnet10tt:pretrained=false", "has no 'resnet10tt'; did you mean 'resnet10t'"),
    ],
)
def test_wrong_options_are_refused(name: str, message: str) -> None:
    with pytest.raises(BastionError, match=message):
        bastion.load(name)


def test_weights_that_cannot_be_had_are_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Listening(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record.getMessage())

    def unreachable(*_: Any, **__: Any) -> None:
        logging.getLogger("huggingface_hub.utils._http").warning("Retrying in 1s [Retry 1/5].")
        raise OSError("no network")

    hub, listening = logging.getLogger("huggingface_hub"), Listening()
    monkeypatch.setattr("timm.create_model", unreachable)
    monkeypatch.setattr("bastion.models.timm._hub_error", lambda: None)
    monkeypatch.setattr(hub, "handlers", [listening])
    level = hub.level
    with pytest.raises(BastionError, match="its weights could not be downloaded .OSError: no network"):
        bastion.load("timm/resnet10t")
    assert said == [] and hub.level == level


class NoNetwork:
    """A session of huggingface_hub without a network; counts requests."""

    def __init__(self) -> None:
        self.requests = 0

    def head(self, *_: Any, timeout: float, **__: Any) -> None:
        assert timeout <= 5
        self.requests += 1
        raise OSError("Name or service not known")


@pytest.mark.parametrize(("name", "advice"), [("timm/resnet10t", r"\. `timm/resnet10t:pret"), ("hf-hub:a/b", "$")])
def test_without_a_network_weights_fail_at_once(name: str, advice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session, sleep = NoNetwork(), time.sleep
    monkeypatch.setattr("bastion.models.timm.get_session", lambda: session)

    def no_wait(seconds: float) -> None:
        assert seconds < 0.5, "huggingface_hub waits for a retry"
        sleep(seconds)

    monkeypatch.setattr("time.sleep", no_wait)
    message = "could not be downloaded .OSError: Name or service not known., and are not in .*; check the network"
    with pytest.raises(BastionError, match=f"^{name}: its weights {message} connection{advice}"):
        bastion.load(name)
    assert session.requests == 1 and not huggingface_hub.constants.HF_HUB_OFFLINE

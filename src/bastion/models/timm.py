"""Any timm model by name: `timm/vit_tiny_patch16_224`, with timm's own keyword arguments."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import timm
from huggingface_hub import constants, get_session
from torch import nn

from bastion import rng
from bastion.errors import BastionError, did_you_mean
from bastion.models import models
from bastion.models.classifier import Backbone, Blocks, Category, Classifier
from bastion.models.wrap import wrap

HUB_TIMEOUT = 5.0  # seconds


class Family(NamedTuple):
    """What timm does not tell of an architecture."""

    category: Category | None = None
    paper: str = ""
    blocks: tuple[Blocks, ...] = ()


_TOKENS = (Blocks("blocks.*", "tokens"),)
_STEMMED = (Blocks("patch_embed.backbone.stages.*.blocks.*"), Blocks("patch_embed.backbone.stages.*.*"), *_TOKENS)
_PLAIN = (Blocks("blocks.*"),)
_STAGES = (Blocks("stages.*.blocks.*"),)
_LAYERS = (Blocks("layer*.*"), *_STAGES, Blocks("stages.*.*"))
_MIXED = (Blocks("stages.*.blocks.*", "tokens", having="attn"), *_STAGES)
_METAFORMER = (Blocks("stages.*.blocks.*", "tokens", having="token_mixer.qkv"), *_STAGES)
_GROUPED = (Blocks("blocks.*.*"),)

# By prefix of the name; the first that matches counts.
_FAMILIES = {
    "deit3": Family("Transformer", "Touvron et al. 2022, DeiT III", _TOKENS),
    "deit": Family("Transformer", "Touvron et al. 2021, Training data-efficient image transformers", _TOKENS),
    "vit": Family("Transformer", "Dosovitskiy et al. 2021, An image is worth 16×16 words", _STEMMED),
    "beit": Family("Transformer", "Bao et al. 2022, BEiT", _TOKENS),
    "eva": Family("Transformer", "Fang et al. 2023, EVA", _TOKENS),
    "cait": Family(
        "Transformer",
        "Touvron et al. 2021, Going deeper with image transformers",
        (*_TOKENS, Blocks("blocks_token_only.*", "class")),
    ),
    "xcit": Family(
        "hybrid", "El-Nouby et al. 2021, XCiT", (Blocks("blocks.*", "channels"), Blocks("cls_attn_blocks.*", "class"))
    ),
    "convit": Family(
        "Transformer",
        "d'Ascoli et al. 2021, ConViT",
        (Blocks("blocks.*", "tokens", map_to="attn.attn_drop"),),  # a mean of two softmaxes, of content and of position
    ),
    "convnext": Family("CNN", "Liu et al. 2022, A ConvNet for the 2020s", _STAGES),
    "swin": Family(
        "Transformer",
        "Liu et al. 2021, Swin Transformer",
        (Blocks("layers.*.blocks.*", "windows"), Blocks("stages.*.blocks.*", "windows")),
    ),
    "pvt_v2": Family("hybrid", "Wang et al. 2022, PVT v2", (Blocks("stages.*.blocks.*", "tokens"),)),
    "coatnet": Family("hybrid", "Dai et al. 2021, CoAtNet", _MIXED),
    "coatnext": Family("hybrid", "Dai et al. 2021, CoAtNet", _MIXED),
    "maxvit": Family("hybrid", "Tu et al. 2022, MaxViT", (Blocks("stages.*.blocks.*", "windows"),)),
    "mobilevit": Family(
        "hybrid",
        "Mehta and Rastegari 2022, MobileViT",
        (Blocks("stages.*.*", "windows", having="transformer"), Blocks("stages.*.*")),
    ),
    "pit": Family(
        "hybrid",
        "Heo et al. 2021, Rethinking spatial dimensions of vision transformers",
        (Blocks("transformers.*.blocks.*", "tokens"),),
    ),
    "levit": Family("hybrid", "Graham et al. 2021, LeViT", (Blocks("stages.*.blocks.*", "tokens"),)),
    "mixer": Family("Transformer", "Tolstikhin et al. 2021, MLP-Mixer", _PLAIN),
    "resmlp": Family("Transformer", "Touvron et al. 2021, ResMLP", _PLAIN),
    "gmlp": Family("Transformer", "Liu et al. 2021, Pay attention to MLPs", _PLAIN),
    "poolformer": Family("Transformer", "Yu et al. 2022, MetaFormer is actually what you need for vision", _METAFORMER),
    "caformer": Family("hybrid", "Yu et al. 2024, MetaFormer baselines for vision", _METAFORMER),
    "convformer": Family("CNN", "Yu et al. 2024, MetaFormer baselines for vision", _METAFORMER),
    "botnet": Family(
        "hybrid",
        "Srinivas et al. 2021, Bottleneck Transformers",
        (Blocks("stages.*.*", "tokens", having="self_attn"), Blocks("stages.*.*")),
    ),
    "twins": Family(
        "hybrid",
        "Chu et al. 2021, Twins",
        (Blocks("blocks.*.*", "windows", having="attn.qkv"), Blocks("blocks.*.*", "tokens")),
    ),
    "wide_resnet": Family("CNN", "Zagoruyko and Komodakis 2016, Wide residual networks", _LAYERS),
    "resnext": Family("CNN", "Xie et al. 2017, Aggregated residual transformations", _LAYERS),
    "resnet": Family("CNN", "He et al. 2016, Deep residual learning", _LAYERS),
    "resnest": Family("CNN", "Zhang et al. 2022, ResNeSt", _LAYERS),
    "res2net": Family("CNN", "Gao et al. 2021, Res2Net", _LAYERS),
    "seresnet": Family("CNN", "Hu et al. 2018, Squeeze-and-excitation networks", _LAYERS),
    "regnet": Family(
        "CNN", "Radosavovic et al. 2020, Designing network design spaces", (Blocks("s*.b*"), Blocks("stages.*.*"))
    ),
    "vgg": Family("CNN", "Simonyan and Zisserman 2015, Very deep convolutional networks"),
    "densenet": Family(
        "CNN", "Huang et al. 2017, Densely connected convolutional networks", (Blocks("features.denseblock*"),)
    ),
    "efficientnet": Family("CNN", "Tan and Le 2019, EfficientNet", _GROUPED),
    "tf_efficientnet": Family("CNN", "Tan and Le 2019, EfficientNet", _GROUPED),
    "mobilenetv2": Family("CNN", "Sandler et al. 2018, MobileNetV2", _GROUPED),
}


@models.register("timm/*")
def timm_model(
    name: str,
    /,
    *,
    num_classes: int = 1000,
    in_chans: int = 3,
    img_size: int | tuple[int, int] | None = None,
    **options: Any,
) -> Backbone:
    """A timm model with random weights; every architecture takes `img_size`."""
    for refused in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"):
        if refused in options:  # they make timm download and read files, which an untrusted card or recipe must not
            raise BastionError(f"model.{refused}: not allowed; weights come from a bastion checkpoint")
    if not timm.is_model(name):
        raise BastionError(f"model: timm {timm.__version__} has no '{name}'{did_you_mean(name, timm.list_models())}")
    options |= {"num_classes": num_classes, "in_chans": in_chans}
    try:
        network = _created(name, img_size, options)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BastionError(f"model: timm cannot make '{name}' with {options}: {error}") from error
    size = img_size or timm.get_pretrained_cfg_value(name, "input_size")[1:]
    height, width = (size, size) if isinstance(size, int) else size
    return Backbone(network, num_classes, (in_chans, height, width), **family_of(name)._asdict())


def family_of(name: str) -> Family:
    """The category, paper and blocks of a timm architecture; empty if they are not known."""
    return next((known for prefix, known in _FAMILIES.items() if name.startswith(prefix)), Family())


def pretrained(name: str) -> Classifier:
    """A timm model such as `resnet18.a1_in1k`, with weights from the hub and the normalisation in timm's config."""
    if not timm.is_model(name) and not name.startswith("hf-hub:"):
        raise BastionError(f"model: timm {timm.__version__} has no '{name}'{did_you_mean(name, timm.list_models())}")
    unreachable = _hub_error()
    try:
        with _quiet_hub(offline=unreachable is not None):
            network = timm.create_model(name, pretrained=True)
    except Exception as failure:
        error, called = unreachable or failure, name if name.startswith("hf-hub:") else f"timm/{name}"
        reason = f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
        cache = f", and are not in {constants.HF_HUB_CACHE}" if unreachable else ""
        other = "" if name == called else f". `{called}:pretrained=false` is the same architecture, untrained"
        raise BastionError(
            f"{called}: its weights could not be downloaded ({reason}){cache}; check the network connection{other}"
        ) from failure
    return _with_config(network)


def _hub_error() -> Exception | None:
    """What goes wrong when the hub is asked for a sign of life, within seconds; None if it answers."""
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception as error:  # of httpx or requests, which huggingface_hub uses depends on its version
        return error
    return None


@contextmanager
def _quiet_hub(*, offline: bool) -> Iterator[None]:
    """Without the hub's line on each of its retries; `offline`: without retries, which take a minute."""
    logger = logging.getLogger("huggingface_hub")
    level, was_offline = logger.level, constants.HF_HUB_OFFLINE
    logger.setLevel(logging.ERROR)
    constants.HF_HUB_OFFLINE = offline or was_offline
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.HF_HUB_OFFLINE = was_offline


def untrained(name: str, options: dict[str, Any]) -> Classifier:
    """A timm model with random weights, the same in every process, and the options of a recipe, as `num_classes`."""
    with rng.preserved():
        rng.reseed("model", 0)
        backbone = models.build({"name": f"timm/{name}", **options})
    return _with_config(backbone.network, backbone.shape, options)


def _with_config(
    network: nn.Module, shape: tuple[int, int, int] | None = None, options: Mapping[str, Any] | None = None
) -> Classifier:
    """Wrapped with the normalisation in timm's config."""
    config: Any = network.pretrained_cfg
    mean, std = config["mean"], config["std"]
    if shape and shape[0] != len(mean):  # such as grey images
        mean, std = ((sum(each) / len(each),) * shape[0] for each in (mean, std))
    model = wrap(network.eval(), mean=mean, std=std, shape=shape)
    model.spec = {"name": f"timm/{config['architecture']}", "num_classes": model.num_classes, **(options or {})}
    return model


def _created(name: str, img_size: int | tuple[int, int] | None, options: dict[str, Any]) -> nn.Module:
    network: nn.Module
    if img_size is not None:
        try:
            network = timm.create_model(name, img_size=img_size, **options)
            return network
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
    network = timm.create_model(name, **options)  # a convolutional network, which takes any size
    return network

"""Any timm model by name: `timm/vit_tiny_patch16_224`, with timm's own keyword arguments."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn

from bastion.errors import BastionError, did_you_mean
from bastion.models import models
from bastion.models.classifier import Attention, Backbone

# What is known of the families that bastion works with most: the first prefix that fits a name.
_FAMILIES: dict[str, tuple[str, Attention | None]] = {
    "deit3": ("Touvron et al. 2022, DeiT III", "tokens"),
    "deit": ("Touvron et al. 2021, Training data-efficient image transformers", "tokens"),
    "vit": ("Dosovitskiy et al. 2021, An image is worth 16×16 words", "tokens"),
    "cait": ("Touvron et al. 2021, Going deeper with image transformers", "tokens"),
    "xcit": ("El-Nouby et al. 2021, XCiT", "channels"),
    "convit": ("d'Ascoli et al. 2021, ConViT", "tokens"),
    "convnext": ("Liu et al. 2022, A ConvNet for the 2020s", None),
    "swin": ("Liu et al. 2021, Swin Transformer", "windows"),
    "pvt_v2": ("Wang et al. 2022, PVT v2", "tokens"),
    "coatnet": ("Dai et al. 2021, CoAtNet", "tokens"),
    "mobilevit": ("Mehta and Rastegari 2022, MobileViT", "windows"),
    "levit": ("Graham et al. 2021, LeViT", "tokens"),
    "mixer": ("Tolstikhin et al. 2021, MLP-Mixer", None),
    "poolformer": ("Yu et al. 2022, MetaFormer is actually what you need for vision", None),
    "botnet": ("Srinivas et al. 2021, Bottleneck Transformers", "tokens"),
    "twins": ("Chu et al. 2021, Twins", "tokens"),
    "wide_resnet": ("Zagoruyko and Komodakis 2016, Wide residual networks", None),
    "resnext": ("Xie et al. 2017, Aggregated residual transformations", None),
    "resnet": ("He et al. 2016, Deep residual learning", None),
    "vgg": ("Simonyan and Zisserman 2015, Very deep convolutional networks", None),
    "densenet": ("Huang et al. 2017, Densely connected convolutional networks", None),
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
    """A timm model with random weights; `img_size` for any family, windows and tables are made for it."""
    for refused in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"):
        if refused in options:  # they make timm fetch and read files: a card or recipe from a stranger may not
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
    paper, attention = next((known for prefix, known in _FAMILIES.items() if name.startswith(prefix)), ("", None))
    return Backbone(network, num_classes, (in_chans, height, width), paper=paper, attention=attention)


def _created(name: str, img_size: int | tuple[int, int] | None, options: dict[str, Any]) -> nn.Module:
    network: nn.Module
    if img_size is not None:
        try:
            network = timm.create_model(name, img_size=img_size, **options)
            return network
        except TypeError as error:
            if "'img_size'" not in str(error):
                raise
    network = timm.create_model(name, **options)  # convolutions take any size
    return network


def timm_names(pattern: str = "*") -> list[str]:
    """Names for `bastion list models`."""
    return [f"timm/{name}" for name in timm.list_models(pattern.removeprefix("timm/"))]

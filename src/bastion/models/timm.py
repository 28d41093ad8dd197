"""Any timm model by name: `timm/vit_tiny_patch16_224`, with timm's own keyword arguments."""

from __future__ import annotations

from typing import Any

import bastion._torchvision  # noqa: F401  (before timm)

# isort: split
import timm
from torch import nn

from bastion.errors import BastionError, did_you_mean
from bastion.models import models
from bastion.models.classifier import Backbone


@models.register("timm/*")
def timm_model(name: str, /, *, num_classes: int = 1000, in_chans: int = 3, **options: Any) -> Backbone:
    """A timm model with random weights."""
    for refused in ("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"):
        if refused in options:  # they make timm fetch and read files: a card or recipe from a stranger may not
            raise BastionError(f"model.{refused}: not allowed; weights come from a bastion checkpoint")
    if not timm.is_model(name):
        raise BastionError(f"model: timm {timm.__version__} has no '{name}'{did_you_mean(name, timm.list_models())}")
    try:
        network: nn.Module = timm.create_model(name, num_classes=num_classes, in_chans=in_chans, **options)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BastionError(f"model: timm cannot make '{name}' with {options}: {error}") from error
    size = options.get("img_size") or timm.get_pretrained_cfg_value(name, "input_size")[1:]
    height, width = (size, size) if isinstance(size, int) else size
    return Backbone(network, num_classes, (in_chans, height, width))


def timm_names(pattern: str = "*") -> list[str]:
    """Names for `bastion list models`."""
    return [f"timm/{name}" for name in timm.list_models(pattern.removeprefix("timm/"))]

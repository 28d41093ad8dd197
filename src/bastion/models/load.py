"""Trained models by name: a run, a folder with weights and card, a zoo entry, or one of timm's."""

from __future__ import annotations

from pathlib import Path

import torch

from bastion.errors import BastionError, did_you_mean
from bastion.models import Classifier, checkpoint

ZOO = Path(__file__).parent.parent / "zoo"


def best_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def zoo_names() -> list[str]:
    return sorted(f"zoo/{card.parent.relative_to(ZOO).as_posix()}" for card in ZOO.rglob(checkpoint.CARD))


def locate(name: str | Path) -> Path:
    """The folder with the weights and card of this model."""
    if str(name).startswith("zoo/"):
        folder = ZOO / str(name).removeprefix("zoo/")
        if not (folder / checkpoint.CARD).is_file():
            raise BastionError(f"no '{name}' in the zoo{did_you_mean(str(name), zoo_names())}")
        return folder
    path = Path(name)
    for folder in (path, path / "model"):
        if (folder / checkpoint.CARD).is_file():
            return folder
    if (path / "provenance.json").is_file():
        raise BastionError(f"{path}: this run has no model yet; finish it with `bastion train … --run {path} --resume`")
    if path.is_file():
        raise BastionError(f"{path}: is a file; give the folder with the weights and {checkpoint.CARD}")
    raise BastionError(
        f"no model '{name}': not a run, not a folder with {checkpoint.CARD}, not zoo/NAME (see `bastion list zoo`)"
        + did_you_mean(f"zoo/{name}", zoo_names())
    )


def load(name: str | Path) -> Classifier:
    """`bastion.load`: the classifier in eval mode.

    `name` is a run, a model folder, `zoo/NAME`, or a timm model with its weights: `timm/resnet18.a1_in1k`,
    `hf-hub:timm/…`; `timm/resnet18:pretrained=false` has random weights.
    """
    if (timm_name := timm_model_name(name)) is None:
        return checkpoint.load(locate(name))
    from bastion.models.timm import pretrained, untrained

    plain, option, _ = timm_name.partition(":pretrained=false")
    return untrained(plain) if option else pretrained(plain)


def timm_model_name(name: str | Path) -> str | None:
    """timm's name of the model; None if it is not one of timm's, or a folder."""
    text = str(name)
    if Path(text).exists() or not text.startswith(("timm/", "hf-hub:")):
        return None
    return text.removeprefix("timm/")

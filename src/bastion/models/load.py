"""Trained models by name: a run, a folder with weights and card, a zoo entry, or one of timm's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bastion import storage
from bastion.errors import BastionError, did_you_mean, shown
from bastion.forward import Function
from bastion.listing import ZOO, timm_names, zoo_names
from bastion.models import Classifier, checkpoint
from bastion.models.wrap import wrap
from bastion.recipe_yaml import read_spec
from bastion.registry import import_file


def best_device(wanted: str | None = None) -> torch.device:
    """The one that is wanted, if it is there; else a GPU, if there is one."""
    if wanted is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(1, device=wanted)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise BastionError(f"device: '{wanted}' cannot be used here ({reason}); such as cpu, cuda or cuda:1") from error
    return torch.device(wanted)


def locate(name: str | Path) -> Path:
    """The folder with the weights and card of this model."""
    if str(name).startswith("zoo/"):
        folder = ZOO / str(name).removeprefix("zoo/")
        if not storage.is_file(folder / checkpoint.CARD):
            raise BastionError(f"no '{name}' in the zoo{did_you_mean(str(name), zoo_names())}")
        return folder
    path = Path(name)
    for folder in (path, path / "model"):
        if storage.is_file(folder / checkpoint.CARD):
            return folder
    if storage.is_file(path / "provenance.json"):
        raise BastionError(f"{path}: this run has no model yet; finish it with `bastion train … --run {path} --resume`")
    if storage.is_file(path) and path.suffix == ".py":
        raise BastionError(f"{path}: is a file; give the function that returns the network, {path}:FUNCTION")
    if storage.is_file(path):
        raise BastionError(
            f"{path}: is a file; of bastion's own models give the folder with {checkpoint.CARD}; bring other weights "
            f"in by `bastion import {path} --model NAME`, or load them into their network and give that"
        )
    near = did_you_mean(f"zoo/{name}", zoo_names())
    if f"timm/{name}".partition(".")[0] in timm_names():
        near = f"; did you mean 'timm/{name}'?"
    raise BastionError(
        f"no model '{name}': not a run, not a folder with {checkpoint.CARD}, not zoo/NAME (see `bastion list zoo`)"
        + near
    )


def load(name: str | Path, network: nn.Module | None = None, **options: Any) -> Classifier:
    """`bastion.load`: the classifier in eval mode.

    `name` is a run, a model folder, `zoo/NAME`, or a timm model with its weights: `timm/resnet18.a1_in1k`,
    `hf-hub:timm/…`; `timm/resnet18:pretrained=false,num_classes=10`, or these as keywords, has random weights, and
    options as in a recipe.
    `path.py:function` is the network that a function in your own file returns.
    Weights of a network of your own, which `bastion.train` stored, go into `network`.
    """
    if options and timm_model_name(name) is None:
        raise BastionError(f"load: {next(iter(options))}= is for timm's models; {name} has all in its files")
    if is_function(name):
        return _returned(*str(name).rsplit(":", 1))
    if (timm_name := timm_model_name(name)) is None:
        return checkpoint.load(locate(name), network)
    from bastion.models.timm import pretrained, untrained

    hub = "hf-hub:" if timm_name.startswith("hf-hub:") else ""
    options = read_spec(timm_name.removeprefix(hub)) | options
    plain, trained = hub + options.pop("name"), options.pop("pretrained", True)
    if not isinstance(trained, bool):
        raise BastionError(f"{name}: pretrained: expected true or false, got {trained!r}")
    if trained and options:
        raise BastionError(f"{name}: {next(iter(options))}: goes only with pretrained=false")
    return pretrained(plain) if trained else untrained(plain, options)


def as_module(model: Any, device: Any = None) -> nn.Module:
    """The module itself, one that is loaded by name, or a function of images, which gets them on `device`."""
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, str | Path):
        return load(model)
    if isinstance(model, type) or not callable(model):
        got = f"the class {model.__name__}; give {model.__name__}(…)" if isinstance(model, type) else shown(model)
        if isinstance(model, Mapping):
            got = "a dict of weights; load them into their network: network.load_state_dict(…)"
        raise BastionError(f"model: expected a torch.nn.Module, a function of images or a name, got {got}")
    return Function(model, device)


def timm_model_name(name: str | Path) -> str | None:
    """timm's name of the model; None if it is not one of timm's, or a folder."""
    text = str(name)
    if not text.startswith(("timm/", "hf-hub:")) or storage.is_folder(text):
        return None
    return text.removeprefix("timm/")


def is_function(name: str | Path) -> bool:
    """Does it name a function in a file, `path.py:function`?"""
    return str(name).rpartition(":")[0].endswith(".py")


def _returned(file: str, function: str) -> Classifier:
    """The network that a function of the user's makes: a `Classifier`, or one that takes pixels from 0 to 1."""
    module = import_file(Path(file), f"bastion_models.{Path(file).stem}")
    make = getattr(module, function, None)
    if not callable(make):
        known = [name for name, each in vars(module).items() if callable(each) and not name.startswith("_")]
        raise BastionError(f"{file}: no function '{function}'{did_you_mean(function, known)}")
    try:
        network = make()
    except BastionError:
        raise
    except Exception as error:
        raise BastionError(f"{file}:{function}(): {type(error).__name__}: {error}") from error
    if not isinstance(network, nn.Module):
        raise BastionError(f"{file}:{function}: must return a torch.nn.Module, got {type(network).__name__}")
    if isinstance(network, Classifier):
        return network.eval()
    return wrap(network.eval(), "none")

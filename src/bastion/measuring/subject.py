"""What is measured: which model on which data, whether they fit, and what tells them from all others."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bastion import forward, rng, storage
from bastion.errors import BastionError
from bastion.forward import frozen, in_mode, input_gradient
from bastion.models import Classifier, checkpoint
from bastion.models.load import best_device, load
from bastion.registry import plugins_digest
from bastion.run import Run, version
from bastion.types import DataSet


def on_device(model: nn.Module | Path) -> nn.Module:
    """A model that was given stays where it is."""
    return model if isinstance(model, nn.Module) else load(model).to(best_device())


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are added in one order, whatever machine this is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def check_fit(model: nn.Module, data: DataSet) -> None:
    if not isinstance(model, Classifier):
        _check_logits(model, data)
    elif model.num_classes != len(data.classes):
        raise BastionError(
            f"measure: the model has {model.num_classes} classes, {data.name} has {len(data.classes)}; "
            "measure it on the data it was trained for"
        )
    else:
        model.check_input(data.shape, f"measure on {data.name}")


def _check_logits(model: nn.Module, data: DataSet) -> None:
    """A network of the user's own must give one logit per class for an image of the data."""
    k, shape = len(data.classes), ", ".join(map(str, data.shape))
    expected = f"measure: the model must give float logits (B, {k}) for images (B, {shape}) in [0, 1]"
    try:
        logits = _answer(model, data)
    except Exception as error:
        raise BastionError(f"{expected}; it raised {type(error).__name__}: {error}") from error
    if logits.shape != (2, len(data.classes)) or not logits.is_floating_point():
        raise BastionError(f"{expected}; for two images it gave {logits.dtype} {tuple(logits.shape)}")


def _answer(model: nn.Module, data: DataSet) -> Tensor:
    """Logits of two images that are always the same."""
    with torch.no_grad(), in_mode(model, training=False), rng.preserved(), one_thread():
        rng.reseed("identity")
        return forward.logits(model, _images(model, data)).cpu()


def _slope(model: nn.Module, data: DataSet) -> Tensor:
    """(2, 4) the slope of the largest logit at these images along four directions; zero where there is no way back."""
    images = _images(model, data).requires_grad_()
    with torch.enable_grad(), in_mode(model, training=False), rng.preserved(), one_thread(), frozen(model):
        rng.reseed("identity")
        try:
            gradient = input_gradient(forward.logits(model, images).amax(1), images)
        except RuntimeError:  # a model that cannot be differentiated may still be asked
            gradient = torch.zeros_like(images)
    ways = rng.signs(0, torch.arange(4), "identity", data.shape).flatten(1)
    return gradient.flatten(1).cpu().double() @ ways.T.double()


def _images(model: nn.Module, data: DataSet) -> Tensor:
    return rng.uniform(0, torch.arange(2), "identity", data.shape).to(device_of(model))


def _coarse(values: Tensor, digits: int) -> list[Any]:
    """So many digits of the largest, and the others in units of its last: no rounding of another batch or machine."""
    values = values.double().nan_to_num()
    largest = values.abs().max().clamp(min=1e-30)
    return [f"{largest.item():.{digits}g}", (values / largest * 10**digits).round().tolist()]


def device_of(model: nn.Module) -> torch.device:
    return next((tensor.device for tensor in model.state_dict().values()), torch.device("cpu"))


def identify(model: nn.Module, data: DataSet, split: str) -> dict[str, Any]:
    """What facts depend on, besides the probe, the seed and how examples are cut.

    Weights alone do not make a model: its text, and its answer to fixed images with the way back to them, tell others
    with the same weights apart.
    """
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(model))  # where a function lies in memory is no part of the model
    shown = [_coarse(_answer(model, data), 3), _coarse(_slope(model, data), 2)]
    return {
        "weights": checkpoint.digest(model),
        "network": storage.fingerprint([text, shown]),
        "device": device_of(model).type,
        "data": {"name": data.name, "fingerprint": data.fingerprint},
        "split": split,
        "versions": {name: version(name) for name in ("bastion", "torch", "timm")},
        "plugins": plugins_digest(),
    }


def home_of(source: nn.Module | Path, folder: str | Path | None) -> Path:
    if folder is not None:
        return Path(folder)
    if isinstance(source, Path) and _is_run(source.resolve()):
        return source.resolve().parent
    weights = checkpoint.digest(source) if isinstance(source, nn.Module) else checkpoint.read_card(source).weights
    name = re.sub(r"[^\w.-]+", "-", name_of(source))
    return Path("runs") / f"{name}-{weights[:8]}"


def _is_run(model_folder: Path) -> bool:
    return model_folder.name == "model" and (model_folder.parent / "provenance.json").is_file()


def name_of(source: nn.Module | Path) -> str:
    """What tables and reports call the model."""
    if isinstance(source, nn.Module):
        return type(source).__name__.lower()
    folder = source.resolve()
    return folder.parent.name if _is_run(folder) else folder.name


def check_home(home: Run, weights: str) -> None:
    """A trained run holds facts of its own model only."""
    if home.recipe() is not None and (home.model / checkpoint.CARD).is_file():
        own = checkpoint.read_card(home.model).weights
        if own != weights:
            raise BastionError(f"{home.folder}: is the run of another model; give facts of this one another --run")

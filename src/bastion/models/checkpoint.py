"""Building, saving and loading classifiers: weights in safetensors, and a JSON card that the model is rebuilt from."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from bastion import rng, storage
from bastion.card import CARD as CARD
from bastion.card import Card
from bastion.errors import BastionError
from bastion.forward import in_mode
from bastion.memory import check_memory
from bastion.models import Backbone, Classifier, complexity, models
from bastion.models.classifier import Resize
from bastion.models.meta import meta
from bastion.run import read_card as read_card

OWN = "own"  # in the place of a model's name: a network of the user's, which no name builds
# Largest change of a logit, relative to the largest logit. Other machines change 1e-6, TF32 1e-3; another number of
# heads or another resize 1e-1.
TOLERANCE = 1e-2
# Limits of what a card may ask for: more than any image classifier needs, and far less than fills the memory.
LARGEST_NUMBER = 2**16  # a width, a depth, a number of classes
LARGEST_IMAGE = 2**24  # channels · height · width
LARGEST_BUFFERS = 2**27  # numbers in masks and tables, which are not stored with the weights
MOST_TENSORS = 5_000  # above what the deepest of timm's models have
# So few and so small numbers make no large network, whatever they are of.
_FEW, _SMALL = 50, {"num_classes": 1024, "img_size": 512, "in_chans": 64}


def build(
    spec: Mapping[str, Any] | str,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    shape: tuple[int, int, int] | None = None,
    resize: Resize | None = None,
    seed: int = 0,
    path: str = "model",
) -> Classifier:
    """A classifier with random weights that depend on `seed` alone."""
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    with rng.preserved():
        rng.reseed("model", seed)
        return Classifier(build_backbone(spec, path), mean, std, spec=spec, shape=shape, resize=resize)


def build_backbone(spec: Mapping[str, Any], path: str = "") -> Backbone:
    """Build by the registry; errors raised inside a network because of its options become errors of the spec."""
    try:
        _check_size(spec, path or "model")
        return models.build(spec, path)
    except BastionError:
        raise
    except Exception as error:
        raise BastionError(
            f"{path or 'model'}: {dict(spec)} cannot be built: {error or type(error).__name__}"
        ) from error


def _check_size(spec: Mapping[str, Any], where: str) -> None:
    """Refuse a network that would fill the memory, before any of it is made."""
    numbers = list(_numbers(spec))
    if max(numbers, default=0) > LARGEST_NUMBER:
        raise BastionError(f"{where}: asks for {max(numbers):.6g}; no option may be above {LARGEST_NUMBER}")
    usual = all(max(_numbers(value), default=0) <= _SMALL.get(key, 64) for key, value in spec.items())
    if (usual and len(numbers) <= _FEW) or torch.get_default_device().type == "meta":  # or the caller tries it
        return
    too_deep = f"{where}: asks for a network of more than {MOST_TENSORS:,} tensors; choose a smaller one"
    with rng.preserved(), meta(), _at_most(MOST_TENSORS, too_deep):
        backbone = models.build(spec, where)
    _check_image(backbone.shape, where)
    tensors = (*backbone.network.parameters(), *backbone.network.buffers())
    needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    check_memory(needed, torch.device("cpu"), where, "choose a smaller network")


def _check_image(shape: tuple[int, ...], where: str) -> None:
    if min(shape) < 1 or math.prod(shape) > LARGEST_IMAGE:
        raise BastionError(f"{where}: asks for images of {'×'.join(map(str, shape))}; that is out of bounds")


def save(
    model: Classifier,
    folder: Path,
    about: Mapping[str, Any] | None = None,
    networks: Mapping[str, Tensor] | None = None,
) -> None:
    """Write weights and card. `about` may hold anything, such as the model's origin and accuracy.

    `networks` are the tensors of networks that the training objective trained beside the model.
    """
    if model.spec is None:
        raise BastionError(f"{folder}: this model was not built from a spec, so no card could rebuild it")
    folder, state = Path(folder), model.state_dict()
    card = Card(
        model=model.spec,
        mean=tuple(model.mean.flatten().tolist()),
        std=tuple(model.std.flatten().tolist()),
        shape=model.shape,
        resize=model.resize,
        parameters=complexity.parameters(model),
        weights=digest_tensors(state),
        logits=tuple(tuple(float(f"{logit:.6g}") for logit in row) for row in _fixed_logits(model, folder).tolist()),
        networks=digest_tensors(networks) if networks else None,
        about=dict(about or {}),
    )
    files = {weights_file(folder, card.weights): state}
    if networks and card.networks:
        files[weights_file(folder, card.networks)] = dict(networks)
    storage.remove_leftovers(folder, ".*.tmp")
    for path, tensors in files.items():
        plain = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
        storage.write_bytes(path, encode(plain))
    # The card names the file of its weights, so writing the card replaces the old model by the new one atomically.
    storage.write_json(folder / CARD, card.model_dump(mode="json", exclude={"format"}))
    for other in set(storage.files(folder, "*.safetensors")) - files.keys():
        storage.remove(other)


def convert(folder: Path | str) -> None:
    """Convert a card of format 1 to format 2, which has logits and a checksum."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(load(Path(folder)), Path(folder), read_card(Path(folder)).about)


def weights_file(folder: Path, weights: str) -> Path:
    return folder / f"{weights[:16]}.safetensors"


def load(folder: Path, network: nn.Module | None = None) -> Classifier:
    """The classifier of a folder with weights and card, in eval mode. No code from the folder is executed.

    `network` is for weights of a network of the user's own: it gets them.
    """
    folder = Path(folder)
    card = read_card(folder)
    path = weights_file(folder, card.weights)
    settings: dict[str, Any] = {"mean": card.mean, "std": card.std, "shape": card.shape, "resize": card.resize}
    if card.model.get("name") == OWN:
        model = _around(network, card, folder, settings).eval()
        _check_tensors(model, _shapes(path), path)
    elif network is not None:
        raise BastionError(f"{folder}: a model that bastion builds by itself; load it without `network`")
    else:
        make = partial(build, card.model, **settings, path=f"{folder / CARD}: model")
        _check_fits(card, make, path)
        model = make().eval()
    model.load_state_dict(read_tensors(path))
    if digest(model) != card.weights:
        raise BastionError(f"{path}: damaged, or not the weights of this card; get both again")
    _check_use(model, card, folder)
    return model


def _around(network: nn.Module | None, card: Card, folder: Path, settings: Mapping[str, Any]) -> Classifier:
    """The user's own network as the card says."""
    if network is None:
        raise BastionError(
            f"{folder}: the weights of a network of your own ({card.model.get('class')}); make one, and load them into "
            f"it in Python: bastion.load({str(folder)!r}, network=…)"
        )
    return Classifier(Backbone(network, len(card.logits[0]), card.shape), spec=card.model, **settings)


def load_networks(folder: Path) -> dict[str, Tensor]:
    """Tensors of the networks that the training objective trained beside the model of a folder; {} if it had none."""
    named = read_card(folder).networks
    if named is None:
        return {}
    path = weights_file(folder, named)
    tensors = {name: tensor.clone() for name, tensor in read_tensors(path).items()}  # not memory-mapped
    if digest_tensors(tensors) != named:
        raise BastionError(f"{path}: damaged, or not the networks of this card; get both again")
    return tensors


def _check_fits(card: Card, make: Callable[[], Classifier], path: Path) -> None:
    """Refuse a card whose network does not match its weights, before building it takes time or memory."""
    where = path.with_name(CARD)
    stored = _shapes(path)
    too_deep = f"{where}: model: asks for a network far larger than its weights; get both again"
    with meta(), _at_most(2 * len(stored) + 100, too_deep):  # some layers are built and then replaced
        model = make()
    for shape in (card.shape, (card.shape[0], *model.size)):
        _check_image(shape, str(where))
    if sum(buffer.numel() for buffer in model.buffers()) > LARGEST_BUFFERS:
        raise BastionError(f"{where}: model: its tables and masks would have more than {LARGEST_BUFFERS} numbers")
    _check_tensors(model, stored, path)


def _check_tensors(model: Classifier, stored: Mapping[str, tuple[int, ...]], path: Path) -> None:
    """Has the file just the tensors of the model?"""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    missing, extra = sorted(own.keys() - stored.keys()), sorted(stored.keys() - own.keys())
    if missing or extra:
        raise BastionError(
            f"{path}: not the weights of this model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}"
        )
    for name in own:
        if stored[name] != own[name]:
            raise BastionError(
                f"{path}: '{name}' has shape {stored[name]}, the model needs {own[name]}; was it trained with "
                "another size or number of classes?"
            )


def _numbers(options: Any) -> Iterator[float]:
    """The absolute values of all numbers in the options of a model, however deeply nested."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple):
        for each in options:
            yield from _numbers(each)
    elif isinstance(options, int | float):
        yield abs(options)


@contextmanager
def _at_most(count: int, complaint: str) -> Iterator[None]:
    """Inside, building a network of more than `count` parameter tensors is an error."""
    seen = 0

    def check(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal seen
        seen += 1
        if seen > count:
            raise BastionError(complaint)

    handle = register_module_parameter_registration_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _check_use(model: Classifier, card: Card, folder: Path) -> None:
    """Check that the loaded model computes what it computed when it was saved."""
    where = folder / CARD
    if (tuple(model.mean.flatten().tolist()), tuple(model.std.flatten().tolist())) != (card.mean, card.std):
        raise BastionError(f"{where}: mean and std are not those that are stored with the weights; restore it")
    if card.format == 1:
        warnings.warn(
            f"{where}: of format 1, which has no logits to compare the model with; convert it once with "
            f"bastion.models.checkpoint.convert({str(folder)!r})",
            stacklevel=3,
        )
        return
    found = _fixed_logits(model, folder)
    fits = [len(row) for row in card.logits] == [found.shape[1]] * len(found)
    stored = torch.tensor(card.logits if fits else 0.0)
    largest = stored.abs().max().item()
    if not fits or not torch.allclose(found, stored, rtol=0, atol=TOLERANCE * largest, equal_nan=True):
        raise BastionError(
            f"{where}: the model does not answer as it did when it was saved: the card was edited, or this version of "
            "a library computes otherwise; restore the card"
        )


def _fixed_logits(model: Classifier, where: Path) -> Tensor:
    """(2, classes): logits of two random images that depend only on their shape."""
    x = rng.uniform(0, torch.arange(2), "card", model.shape).to(model.mean)
    try:
        with torch.no_grad(), in_mode(model, training=False):
            logits: Tensor = model(x)
    except (AssertionError, RuntimeError, ValueError) as error:
        size = "×".join(map(str, model.shape))
        raise BastionError(f"{where}: the model does not run on images of {size}: {error}") from error
    return logits.float().cpu()


def read_tensors(path: Path) -> dict[str, Tensor]:
    with _safetensors(path):
        return load_file(path)


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, read from the file's header only."""
    with _safetensors(path), safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118  (no mapping)


@contextmanager
def _safetensors(path: Path) -> Iterator[None]:
    storage.check_safetensors(path)
    try:
        yield
    except SafetensorError as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); get it again, or use an earlier one") from error


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over the names, types, shapes and bytes of all weights."""
    return digest_tensors(model.state_dict())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    return storage.digest({name: _bytes(tensor) for name, tensor in tensors.items()})


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """(…, itemsize) uint8: numpy has no bfloat16."""
    plain = tensor.detach().cpu().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8).numpy()

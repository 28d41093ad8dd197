"""Building classifiers, and keeping them: safetensors for the weights, a JSON card that rebuilds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as encode
from torch import Tensor

from bastion import rng, storage
from bastion.errors import BastionError
from bastion.models import Backbone, Classifier, complexity, models
from bastion.models.classifier import Resize

CARD = "card.json"


class Card(BaseModel):
    """Everything besides the weights that a model is made of."""

    format: Literal[1] = 1
    model: dict[str, Any]  # what the registry builds the backbone from
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]
    resize: Resize | None = None
    parameters: int
    weights: str = Field(pattern="^[0-9a-f]{64}$")  # `digest` of the model; names the file
    about: dict[str, Any] = {}


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
    """What the registry builds; options that go wrong somewhere inside of a network are an error of the spec's too."""
    try:
        return models.build(spec, path)
    except (AssertionError, ArithmeticError, LookupError, RuntimeError, TypeError) as error:
        raise BastionError(
            f"{path or 'model'}: {dict(spec)} cannot be built: {error or type(error).__name__}"
        ) from error


def save(model: Classifier, folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write weights and card. `about` is free: where the model comes from, what it reached."""
    if model.spec is None:
        raise BastionError(f"{folder}: this model was not built from a spec, so no card could rebuild it")
    folder, weights = Path(folder), digest(model)
    state = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.state_dict().items()}
    storage.write_bytes(weights_file(folder, weights), encode(state))
    card = Card(
        model=model.spec,
        mean=tuple(model.mean.flatten().tolist()),
        std=tuple(model.std.flatten().tolist()),
        shape=model.shape,
        resize=model.resize,
        parameters=complexity.parameters(model),
        weights=weights,
        about=dict(about or {}),
    )
    # The card names its weights, so writing it is the one moment at which the new model takes the old one's place.
    storage.write_json(folder / CARD, card.model_dump(mode="json", exclude={"format"}))
    for other in set(folder.glob("*.safetensors")) - {weights_file(folder, weights)}:
        other.unlink(missing_ok=True)


def weights_file(folder: Path, weights: str) -> Path:
    return folder / f"{weights[:16]}.safetensors"


def read_card(folder: Path) -> Card:
    content = storage.read_json(folder / CARD)
    try:
        return Card.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        what = ".".join(map(str, first["loc"])) or "content"
        raise BastionError(
            f"{folder / CARD}: not a model card that this version reads ({what}: {first['msg'].lower()}); restore it"
        ) from error


def load(folder: Path) -> Classifier:
    """The classifier of a folder with weights and card, in eval mode. No code of the folder's is run."""
    folder = Path(folder)
    card = read_card(folder)
    where = f"{folder / CARD}: model"
    model = build(card.model, mean=card.mean, std=card.std, shape=card.shape, resize=card.resize, path=where)
    path = weights_file(folder, card.weights)
    load_weights(model, path)
    if digest(model) != card.weights:
        raise BastionError(f"{path}: damaged, or not the weights that the card tells of; get both again")
    return model.eval()


def load_weights(model: Classifier, path: Path) -> None:
    """Load a safetensors file strictly: every tensor of the model from it, and nothing left over."""
    state = read_tensors(path)
    own = model.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    if missing or extra:
        raise BastionError(
            f"{path}: not the weights of this model: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} unknown {extra[:3]}"
        )
    for name, tensor in state.items():
        if tensor.shape != own[name].shape:
            raise BastionError(
                f"{path}: '{name}' has shape {tuple(tensor.shape)}, the model needs {tuple(own[name].shape)}; "
                "was it trained with another size or number of classes?"
            )
    model.load_state_dict(state)


def read_tensors(path: Path) -> dict[str, Tensor]:
    storage.check_safetensors(path)
    try:
        return load_file(path)
    except SafetensorError as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); get it again, or use an earlier one") from error


def digest(model: torch.nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes of all weights."""
    return digest_tensors(model.state_dict())


def digest_tensors(tensors: Mapping[str, Tensor]) -> str:
    return storage.digest({name: _bytes(tensor) for name, tensor in tensors.items()})


def _bytes(tensor: Tensor) -> np.ndarray[Any, Any]:
    """(…, itemsize) uint8: numpy has no bfloat16."""
    plain = tensor.detach().cpu().contiguous()
    return plain.unsqueeze(-1).view(torch.uint8).numpy()

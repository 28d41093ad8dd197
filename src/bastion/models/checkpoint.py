"""Building classifiers, and keeping them: safetensors for the weights, a JSON card that rebuilds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion import rng, storage
from bastion.errors import BastionError
from bastion.models import Classifier, models
from bastion.models.classifier import Resize

WEIGHTS, CARD = "model.safetensors", "card.json"


class Card(BaseModel):
    """Everything besides the weights that a model is made of."""

    format: Literal[1]
    model: dict[str, Any]  # what the registry builds the backbone from
    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]
    resize: Resize | None = None
    parameters: int
    weights: str  # `digest` of the model
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
        return Classifier(models.build(spec, path), mean, std, spec=spec, shape=shape, resize=resize)


def save(model: Classifier, folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write weights and card. `about` is free: where the model comes from, what it reached."""
    if model.spec is None:
        raise BastionError(f"{folder}: this model was not built from a spec, so no card could rebuild it")
    folder = Path(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with storage.atomic(folder / WEIGHTS) as temporary:
        save_file(weights, temporary)
    card = Card(
        format=1,
        model=model.spec,
        mean=tuple(model.mean.flatten().tolist()),
        std=tuple(model.std.flatten().tolist()),
        shape=model.shape,
        resize=model.resize,
        parameters=sum(p.numel() for p in model.parameters()),
        weights=digest(model),
        about=dict(about or {}),
    )
    storage.write_json(folder / CARD, card.model_dump(mode="json"))


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
    load_weights(model, folder / WEIGHTS)
    if digest(model) != card.weights:
        raise BastionError(f"{folder}: weights and card do not belong together, or one is damaged; get both again")
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
    """SHA-256 over names, shapes and bytes of all weights: what the model computes, not where it came from."""
    parts: list[Any] = []
    for name, tensor in sorted(model.state_dict().items()):
        parts += [
            f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode(),
            tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy(),
        ]
    return storage.sha256(*parts)

"""Building classifiers, and keeping them: safetensors for the weights, a JSON card that rebuilds the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from bastion import rng, storage
from bastion.errors import BastionError
from bastion.models import Classifier, models

WEIGHTS, CARD = "model.safetensors", "card.json"
_FORMAT = 1


def build(
    spec: Mapping[str, Any] | str,
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    seed: int = 0,
    path: str = "model",
) -> Classifier:
    """A classifier with random weights that depend on `seed` alone."""
    spec = {"name": spec} if isinstance(spec, str) else dict(spec)
    with rng.preserved():
        rng.reseed("model", seed)
        return Classifier(models.build(spec, path), mean, std, spec)


def save(model: Classifier, folder: Path, about: Mapping[str, Any] | None = None) -> None:
    """Write weights and card. `about` is free: where the model comes from, what it reached."""
    if model.spec is None:
        raise BastionError(f"{folder}: this model was not built from a spec, so no card could rebuild it")
    folder = Path(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with storage.atomic(folder / WEIGHTS) as temporary:
        save_file(weights, temporary)
    card = {
        "format": _FORMAT,
        "model": model.spec,
        "mean": model.mean.flatten().tolist(),
        "std": model.std.flatten().tolist(),
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": digest(model),
        "about": dict(about or {}),
    }
    storage.write_json(folder / CARD, card)


def load(folder: Path) -> Classifier:
    """The classifier of a folder with weights and card, in eval mode. No code of the folder's is run."""
    folder = Path(folder)
    card = storage.read_json(folder / CARD)
    if not isinstance(card, dict) or card.get("format") != _FORMAT:
        raise BastionError(
            f"{folder / CARD}: not a bastion model card of format {_FORMAT}; was it made by a newer version?"
        )
    try:
        model = build(card["model"], mean=tuple(card["mean"]), std=tuple(card["std"]), path=f"{folder / CARD}: model")
    except KeyError as error:
        raise BastionError(f"{folder / CARD}: the key {error} is missing; restore the card") from error
    load_weights(model, folder / WEIGHTS)
    if digest(model) != card["weights"]:
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

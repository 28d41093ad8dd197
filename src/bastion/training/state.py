"""Training state in one safetensors file: tensors as tensors, the rest as JSON in its header. No pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from bastion import storage
from bastion.errors import BastionError
from bastion.models.checkpoint import digest_tensors
from bastion.progress import console
from bastion.run import Run


def save_state(path: Path, state: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values, atomically."""
    tensors: dict[str, Tensor] = {}
    content = _pack(state, tensors)
    # One entry: safetensors writes several in no fixed order, and equal states should be equal files.
    header = json.dumps({"content": content, "sha256": digest_tensors(tensors)})
    storage.write_bytes(path, save(tensors, {"state": header}))


def load_state(path: Path) -> Any:
    storage.check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            header = json.loads(file.metadata()["state"])
            if header["sha256"] != digest_tensors(tensors):
                raise ValueError("its bytes do not match its SHA-256")
            return _unpack(header["content"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); an earlier checkpoint may be whole") from error


def newest(run: Run) -> Path | None:
    """The newest checkpoint that is whole. Damaged ones are put aside, or they would be taken for the newest."""
    paths = sorted(run.checkpoints.glob("step-*.safetensors"), reverse=True)
    for path in paths:
        try:
            load_state(path)
            return path
        except BastionError as error:
            console.print(f"{error}; trying the one before it", markup=False, style="yellow")
            message = f"{path.name} is damaged; the one before it is used"
            run.log({"kind": "event", "step": 0, "message": message})
            path.rename(path.with_suffix(".damaged"))
    if paths:
        raise BastionError(f"{run.checkpoints}: no checkpoint is whole; restore one, or use another --run")
    return None


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """JSON with tensors replaced by their names; keeps apart what JSON would blur: tuples, keys that are numbers."""
    if isinstance(value, Tensor):
        name = f"{len(tensors):06d}"
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _pack(inner, tensors)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        return {type(value).__name__: [_pack(inner, tensors) for inner in value]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a training state holds tensors and plain values, got {type(value).__name__}")


def _unpack(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    (kind, content), *_ = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _unpack(inner, tensors) for key, inner in content}
    sequence = [_unpack(inner, tensors) for inner in content]
    return tuple(sequence) if kind == "tuple" else sequence

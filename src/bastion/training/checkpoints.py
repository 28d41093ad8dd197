"""Checkpoints: the state of a training that is not a function of recipe and step, in one file with checksums.

Tensors are stored as tensors, the rest as JSON in the header of a safetensors file. The JSON is preceded by its SHA-256
and contains that of the tensors, so that damage is detected. There is no pickle.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from bastion import storage
from bastion.errors import BastionError
from bastion.forward import is_sharded
from bastion.models import Classifier
from bastion.models.checkpoint import digest_tensors
from bastion.recipe import differences
from bastion.run import Run
from bastion.training.distributed import Processes
from bastion.training.log import note

if TYPE_CHECKING:
    from bastion.training.trainer import Trainer

UNSHARDED = StateDictOptions(full_state_dict=True, cpu_offload=True)


def save_checkpoint(trainer: Trainer) -> None:
    """Write the state after the current step; older checkpoints are removed, except for the last few."""
    if trainer.sharded:  # gathered from all processes
        model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=UNSHARDED)
    else:
        model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
    if not trainer.processes.main:
        return
    networks, own = trainer.objective.networks, trainer.objective.optimizer
    state = {
        "of": trainer.identity,
        "computed": _computed(trainer),
        "step": trainer.step,
        "logged": trainer.run.steps_logged(),
        "best": trainer.selection.best,
        "model": model,
        "optimizer": optimizer,
        "ema": trainer.ema.module.state_dict() if trainer.ema else None,
        "objective": networks.state_dict() if networks is not None else {},
        "objective_optimizer": own.state_dict() if own else None,
    }
    write_state(trainer.run.checkpoints / f"step-{trainer.step:09d}.safetensors", state)
    _remove_old(trainer)


def _remove_old(trainer: Trainer) -> None:
    for old in _stored(trainer.run)[: -trainer.recipe.checkpoint.keep]:
        storage.remove(old)


def restore_checkpoint(trainer: Trainer) -> bool:
    """Restore the newest undamaged checkpoint; False if there is none."""
    path = trainer.processes.on_main(lambda: newest(trainer.run))
    if path is None:
        return False
    state = read_state(path)
    try:
        _check_form(state, trainer)
        _restore(trainer, state, path)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BastionError(f"{path}: has not the state of this training ({error}); use another --run") from error
    return True


def _check_form(state: Any, trainer: Trainer) -> None:
    """Raise unless the parts that are not tensors have the types that `save_checkpoint` gives them."""
    if not all(isinstance(state[name], dict) for name in ("of", "model", "optimizer")):
        raise ValueError("of, model and optimizer must be keys and values")
    if type(state["step"]) is not int or not 0 <= state["step"] <= trainer.total_steps:
        raise ValueError(f"step: expected 0 to {trainer.total_steps}")
    if type(state["best"]) not in (int, float):
        raise ValueError("best: expected a number")


def _restore(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    known = {"images": trainer.identity["images"], **state["of"]}  # older checkpoints do not tell of the images
    if known != trainer.identity:
        why = "; ".join(differences(known, trainer.identity))
        raise BastionError(f"{path}: is of other data or another recipe ({why}); use another --run")
    if trainer.sharded:
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(trainer.model, trainer.optimizer, **states, options=UNSHARDED)
    else:
        trainer.model.load_state_dict(state["model"])
        trainer.optimizer.load_state_dict(state["optimizer"])
    if trainer.ema:
        trainer.ema.module.load_state_dict(state["ema"])
    if trainer.objective.networks is not None:
        trainer.objective.networks.load_state_dict(state["objective"])
    if trainer.objective.optimizer:
        trainer.objective.optimizer.load_state_dict(state["objective_optimizer"])
    trainer.step, trainer.selection.best = state["step"], state["best"]
    if trainer.processes.main:
        _remove_old(trainer)  # if the last run was stopped between writing one and removing another
        trainer.run.rewind_log(trainer.step)
        note(trainer.run, trainer.step, f"resumed at step {trainer.step}", quiet=True)
        now = _computed(trainer)
        if changed := differences(state.get("computed", now), now):
            message = "the result will differ from that of an uninterrupted run by rounding"
            note(trainer.run, trainer.step, f"resumed with other means ({'; '.join(changed)}): {message}")


def _computed(trainer: Trainer) -> dict[str, Any]:
    """What the rounding of a result depends on, besides recipe and data."""
    return {
        "device": trainer.device.type,
        "processes": trainer.processes.size,
        "threads": torch.get_num_threads(),
        "torch": str(torch.__version__),
    }


def unsharded(model: Classifier, empty: Classifier, processes: Processes) -> Classifier:
    """The model itself if it is not sharded; else `empty`, which gets its weights in the main process."""
    if not any(is_sharded(parameter) for parameter in model.parameters()):
        return model
    state = get_model_state_dict(model, options=UNSHARDED)
    if processes.main:
        empty.load_state_dict(state)
    return empty


def _stored(run: Run) -> list[Path]:
    """The checkpoints of a run, the oldest first."""
    return storage.files(run.checkpoints, "step-*.safetensors")


def newest(run: Run) -> Path | None:
    """The newest undamaged checkpoint. Later, damaged ones are renamed, so that they do not count among those kept."""
    damaged: list[Path] = []
    for path in reversed(_stored(run)):
        try:
            read_state(path)
        except BastionError:
            damaged.append(path)
            continue
        for each in damaged:
            note(run, 0, f"{each.name} is damaged; the one before it is used")
            each.rename(each.with_suffix(".damaged"))
        return path
    if damaged:
        raise BastionError(f"{run.checkpoints}: no checkpoint is whole; restore one, or use another --run")
    return None


def write_state(path: Path, state: Any) -> None:
    """Write nested dicts, lists and tuples of tensors and plain values, atomically."""
    tensors: dict[str, Tensor] = {}
    content = _pack(state, tensors)
    header = json.dumps({"content": content, "sha256": digest_tensors(tensors)})
    # One entry: safetensors writes several in no fixed order, and equal states should be equal files.
    storage.write_bytes(path, save(tensors, {"state": f"{storage.sha256(header.encode())} {header}"}))


def read_state(path: Path) -> Any:
    storage.check_safetensors(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            text = file.metadata()["state"]
        if not text.startswith("{"):  # older checkpoints have no checksum of the header
            checksum, _, text = text.partition(" ")
            if checksum != storage.sha256(text.encode()):
                raise ValueError("its header does not match its SHA-256")
        header = json.loads(text)
        if header["sha256"] != digest_tensors(tensors):
            raise ValueError("its tensors do not match their SHA-256")
        return _unpack(header["content"], tensors)
    except (SafetensorError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); an earlier checkpoint may be whole") from error


def _pack(value: Any, tensors: dict[str, Tensor]) -> Any:
    """As JSON, with tensors replaced by their names; tuples, and keys that are numbers, are preserved."""
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

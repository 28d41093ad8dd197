"""Checkpoints: all of a training that is not a function of recipe and step, in one file with a checksum. No pickle.

Tensors are stored as tensors, the rest as JSON in the header of a safetensors file. Before the JSON stands its SHA-256,
and in it that of the tensors, so that no byte that matters can change unnoticed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from timm.utils import ModelEmaV3
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from bastion import storage
from bastion.errors import BastionError
from bastion.models import Classifier
from bastion.models.checkpoint import digest_tensors
from bastion.recipe import differences
from bastion.run import Run
from bastion.training.distributed import Processes
from bastion.training.log import note
from bastion.types import Objective

UNSHARDED = StateDictOptions(full_state_dict=True, cpu_offload=True)


class Checkpoints:
    """Saves and restores what is trained. `of`: what a checkpoint must agree on to be resumed."""

    def __init__(
        self,
        run: Run,
        processes: Processes,
        model: Classifier,
        optimizer: Optimizer,
        objective: Objective,
        ema: ModelEmaV3 | None,
        *,
        of: dict[str, Any],
        sharded: bool,
    ) -> None:
        self.run, self.processes = run, processes
        self.model, self.optimizer, self.objective, self.ema = model, optimizer, objective, ema
        self.of, self.sharded = of, sharded

    def save(self, step: int, best: float, keep: int) -> None:
        """Write the state after `step` steps; of older files the last few are kept."""
        if self.sharded:  # every process has a part of it
            model, optimizer = get_state_dict(self.model, self.optimizer, options=UNSHARDED)
        else:
            model, optimizer = self.model.state_dict(), self.optimizer.state_dict()
        if not self.processes.main:
            return
        networks, own = self.objective.networks, self.objective.optimizer
        state = {
            "of": self.of,
            "computed": self.computed(),
            "step": step,
            "best": best,
            "model": model,
            "optimizer": optimizer,
            "ema": self.ema.module.state_dict() if self.ema else None,
            "objective": networks.state_dict() if networks else {},
            "objective_optimizer": own.state_dict() if own else None,
        }
        write_state(self.run.checkpoints / f"step-{step:09d}.safetensors", state)
        for old in stored(self.run)[:-keep]:
            old.unlink(missing_ok=True)

    def computed(self) -> dict[str, Any]:
        """What the last bits of a result depend on besides recipe and data."""
        return {
            "device": self.processes.device.type,
            "processes": self.processes.size,
            "threads": torch.get_num_threads(),
            "torch": str(torch.__version__),
        }

    def restore(self) -> tuple[int, float] | None:
        """Go back to the newest checkpoint that is whole: its step and its best score. None: there is none."""
        path = self.processes.on_main(lambda: newest(self.run))
        if path is None:
            return None
        state = read_state(path)
        if state["of"] != self.of:
            why = "; ".join(differences(state["of"], self.of))
            raise BastionError(f"{path}: is of other data or another recipe ({why}); use another --run")
        if self.sharded:
            states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
            set_state_dict(self.model, self.optimizer, **states, options=UNSHARDED)
        else:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        if self.ema:
            self.ema.module.load_state_dict(state["ema"])
        if self.objective.networks:
            self.objective.networks.load_state_dict(state["objective"])
        if self.objective.optimizer:
            self.objective.optimizer.load_state_dict(state["objective_optimizer"])
        if self.processes.main:
            self.run.rewind_log(state["step"])
            note(self.run, state["step"], f"resumed at step {state['step']}", quiet=True)
            if changed := differences(state.get("computed", self.computed()), self.computed()):
                message = "the result will differ from that of an uninterrupted run by rounding"
                note(self.run, state["step"], f"resumed with other means ({'; '.join(changed)}): {message}")
        return state["step"], state["best"]


def unsharded(model: Classifier, empty: Classifier, processes: Processes) -> Classifier:
    """The model itself if it is in one piece; else `empty` with its weights, in the main process."""
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return model
    state = get_model_state_dict(model, options=UNSHARDED)
    if processes.main:
        empty.load_state_dict(state)
    return empty


def stored(run: Run) -> list[Path]:
    """The files of a run, the oldest first."""
    return sorted(run.checkpoints.glob("step-*.safetensors"))


def newest(run: Run) -> Path | None:
    """The newest checkpoint that is whole. Later, damaged ones are put aside, or they would push out whole ones."""
    damaged: list[Path] = []
    for path in reversed(stored(run)):
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
        if not text.startswith("{"):  # as it did when only tensors had a checksum
            checksum, _, text = text.partition(" ")
            if checksum != storage.sha256(text.encode()):
                raise ValueError("its header does not match its SHA-256")
        header = json.loads(text)
        if header["sha256"] != digest_tensors(tensors):
            raise ValueError("its tensors do not match their SHA-256")
        return _unpack(header["content"], tensors)
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BastionError(f"{path}: corrupt or truncated ({error}); an earlier checkpoint may be whole") from error


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

"""Identity of the model and data that facts belong to. A model is recognised, not hashed: its weights and modules must
be equal, and its logits on images of the data must agree up to rounding."""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import hashlib
import inspect
import itertools
import re
import sys
import sysconfig
import types
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from bastion import forward, rng, storage
from bastion.errors import BastionError
from bastion.forward import device_of, frozen, in_mode, input_gradient
from bastion.models import checkpoint
from bastion.registry import source_text
from bastion.run import Run
from bastion.types import DataSet

IMAGES = 4  # of the data, whose logits and gradients are compared
LOGITS = 2e-3  # relative to the largest: machines, versions and batch sizes differ in rounding
SLOPES = 0.05  # relative to the largest: a ReLU whose input is nearly zero may be on or off by rounding
FILE = "identity.json"

# Attributes of nn.Module itself; parameters and buffers are in the weights, modules are described one by one.
_OWN = set(vars(nn.Module()))
_HOOKS = {name for name in _OWN if name.endswith("_hooks")}
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch(r"_global_(forward|backward)\w*_hooks", name)]
_INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))


@dataclass(frozen=True)
class Identity:
    """Identity of a model on a split of a data set."""

    weights: str
    data: dict[str, str]  # name, split, fingerprint and digest of its images; of its columns, if it has any
    modules: dict[str, dict[str, Any]]  # by their path: class and attributes
    logits: list[list[float]]
    slopes: list[list[float]]

    def matches(self, other: Identity) -> bool:
        return self.acts_as(other) and _same_modules(self.modules, other.modules)

    def acts_as(self, other: Identity) -> bool:
        """Whether weights and data are equal and logits agree: required of a copy in another process."""
        return (
            self.weights == other.weights
            and self.data == other.data
            and _close(self.logits, other.logits, LOGITS)
            and _close(self.slopes, other.slopes, SLOPES)
        )

    def folder(self, run: Run) -> Path:
        """Return the folder of a run with the facts of this model and data; create it if there is none."""
        for folder in storage.files(run.facts, "*"):
            if storage.is_file(folder / FILE) and self.matches(read_identity(folder)):
                return folder
        name = storage.fingerprint([self.weights, self.data, self.modules])
        for number in itertools.count(1):  # processes that do this at once all take the same one
            folder = run.facts / (name if number == 1 else f"{name}-{number}")
            if not storage.is_file(folder / FILE):
                storage.write_json(folder / FILE, dataclasses.asdict(self))
                return folder
            if self.matches(read_identity(folder)):
                return folder
        raise AssertionError


def read_identity(folder: Path) -> Identity:
    try:
        return Identity(**storage.read_json(folder / FILE))
    except TypeError as error:
        raise BastionError(f"{folder / FILE}: not an identity of facts; remove {folder} and measure again") from error


def identify(model: nn.Module, data: DataSet, split: str) -> Identity:
    images = data.split(split)
    tree = {id(module): module for module in model.modules()}
    modules = {name: _describe_module(module, dict(tree)) for name, module in model.named_modules()}  # before it runs
    modules[""] |= _global_hooks(dict(tree))
    logits, slopes = _logits_and_slopes(model, images.batch(range(min(IMAGES, len(images)))).x)
    columns = {"columns": storage.fingerprint(list(data.columns))} if data.columns is not None else {}
    return Identity(
        weights=checkpoint.digest(model),
        data={"name": data.name, "split": split, "fingerprint": data.fingerprint, "digest": images.digest(), **columns},
        modules=modules,
        logits=logits.tolist(),
        slopes=slopes.tolist(),
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run on one thread, so that sums are added in the same order on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _logits_and_slopes(model: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits (B, K) and the slope of the largest logit along four fixed directions (B, 4)."""
    x = images.to(device_of(model)).requires_grad_()
    with torch.enable_grad(), in_mode(model, training=False), rng.preserved(), one_thread(), frozen(model):
        rng.reseed("identity")
        logits = forward.logits(model, x)
        try:
            gradient = input_gradient(logits.amax(1), x)
        except RuntimeError:  # a model that cannot be differentiated can still be measured
            gradient = torch.zeros_like(x)
    directions = rng.signs(0, torch.arange(4), "identity", images.shape[1:]).flatten(1).double()
    return logits.detach().cpu().double(), gradient.flatten(1).cpu().double() @ directions.T


def _close(ours: list[list[float]], theirs: list[list[float]], tolerance: float) -> bool:
    a, b = np.array(ours), np.array(theirs)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return False
    a, b = np.nan_to_num(a, posinf=0, neginf=0), np.nan_to_num(b, posinf=0, neginf=0)
    return bool(np.abs(a - b).max(initial=0) <= tolerance * np.abs(a).max(initial=0))


def _same_modules(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(_same_module(ours[name], theirs[name]) for name in ours)


def _same_module(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Compare two modules, ignoring attributes that an upgrade of a library may have added."""
    names = ours.keys() | theirs.keys()
    if "text" not in names:
        added = {name for name in ours.keys() ^ theirs.keys() if not isinstance(ours.get(name, theirs.get(name)), dict)}
        names -= added - _HOOKS
    return all(ours.get(name) == theirs.get(name) for name in names)


def _describe_module(module: nn.Module, seen: dict[int, Any]) -> dict[str, Any]:
    """Return its class, a hash of the class's source unless that is installed, and its attributes besides weights."""
    state = {name: value for name, value in vars(module).items() if name not in _OWN}
    state |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}  # not in the weights
    hooks = {name: list(vars(module)[name].values()) for name in _HOOKS if vars(module).get(name)}
    if isinstance(module, torch.jit.ScriptModule):  # its attributes are handles of C++ objects
        state = {"code": getattr(module, "code", None)}
    described = {}
    for name, value in {**state, **hooks}.items():
        try:
            described[name] = _plain(value, seen)
        except RecursionError:  # such as a list that holds itself
            described[name] = _unknown(value)
    return {**_describe_code(type(module), seen), **described}


def _global_hooks(seen: dict[int, Any]) -> dict[str, Any]:
    """Describe hooks that run with every module."""
    hooks = {name: list(vars(nn.modules.module)[name].values()) for name in _GLOBAL_HOOKS}
    return {name: {"hooks": _plain(each, seen)} for name, each in hooks.items() if each}


def _describe_code(kind: Any, seen: dict[int, Any]) -> dict[str, Any]:
    """Return the name of a class or function, a hash of its and its bases' source that is not installed, and what that
    code uses besides."""
    name = f"{kind.__module__}.{kind.__qualname__}".replace("__mp_main__", "__main__")  # a script's, in a worker
    own = [each for each in getattr(kind, "__mro__", (kind,)) if not _is_installed(each)]
    text = "\0".join(source_text(each) for each in own)
    described: dict[str, Any] = {"class": name}
    described |= {"text": hashlib.sha256(text.encode()).hexdigest()[:16]} if own else {}
    uses = {} if id(kind) in seen and isinstance(kind, type) else _uses(kind, seen)
    return described | ({"uses": uses} if uses else {})


def _uses(kind: Any, seen: dict[int, Any]) -> dict[str, Any]:
    """Describe what a function, or the forward pass of a class, uses that its text does not show: globals, variables
    of an enclosing function, class attributes, and methods that were replaced, also those of a library's class."""
    if isinstance(kind, types.FunctionType):
        return {name: _plain(value, seen) for name, value in _globals(kind).items()}
    seen[id(kind)] = kind  # it may use itself
    members, found = _own_members(kind), dict[str, Any]()
    wanted = ["forward", "__call__"]
    for name in wanted:  # which grows
        for owner, value in members.get(name, ()):
            if isinstance(value, types.FunctionType) and _is_in_text(value, owner):
                used = _globals(value) | _enclosing(value)
                found |= {each: _plain(used[each], seen) for each in used}
                wanted += [each for each in _names(value.__code__)[1] if each not in wanted]
            elif not _is_installed_code(value):
                found[name] = _plain(value, seen)
    return found


def _own_members(kind: type) -> dict[str, list[tuple[type, Any]]]:
    """Return what classes that are not installed define, and functions that were put into those that are, by name."""
    members: dict[str, list[tuple[type, Any]]] = {}
    for owner in kind.__mro__:
        own = dict(vars(owner))
        if _is_installed(owner):
            functions = {name: each for name, each in own.items() if isinstance(each, types.FunctionType)}
            foreign = {name: each for name, each in functions.items() if each.__module__ != owner.__module__}
            own = {name: each for name, each in foreign.items() if not _is_installed(each)}
        for name, value in own.items():
            members.setdefault(name, []).append((owner, _unwrapped(value)))
    return members


def _unwrapped(value: Any) -> Any:
    """Return the function of a method, a property or a decorated function."""
    plain = getattr(value, "__func__", getattr(value, "fget", value))
    return inspect.unwrap(plain) if callable(plain) else plain


def _is_in_text(function: types.FunctionType, owner: type) -> bool:
    return function.__module__ == owner.__module__ and function.__qualname__.startswith(f"{owner.__qualname__}.")


def _globals(function: types.FunctionType) -> dict[str, Any]:
    known = function.__globals__
    values = {name: known[name] for name in _names(function.__code__)[0] if name in known}
    return {name: value for name, value in values.items() if not _is_installed_code(value)}


def _enclosing(method: types.FunctionType) -> dict[str, Any]:
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    values = {name: cell.cell_contents for name, cell in cells.items() if name != "__class__"}
    return {name: value for name, value in values.items() if not _is_installed_code(value)}


def _names(code: types.CodeType) -> tuple[list[str], list[str]]:
    """Return the names of globals that code reads, except those that it sets, such as a counter; and of attributes."""
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    by_kind: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "STORE_GLOBAL": set()}
    for each in dis.get_instructions(code):
        if each.opname in by_kind:
            by_kind[each.opname].add(each.argval)
    used = by_kind["LOAD_GLOBAL"].union(*(names for names, _ in inner))
    return sorted(used - by_kind["STORE_GLOBAL"]), sorted({*code.co_names}.union(*(names for _, names in inner)))


def _is_installed_code(value: Any) -> bool:
    if isinstance(value, type | types.FunctionType):
        return _is_installed(value)
    return isinstance(value, types.ModuleType | types.BuiltinFunctionType)


def _is_installed(kind: Any) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if kind.__module__.startswith("bastion.") or kind.__module__ == "builtins":
        return True
    return file is not None and _is_in_site_packages(file)


@functools.cache
def _is_in_site_packages(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_INSTALLED)


def _plain(value: Any, seen: dict[int, Any]) -> Any:
    """Convert any attribute of a module to JSON values that differ if the attribute does.

    `seen` has the objects that are described already, by their id: one that holds itself is described once.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return {"tensor": checkpoint.digest_tensors({"": value})}
    if isinstance(value, np.ndarray):
        plain = not value.dtype.hasobject
        return {"array": storage.digest({"": np.ascontiguousarray(value)}) if plain else _plain(value.tolist(), seen)}
    if isinstance(value, set | frozenset):
        return [_plain(each, seen) for each in sorted(value, key=repr)]
    if isinstance(value, list | tuple):
        return [_plain(each, seen) for each in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(each, seen) for key, each in value.items()}
    if isinstance(value, functools.partial):
        return [_plain(part, seen) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, types.MethodType):
        return {"method": _plain(value.__func__, seen), "of": _plain(value.__self__, seen)}
    if isinstance(value, type):
        return _describe_code(value, seen)
    if isinstance(value, torch.fx.Graph):
        return {"graph": str(value)}
    if id(value) in seen:
        return {"is": type(value).__qualname__, "seen": list(seen).index(id(value))}
    seen[id(value)] = value
    if isinstance(value, nn.Module):
        seen |= {id(module): module for module in value.modules()}
        modules = {name: _describe_module(module, seen) for name, module in value.named_modules()}
        return {"modules": modules, "weights": checkpoint.digest(value)}
    if isinstance(value, types.FunctionType):
        held = [*(cell.cell_contents for cell in value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
        return {**_describe_code(value, seen), "holds": [_plain(each, seen) for each in held]}
    return {"is": type(value).__qualname__, **_content(value, seen)}


def _content(value: Any, seen: dict[int, Any]) -> dict[str, Any]:
    """Describe an object by what pickle would store of it; without attributes, by a repr that tells all."""
    text = repr(value)
    if object.__getstate__(value) is None and not re.search(r" at 0x|\.\.\.", text, re.IGNORECASE):
        return {"repr": text}
    try:
        reduced = value.__reduce_ex__(4)
    except Exception:  # pickle's ways to refuse are many
        return _unknown(value)
    if isinstance(reduced, str):  # a global of this name
        return {"repr": reduced}
    make, arguments, state, *items = reduced if len(reduced) > 2 else (*reduced, None)
    if make is copyreg.__newobj__ and arguments == (type(value),) and not any(items):  # type: ignore[attr-defined]
        return {"holds": _plain(state, seen)}
    return {"holds": _plain([make, arguments, state, *map(list, filter(None, items))], seen)}


def _unknown(value: Any) -> dict[str, Any]:
    """Describe what cannot be compared: it equals nothing, so facts are measured anew."""
    warnings.warn(
        f"measure: the model holds a {type(value).__qualname__}, which cannot be compared: stored facts of this model "
        "are not used, and all is measured anew",
        stacklevel=2,
    )
    return {"unknown": uuid.uuid4().hex}

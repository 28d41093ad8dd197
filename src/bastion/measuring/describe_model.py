"""What a model is besides its weights: classes, attributes, hooks, and what its code uses, as values of JSON."""

from __future__ import annotations

import copyreg
import dis
import functools
import hashlib
import inspect
import re
import sys
import sysconfig
import types
import uuid
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from bastion import storage
from bastion.models import checkpoint
from bastion.registry import source_text

# Attributes of nn.Module itself; parameters and buffers are in the weights, modules are described one by one.
_OWN = set(vars(nn.Module()))
_HOOKS = {name for name in _OWN if name.endswith("_hooks")}
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch(r"_global_(forward|backward)\w*_hooks", name)]
_INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))


def describe_modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe each module by its name; hooks that run with every module are of the first one."""
    tree = {id(module): module for module in model.modules()}
    modules = {name: _describe_module(module, dict(tree)) for name, module in model.named_modules()}
    modules[""] |= _global_hooks(dict(tree))
    return modules


def same_modules(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
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

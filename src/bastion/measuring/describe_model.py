"""What a model is besides its weights, and a plug-in besides its settings: classes, attributes, hooks, and what code
uses, as values of JSON."""

from __future__ import annotations

import copyreg
import dataclasses
import dis
import functools
import hashlib
import itertools
import re
import sys
import sysconfig
import types
import uuid
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.fx
from torch import Tensor, nn

from bastion import storage
from bastion.models import checkpoint
from bastion.registry import Registry, defaults, module_name, source_text
from bastion.run import version
from bastion.types import Attack, Probe, Study

# Attributes of nn.Module itself; parameters and buffers are in the weights, modules are described one by one.
_OWN = set(vars(nn.Module()))
_HOOKS = {name for name in _OWN if name.endswith("_hooks")}
_GLOBAL_HOOKS = [name for name in vars(nn.modules.module) if re.fullmatch(r"_global_(forward|backward)\w*_hooks", name)]
_FORWARD = ("forward", "__call__")
_INSTALLED = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))
_BUILT_IN = {"bastion", *sys.builtin_module_names}


def describe_modules(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Describe each module by its name; hooks that run with every module are of the first one."""
    tree = list(model.modules())
    called = _called({type(module) for module in tree})
    modules = {name: Description(tree, called).module(module) for name, module in model.named_modules()}
    modules[""] |= Description(tree, called).global_hooks()
    return modules


def library_versions(model: nn.Module) -> dict[str, str]:
    """Return the versions of the libraries that the classes of its modules are from."""
    installed = {type(module).__module__.partition(".")[0] for module in model.modules() if _is_installed(type(module))}
    return {name: version(name) for name in sorted(installed)}


def describe_plugins(built: Any) -> dict[str, Any]:
    """Describe, of a plug-in and of those among its settings, what their code uses besides its text; of installed ones
    the version."""
    described: dict[str, Any] = {}
    for kind in sorted({type(each) for each in _with_settings(built)}, key=_name):
        top = kind.__module__.partition(".")[0]
        if not _is_installed(kind):
            described[_name(kind)] = Description(strict=False).uses(kind)
        elif top != "bastion" and issubclass(kind, Attack | Probe | Study):
            described[_name(kind)] = [version(name) for name in metadata.packages_distributions().get(top, [])]
    return {name: used for name, used in described.items() if used}


def _with_settings(thing: Any) -> Iterator[Any]:
    """Yield an object and the values of its settings, at any depth."""
    yield thing
    inner: Iterable[Any] = thing if isinstance(thing, list | tuple) else ()
    if isinstance(thing, Mapping):
        inner = thing.values()
    elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        inner = [getattr(thing, each.name) for each in dataclasses.fields(thing)]
    for each in inner:
        yield from _with_settings(each)


def same_modules(ours: Mapping[str, Any], theirs: Mapping[str, Any], upgraded: Collection[str]) -> bool:
    """Compare descriptions of modules; `upgraded` libraries may have added attributes to modules of their classes."""
    return ours.keys() == theirs.keys() and all(_same_module(ours[name], theirs[name], upgraded) for name in ours)


def _same_module(ours: Mapping[str, Any], theirs: Mapping[str, Any], upgraded: Collection[str]) -> bool:
    names = ours.keys() | theirs.keys()
    if "text" not in names and ours["class"].partition(".")[0] in upgraded:
        added = {name for name in ours.keys() ^ theirs.keys() if not isinstance(ours.get(name, theirs.get(name)), dict)}
        names -= added - _HOOKS
    return all(name in ours and name in theirs and ours[name] == theirs[name] for name in names)


def without_defaults(modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return modules that were described when blocks still had the fields with their defaults, as they are now."""
    return {
        name: described | {"_blocks": [_without_defaults(each) for each in described["_blocks"]]}
        if isinstance(described.get("_blocks"), list)
        else described
        for name, described in modules.items()
    }


def _without_defaults(block: Any) -> Any:
    if not isinstance(block, dict) or block.get("is") != "Blocks":
        return block
    return {"is": "Blocks", "holds": {name: value for name, value in block["holds"].items() if value not in ("", None)}}


class Description:
    """Describes values by values of JSON that differ if they do.

    One walk over all that is reached: what is met again is described by its number only, so that an object may hold
    itself.
    """

    def __init__(self, known: Iterable[Any] = (), called: Iterable[str] = _FORWARD, *, strict: bool = True) -> None:
        """`known`: what is described elsewhere; `called`: names of the methods that forward passes call.

        Strict: what cannot be compared, such as a lock, equals nothing. Else it equals others of its class.
        """
        self._called, self._strict = called, strict
        self._seen = {id(each): each for each in known}  # holds them, as the id of what is gone is given anew
        self._read: set[tuple[int, str]] = set()  # names of a Python module that are described

    def module(self, module: nn.Module) -> dict[str, Any]:
        """Return its class, a hash of its source unless that is installed, and its attributes besides weights."""
        state = {name: value for name, value in vars(module).items() if name not in _OWN}
        state |= {name: module._buffers[name] for name in module._non_persistent_buffers_set}  # not in the weights
        hooks = {name: list(vars(module)[name].values()) for name in _HOOKS if vars(module).get(name)}
        if isinstance(module, torch.jit.ScriptModule):  # its attributes are handles of C++ objects
            state = {"code": getattr(module, "code", None)}
        described: dict[str, Any] = {}
        for attribute, value in {**state, **hooks}.items():
            name = f"self.{attribute}" if attribute in ("class", "text", "uses") else attribute
            try:
                described[name] = self.value(value)
            except RecursionError:  # such as a list that holds itself
                described[name] = self._unknown(value)
        try:
            return {**self.code(type(module)), **described}
        except RecursionError:  # hundreds of functions that call each other
            return {"class": _name(type(module)), "text": self._unknown(module), **described}

    def global_hooks(self) -> dict[str, Any]:
        """Describe hooks that run with every module."""
        hooks = {name: list(vars(nn.modules.module)[name].values()) for name in _GLOBAL_HOOKS}
        return {name: {"hooks": self.value(each)} for name, each in hooks.items() if each}

    def code(self, kind: Any) -> dict[str, Any]:
        """Return the name of a class or function, a hash of its and its bases' source that is not installed, and what
        that code uses besides."""
        own = [each for each in getattr(kind, "__mro__", (kind,)) if not _is_installed(each)]
        described = {"class": _name(kind)} | ({"text": _hash("\0".join(map(source_text, own)))} if own else {})
        uses = self.uses(kind)
        return described | ({"uses": uses} if uses else {})

    def uses(self, kind: Any) -> dict[str, Any]:
        """Describe what a function, or the methods of a class, use that their text does not show: globals, variables of
        an enclosing function, class attributes, and methods that were replaced, also those of a library's class.

        Of a module the methods are those that its forward pass calls.
        """
        if isinstance(kind, types.FunctionType):
            return self._globals(kind)
        if id(kind) in self._seen:
            return {}
        self._seen[id(kind)] = kind
        members, found = _own_members(kind), dict[str, Any]()
        wanted = list(self._called) if issubclass(kind, nn.Module) else _methods(members)
        for name in wanted:  # which grows
            for owner, value in members.get(name, ()):
                if isinstance(value, types.FunctionType) and _is_in_text(value, owner):
                    _add(found, {**self._globals(value), **self._enclosing(value)}, owner)
                    wanted += [each for each in _names(value.__code__).attributes if each not in wanted]
                elif not _is_installed_code(value):
                    _add(found, {name: self.value(value)}, owner)
        return found

    def _globals(self, function: types.FunctionType) -> dict[str, Any]:
        names = _names(function.__code__)
        described = self._values(self._unread(function.__globals__, names.globals), names.attributes)
        return described | self._values(_imported(function), names.attributes)

    def _enclosing(self, method: types.FunctionType) -> dict[str, Any]:
        cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
        values = {name: cell.cell_contents for name, cell in cells.items() if name != "__class__"}
        return self._values(values, _names(method.__code__).attributes)

    def _values(self, values: Mapping[str, Any], attributes: Collection[str]) -> dict[str, Any]:
        """Describe values that code uses, except installed code; of Python modules, the attributes that it may read."""
        described: dict[str, Any] = {}
        for name, value in values.items():
            if isinstance(value, types.ModuleType):
                described |= {name: used} if (used := self._python_module(value, attributes)) else {}
            elif not _is_installed_code(value):
                described[name] = self.value(value)
        return described

    def _python_module(self, module: types.ModuleType, names: Collection[str]) -> dict[str, Any]:
        """Describe these attributes and the text of a module; of an installed one, only code that was put into it."""
        values = self._unread(vars(module), names)
        if _is_installed(module):
            kinds = types.ModuleType | types.FunctionType | type
            return self._values({name: each for name, each in values.items() if isinstance(each, kinds)}, names)
        return {"text": _hash(source_text(module)), "uses": self._values(values, names)}

    def _unread(self, namespace: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Return what these names stand for in a Python module, except those that are described already."""
        new = [name for name in names if name in namespace and (id(namespace), name) not in self._read]
        self._read |= {(id(namespace), name) for name in new}
        return {name: namespace[name] for name in new}

    def value(self, value: Any) -> Any:
        """Describe what a model or its code holds; of an object of a class that is not installed, also the class."""
        described, kind = self._content(value), type(value)
        if isinstance(value, type | nn.Module) or _is_installed(kind):
            return described
        return {**({"class": _name(kind)} if id(kind) in self._seen else self.code(kind)), "holds": described}

    def _content(self, value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, Tensor):
            return {"tensor": checkpoint.digest_tensors({"": value})}
        if isinstance(value, np.ndarray):
            plain = not value.dtype.hasobject
            return {"array": storage.digest({"": np.ascontiguousarray(value)}) if plain else self.value(value.tolist())}
        if isinstance(value, set | frozenset):
            return [self.value(each) for each in sorted(value, key=repr)]
        if isinstance(value, list | tuple):
            return [self.value(each) for each in value]
        if isinstance(value, Mapping):
            return {str(key): self.value(each) for key, each in value.items()}
        if isinstance(value, functools.partial):
            return [self.value(part) for part in (value.func, value.args, value.keywords)]
        if isinstance(value, types.MethodType):
            return {"method": self.value(value.__func__), "of": self.value(value.__self__)}
        if isinstance(value, types.ModuleType):
            return {"module": value.__name__, **self._python_module(value, _public(value))}
        if isinstance(value, type):
            return self.code(value)
        if isinstance(value, torch.fx.Graph):
            return {"graph": str(value)}
        if id(value) in self._seen:
            return {"is": type(value).__qualname__, "seen": list(self._seen).index(id(value))}
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._seen |= {id(module): module for module in value.modules()}
            modules = {name: self.module(module) for name, module in value.named_modules()}
            return {"modules": modules, "weights": checkpoint.digest(value)}
        if isinstance(value, types.FunctionType):
            return self._function(value)
        described = {"is": type(value).__qualname__, **self._object(value)}
        wraps = "__wrapped__" in getattr(value, "__dict__", ())  # as what functools.cache makes
        return described | ({"wraps": self.value(value.__wrapped__)} if wraps else {})

    def _function(self, function: types.FunctionType) -> dict[str, Any]:
        described, attributes = self.code(function), _names(function.__code__).attributes
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        held: list[Any] = [
            self._python_module(each, attributes) if isinstance(each, types.ModuleType) else self.value(each)
            for each in cells
        ]
        held += [self.value(function.__defaults__), self.value(function.__kwdefaults__)]
        own = {} if _is_installed(function) else vars(function)
        return {**described, "holds": held} | ({"attributes": self.value(own)} if own else {})

    def _object(self, value: Any) -> dict[str, Any]:
        """Describe an object by what pickle would store of it; without attributes, by a repr that tells all."""
        text = repr(value)
        if object.__getstate__(value) is None and not re.search(r" at 0x|\.\.\.", text, re.IGNORECASE):
            return {"repr": text}
        try:
            reduced = value.__reduce_ex__(4)
        except Exception:  # pickle's ways to refuse are many
            return self._unknown(value)
        if isinstance(reduced, str):  # a global of this name
            return {"repr": reduced}
        make, arguments, state, *items = reduced if len(reduced) > 2 else (*reduced, None)
        if make is copyreg.__newobj__ and arguments == (type(value),) and not any(items):  # type: ignore[attr-defined]
            return {"holds": self.value(_unusual(value, state))}
        return {"holds": self.value([make, arguments, state, *map(list, filter(None, items))])}

    def _unknown(self, value: Any) -> dict[str, Any]:
        """Describe what cannot be compared."""
        if not self._strict:
            return {"unknown": type(value).__qualname__}
        warnings.warn(
            f"measure: the model holds a {type(value).__qualname__}, which cannot be compared: stored facts of this "
            "model are not used, and all is measured anew",
            stacklevel=2,
        )
        return {"unknown": uuid.uuid4().hex}


def _unusual(value: Any, state: Any) -> Any:
    """Return the state of an object; of bastion's dataclasses without fields that have their default, so that a field
    that is added later makes no other model."""
    if not (
        isinstance(state, dict) and dataclasses.is_dataclass(value) and module_name(type(value)).startswith("bastion.")
    ):
        return state
    usual = defaults(type(value))
    return {name: each for name, each in state.items() if not (name in usual and _equal(each, usual[name]))}


def _equal(ours: Any, theirs: Any) -> bool:
    return ours is theirs or (isinstance(ours, bool | int | float | str | tuple) and bool(ours == theirs))


def _called(kinds: Iterable[type]) -> list[str]:
    """Return names of the methods that forward passes call, each of any class."""
    members, called = [_own_members(kind) for kind in kinds], [*_FORWARD]
    for name in called:  # which grows
        for _, value in itertools.chain.from_iterable(each.get(name, ()) for each in members):
            if isinstance(value, types.FunctionType):
                called += [each for each in _names(value.__code__).attributes if each not in called]
    return sorted(called)


def _own_members(kind: type) -> dict[str, list[tuple[type, Any]]]:
    """Return what classes that are not installed define, and functions that were put into those that are, by name."""
    members: dict[str, list[tuple[type, Any]]] = {}
    for owner in kind.__mro__:
        own = dict(vars(owner))
        if _is_installed(owner):
            functions = {name: each for name, each in own.items() if isinstance(each, types.FunctionType)}
            own = {name: each for name, each in functions.items() if not _is_installed(each)}
        for name, value in own.items():
            members.setdefault(name, []).extend((owner, each) for each in _layers(value))
    return members


def _layers(value: Any) -> list[Any]:
    """Return the function of a method or property, and what it decorates; anything else as it is."""
    if isinstance(value, functools.cached_property):
        value = value.func
    layers = [getattr(value, "__func__", getattr(value, "fget", value))]
    while isinstance(layers[-1], types.FunctionType) and hasattr(layers[-1], "__wrapped__"):
        layers.append(layers[-1].__wrapped__)
    return layers


def _methods(members: Mapping[str, Iterable[tuple[type, Any]]]) -> list[str]:
    """Return names of methods, except those that every object has, such as `__init__`."""
    functions = [
        name for name, found in members.items() if any(isinstance(each, types.FunctionType) for _, each in found)
    ]
    return [name for name in functions if name not in vars(object)]


def _add(found: dict[str, Any], described: Mapping[str, Any], owner: type) -> None:
    """Add descriptions by name; a name that stands for something else already gets that of the class."""
    for name, value in described.items():
        found[name if found.get(name, value) == value else f"{_name(owner)}.{name}"] = value


def _is_in_text(function: types.FunctionType, owner: type) -> bool:
    return module_name(function) == owner.__module__ and function.__qualname__.startswith(f"{owner.__qualname__}.")


def _imported(function: types.FunctionType) -> dict[str, types.ModuleType]:
    """Return the Python modules that a function imports when it is called, if they are imported by now."""
    package = function.__globals__.get("__package__") or ""
    above = ["", *itertools.accumulate(package.split("."), "{}.{}".format)]  # a relative import is of one of these
    full = [f"{each}.{name}".strip(".") for name in _names(function.__code__).imports for each in above]
    return {name: sys.modules[name] for name in full if name in sys.modules}


class _Names(NamedTuple):
    """Names that code reads: of globals, except those that it sets, such as a counter; of attributes; of modules."""

    globals: list[str]
    attributes: list[str]
    imports: list[str]


def _names(code: types.CodeType) -> _Names:
    inner = [_names(each) for each in code.co_consts if isinstance(each, types.CodeType)]
    by_kind: dict[str, set[str]] = {"LOAD_GLOBAL": set(), "STORE_GLOBAL": set(), "IMPORT_NAME": set()}
    for each in dis.get_instructions(code):
        if each.opname in by_kind:
            by_kind[each.opname].add(each.argval)
    used = by_kind["LOAD_GLOBAL"].union(*(names.globals for names in inner))
    return _Names(
        sorted(used - by_kind["STORE_GLOBAL"]),
        sorted({*code.co_names}.union(*(names.attributes for names in inner))),
        sorted(by_kind["IMPORT_NAME"].union(*(names.imports for names in inner))),
    )


def _public(module: types.ModuleType) -> list[str]:
    return sorted(name for name in vars(module) if not name.startswith("__"))


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}".replace("__mp_main__", "__main__")  # a script's, in a worker


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_installed_code(value: Any) -> bool:
    if isinstance(value, type | types.FunctionType):
        return _is_installed(value)
    return isinstance(value, types.BuiltinFunctionType | Registry)


def _is_installed(code: Any) -> bool:
    """Whether a class, function or Python module is bastion's or a library's."""
    name = module_name(code)
    top = name.partition(".")[0]
    files = (getattr(sys.modules.get(each), "__file__", None) for each in (name, top))  # parts of torch._C have none
    file = next(filter(None, files), None)
    return top in _BUILT_IN or (file is not None and _is_in_site_packages(file))


@functools.cache
def _is_in_site_packages(file: str) -> bool:
    return str(Path(file).resolve()).startswith(_INSTALLED)

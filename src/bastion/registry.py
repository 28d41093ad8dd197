"""Registries of plug-ins by name. A plug-in is one file in the right folder, with no edit elsewhere.

    attacks = Registry("attack", __name__, Attack)        # in bastion/attacks/__init__.py

    @attacks.register("pgd")                               # in bastion/attacks/pgd.py
    @settings
    class PGD(Attack): ...

    attacks.build({"name": "pgd", "steps": 20})            # from a recipe; every value is checked

Plug-ins may also live outside the package: `$BASTION_PLUGINS/attacks/mine.py` is found the same way, and so is what
installed packages name as an entry point of the group `bastion.plugins`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

from pydantic import PlainValidator, WithJsonSchema

from bastion import plugins
from bastion.errors import BastionError, did_you_mean, shown
from bastion.recipe_yaml import read_spec
from bastion.settings import PLUGIN, REGISTRY, SettingsError, arguments_schema, built_from_specs, check_arguments

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[T]):
    """All factories of one kind of plug-in."""

    def __init__(self, kind: str, package: str, product: type[T], finish: Callable[..., T] | None = None) -> None:
        """`finish` is applied to every product; a spec may set its keywords, unless the factory has them."""
        self.kind = kind
        self.package = package
        self._factories: dict[str, Callable[..., T]] = {}
        self._finish = finish or _unchanged
        self._discovered = False
        self._product = product
        # A setting of this type may be given as a spec, which is then built.
        built_from_specs[product] = Annotated[Any, PlainValidator(self._accept), WithJsonSchema({REGISTRY: kind})]

    def register(self, name: str) -> Callable[[F], F]:
        """Register a factory. A name that ends in `/*` matches every name below it, the factory's first argument."""

        def add(factory: F) -> F:
            known = self._factories.get(name, factory)
            if (known.__module__, known.__qualname__) != (factory.__module__, factory.__qualname__):
                raise BastionError(
                    f"{self.kind} '{name}' is defined twice: in {known.__module__} and in {factory.__module__}"
                )
            if inspect.isclass(factory):
                self._check_class(factory, name)
                setattr(factory, PLUGIN, name)
            self._factories[name] = factory
            return factory

        return add

    def _check_class(self, factory: type, name: str) -> None:
        """Raise at registration if a class is of the wrong kind or abstract."""
        where = f"{self.kind} '{name}' in {factory.__module__}"
        if not issubclass(factory, self._product):
            raise BastionError(
                f"{where}: {factory.__name__} is not {_a(self._product)}; subclass bastion.types."
                f"{self._product.__name__}, or register it with what it is"
            )
        if missing := sorted(getattr(factory, "__abstractmethods__", ())):
            raise BastionError(f"{where}: {factory.__name__} has no {', '.join(missing)}; write it")

    def names(self) -> list[str]:
        self._discover()
        return sorted(self._factories)

    def factory(self, name: str, path: str = "") -> Callable[..., T]:
        self._discover()
        if name in self._factories:
            return self._factories[name]
        family, _, rest = name.partition("/")
        if rest and f"{family}/*" in self._factories:
            return functools.partial(self._factories[f"{family}/*"], rest)
        near = did_you_mean(name, self._factories) or f"; see `bastion list {self.package.rpartition('.')[2]}`"
        message = f"unknown {self.kind} '{name}'{near}"
        raise SettingsError(path, ["name"], message) if path else BastionError(message)

    def by_class_name(self, name: str) -> Any:
        """Return the class of a plug-in, for `__getattr__` of a package: `from bastion.attacks import PGD`.

        A plug-in that is a function goes by its name in capitals: `FGSM`.
        """
        if not name.startswith("_"):
            self._discover()
            for known, factory in self._factories.items():
                own = factory.__name__ if inspect.isclass(factory) else known.replace("-", "").upper()
                if own == name:
                    return factory
        raise AttributeError(f"module '{self.package}' has no attribute '{name}'")

    def check(self, spec: Any, path: str = "", **given: Any) -> None:
        """Raise what `build` would raise about names, keys and types, without the cost of building."""
        if not isinstance(spec, self._product):
            self._arguments(spec, path, given)

    def build(self, spec: Any, path: str = "", **given: Any) -> T:
        """Build from `{"name": …, parameter: value, …}`; `given` are arguments that the spec may not set.

        An object that is already built is returned unchanged.
        """
        if isinstance(spec, self._product):
            return spec
        factory, arguments, last = self._arguments(spec, path, given)
        where = path or self.kind
        try:
            made = factory(**arguments, **given)
            if not isinstance(made, self._product):
                raise BastionError(f"{self.kind} '{_name(spec)}' made {type(made).__name__}, not {_a(self._product)}")
            return self._finish(made, **last)
        except SettingsError as error:
            raise error.under(where) from error
        except (BastionError, ValueError) as error:  # raised by the factory itself
            if isinstance(error, BastionError) and not path:
                raise
            raise SettingsError(where, (), str(error)) from error

    def finish_keys(self, name: str | None = None) -> set[str]:
        """Return the keywords of `finish`, without those that the named factory has itself."""
        return _named(self._finish) - (_named(self.factory(name)) if name else set())

    def finish(self, product: T, settings: Mapping[str, Any], path: str = "") -> T:
        """Apply `finish` to a product with these keywords."""
        where = path or self.kind
        try:
            return self._finish(product, **check_arguments(self._finish, settings, where))
        except (BastionError, ValueError) as error:
            raise error if isinstance(error, SettingsError) else SettingsError(where, (), str(error)) from error

    def schema(self) -> dict[str, Any]:
        """Return the JSON schema of a spec: a name, or a name with settings; `$defs` has what these refer to."""
        forms: list[dict[str, Any]] = []
        parts: dict[str, Any] = {}
        for name in self.names():
            form = arguments_schema(self.factory(name))
            parts |= form.pop("$defs", {})
            known = {"type": "string", "pattern": f"^{name[:-1]}"} if name.endswith("/*") else {"const": name}
            form["properties"] = {"name": known, **self._last_schema(), **form.get("properties", {})}
            form["required"] = ["name", *form.get("required", [])]
            forms.append(form | {"title": name, "description": first_line(self.factory(name))})
        short = {"type": "string", "enum": [name for name in self.names() if not name.endswith("/*")]}
        return {"title": self.kind, "anyOf": [short, *forms], "$defs": parts}

    def _last_schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = arguments_schema(self._finish).get("properties", {})
        return properties

    def _arguments(
        self, spec: Any, path: str, given: Mapping[str, Any]
    ) -> tuple[Callable[..., T], dict[str, Any], dict[str, Any]]:
        """Return the factory, its arguments, and those of `finish`."""
        if isinstance(spec, str):
            spec = read_spec(spec)
        where = path or self.kind
        if not isinstance(spec, Mapping) or not isinstance(spec.get("name"), str):
            raise SettingsError(where, (), self._expected(spec))
        factory = self.factory(spec["name"], path)
        last = self.finish_keys(spec["name"])
        values = {str(key): value for key, value in spec.items() if key != "name"}
        own = {key: value for key, value in values.items() if key not in last}
        rest = {key: value for key, value in values.items() if key in last}
        return (
            factory,
            check_arguments(factory, own, where, given, last),
            check_arguments(self._finish, rest, where),
        )

    def _accept(self, value: Any) -> T:
        """Validate a setting of this kind: an object, or a spec, which is built."""
        if isinstance(value, str | Mapping):
            return self.build(value, self.kind)
        if not isinstance(value, self._product):
            raise SettingsError(self.kind, (), self._expected(value))
        made: T = value
        return made

    def _expected(self, given: Any) -> str:
        if isinstance(given, type):
            return f"give {given.__name__}(), not the class"
        return f"expected one {self.kind} as {{name: …}}, got {shown(given)}"

    def _discover(self) -> None:
        if self._discovered:
            return
        self._discovered = True
        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{self.package}.{module.name}")
        folder = self.package.rpartition(".")[2]
        for path in plugins.own_files(folder):
            import_file(path, f"bastion_plugins.{folder}.{path.stem}")
        for entry in plugins.entry_points():
            _import_installed(entry)


def canonical(thing: Any) -> Any:
    """Return the settings as a spec without defaults, which names the facts of a probe.

    So a setting that is added later changes no name. The revision stands for the code, if it is not 1; code from
    outside of bastion is identified by a hash of its text; what that uses, `measuring.describe_model` adds.
    """
    if isinstance(thing, list | tuple):
        return [canonical(each) for each in thing]
    if isinstance(thing, Mapping):
        return {key: canonical(value) for key, value in thing.items()}
    if not dataclasses.is_dataclass(thing) or isinstance(thing, type):
        return thing if isinstance(thing, str | int | float | bool | None) else _code(type(thing)) | {"is": repr(thing)}
    name = getattr(type(thing), PLUGIN, None)
    spec: dict[str, Any] = {"name": name} if name else {}
    usual = defaults(type(thing))
    for each in dataclasses.fields(thing):
        value = getattr(thing, each.name)
        named = canonical(value)
        if value != usual.get(each.name, dataclasses.MISSING) or (
            isinstance(named, dict) and named.keys() & {"text", "version", "revision"}
        ):
            spec[each.name] = named
    return spec | _code(type(thing)) | _revision(thing)


def _revision(thing: Any) -> dict[str, int]:
    """Return the revision, if it is not 1: as `version`, which names stored facts, unless a setting is called so."""
    revision = getattr(type(thing), "revision", 1)
    key = "revision" if any(each.name == "version" for each in dataclasses.fields(thing)) else "version"
    return {key: revision} if isinstance(revision, int) and revision != 1 else {}


def defaults(kind: type) -> dict[str, Any]:
    """Return the fields of a dataclass that have a default."""
    found = {}
    for each in dataclasses.fields(kind):
        if each.default is not dataclasses.MISSING:
            found[each.name] = each.default
        elif each.default_factory is not dataclasses.MISSING:
            found[each.name] = each.default_factory()
    return found


def _code(kind: type) -> dict[str, str]:
    """Return a hash of code that is not bastion's own, as it has no version number."""
    if kind.__module__.startswith("bastion."):
        return {}
    return {"class": kind.__qualname__, "text": hashlib.sha256(source_text(kind).encode()).hexdigest()[:16]}


def source_text(code: Any) -> str:
    """Return the source of a Python module, or of that of a class or function; in a script, which workers re-import,
    only that of the class or function."""
    module = sys.modules.get(module_name(code))
    script = module_name(code) in ("__main__", "__mp_main__")
    try:
        # The code of a function, as the source of a decorated one is that of what it decorates.
        return inspect.getsource(module if module and not script else getattr(code, "__code__", code))
    except (OSError, TypeError):  # typed into a console: use the bytecode
        functions = [code, *vars(code).values()] if isinstance(code, type) else [code]
        codes = [each.__code__ for each in functions if isinstance(each, types.FunctionType)]
        return repr([(code.co_name, code.co_code, code.co_consts, code.co_names) for code in codes])


def module_name(code: Any) -> str:
    """Return the name of the Python module that a class or function is written in; of a Python module, its own.

    That of a decorated function is where the decorator is, though `functools.wraps` gives it another `__module__`.
    """
    if isinstance(code, types.ModuleType):
        return code.__name__
    return str(code.__globals__.get("__name__") if isinstance(code, types.FunctionType) else code.__module__)


def import_file(path: Path, name: str) -> types.ModuleType:
    """Import a file as a module of this name; any error in it becomes a BastionError."""
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise BastionError(f"{path}: cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BastionError:
        raise
    except Exception as error:
        del sys.modules[name]
        raise BastionError(f"{path}: cannot be imported: {type(error).__name__}: {error}") from error
    return module


def _import_installed(entry: EntryPoint) -> None:
    """Import the module of an entry point, and all modules in it if it is a package."""
    try:
        module = entry.load()
        for each in pkgutil.iter_modules(getattr(module, "__path__", ())):
            importlib.import_module(f"{module.__name__}.{each.name}")
    except BastionError:
        raise
    except Exception as error:
        package = entry.dist.name if entry.dist else entry.value
        raise BastionError(
            f"the plug-ins of {package} ({entry.value}) cannot be imported: {type(error).__name__}: {error}; mend or "
            "uninstall it"
        ) from error


def _name(spec: Any) -> str:
    return spec if isinstance(spec, str) else str(spec["name"])


def _a(kind: type) -> str:
    return f"{'an' if kind.__name__[0] in 'AEIO' else 'a'} {kind.__name__}"


def _unchanged(product: T, /) -> T:
    return product


def first_line(factory: Callable[..., Any]) -> str:
    """Return the first line of a plug-in's docstring."""
    inner = factory.func if isinstance(factory, functools.partial) else factory  # a partial has its own docstring
    return inspect.cleandoc(inner.__doc__ or "").partition("\n")[0]


def _named(factory: Callable[..., Any]) -> set[str]:
    parameters = inspect.signature(factory).parameters
    return {name for name, each in parameters.items() if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)}

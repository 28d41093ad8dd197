"""Finds plug-ins and their names in their files, without importing them. No torch.

Besides bastion's own these are files in the folders of `$BASTION_PLUGINS` (`attacks/mine.py`), and modules of installed
packages that have an entry point in the group `bastion.plugins`.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from bastion.errors import BastionError

GROUP = "bastion.plugins"  # of entry points
ROOT = Path(__file__).parent
# Registries and their packages; the last word is the folder in $BASTION_PLUGINS.
PACKAGES = {
    "attacks": "bastion.attacks",
    "objectives": "bastion.training.objectives",
    "probes": "bastion.probes",
    "studies": "bastion.studies",
    "datasets": "bastion.data",
    "models": "bastion.models",
    "figures": "bastion.reporting.figures",
    "loggers": "bastion.training.loggers",
}


class Registered(NamedTuple):
    """`@attacks.register("pgd")` in a file, with the first line of the docstring below it."""

    registry: str
    name: str
    about: str


def headlines(registry: str) -> list[tuple[str, str]]:
    """Return the names of all plug-ins of a kind with a line on each, except those that are registered in a loop."""
    own = ROOT.joinpath(*PACKAGES[registry].split(".")[1:]).glob("*.py")
    installed = (path for entry in entry_points() for path in module_files(entry.module))
    files = [*own, *own_files(folder_of(registry)), *installed]
    return sorted((each.name, each.about) for path in files for each in read(path) if each.registry == registry)


def folder_of(registry: str) -> str:
    return PACKAGES[registry].rpartition(".")[2]


def own_files(folder: str) -> list[Path]:
    """Return the user's own plug-ins of a kind, in `$BASTION_PLUGINS`; raise if any is in a wrong folder."""
    root = os.environ.get("BASTION_PLUGINS")
    if not root:
        return []
    if not Path(root).is_dir():
        raise BastionError(f"BASTION_PLUGINS: {root} is not a folder; make it, or unset the variable")
    for path in sorted([*Path(root).glob("*.py"), *Path(root).glob("*/*.py")]):
        for each in read(path):
            if path.parent != Path(root) / folder_of(each.registry):
                wanted = Path(root) / folder_of(each.registry) / path.name
                raise BastionError(
                    f"{path}: '{each.name}' is registered with `{each.registry}`, so it is looked for in another "
                    f"folder; move it to {wanted}"
                )
    return sorted(Path(root).glob(f"{folder}/*.py"))


def entry_points() -> list[metadata.EntryPoint]:
    """Return the entry points of installed packages, which name modules that register plug-ins."""
    return sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value))


def module_files(module: str) -> list[Path]:
    """Return the file of a module, or the files of a package, without importing either."""
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        return []
    folders = [Path(each).joinpath(*below) for each in spec.submodule_search_locations or ()]
    single = [Path(spec.origin)] if spec.origin and not below else [each.with_suffix(".py") for each in folders]
    packages = [path for folder in folders for path in sorted(folder.glob("*.py"))]
    return packages or [path for path in single if path.is_file()]


def read(path: Path) -> Iterator[Registered]:
    """Yield what a file registers by decorators with a literal name."""
    try:
        parsed = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # importing it raises a better message
        return
    for node in parsed.body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            match decorator:
                case ast.Call(
                    func=ast.Attribute(value=ast.Name(id=registry), attr="register"),
                    args=[ast.Constant(value=str(name))],
                ) if registry in PACKAGES:
                    about = inspect.cleandoc(ast.get_docstring(node) or "").partition("\n")[0]
                    yield Registered(registry, name, about)

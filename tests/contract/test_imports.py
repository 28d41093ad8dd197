"""The arrows of import in docs/architecture.md."""

from __future__ import annotations

import ast
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import bastion

ROOT = Path(bastion.__file__).parent
ROOTS = {
    "errors",
    "files",
    "storage",
    "types",
    "registry",
    "plugins",
    "listing",
    "settings",
    "settings_text",
    "rng",
    "progress",
    "signals",
    "recipe",
    "recipe_files",
    "recipe_yaml",
    "papers",
    "suite",
    "_torchvision",
    "forward",
    "journal",
    "threat",
    "attention",
    "patches",
    "corruptions",
    "jacobians",
    "memory",
}
# room -> the rooms it may import besides ROOTS and itself
ARROWS: dict[str, set[str]] = {
    **{name: set() for name in ROOTS},
    "run": set(),
    "models": set(),
    "data": set(),
    "deepaugment": set(),
    "acceleration": set(),
    "attacks": {"acceleration"},
    "training": {"acceleration", "attacks", "models", "data", "run"},
    "probes": {"acceleration", "attacks", "models", "data"},
    "studies": {"acceleration", "attacks", "models", "data"},
    "measuring": {"probes", "studies", "acceleration", "attacks", "models", "data", "run"},
    "reporting": {"run", "measuring"},
    "costs": {"acceleration", "attacks", "models", "data", "training", "run"},
    "schema": {"attacks", "models", "data", "training", "probes", "studies"},
    "show": {"models", "attacks", "data", "training", "probes", "studies", "costs", "measuring", "run"},
    "demo": {"training", "measuring", "reporting"},
    "cli": {"models", "training", "measuring", "reporting", "data", "deepaugment", "show", "demo", "schema", "run"},
    "__init__": {"training", "measuring", "reporting", "models"},
    "__main__": {"cli"},
}


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> list[str]:
    """Modules that a file imports, those at its top first."""
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            found += whole if node.module == "bastion" else [node.module]
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return found


def _imported_rooms(path: Path) -> set[str]:
    return {name.split(".")[1] for name in _imports(path) if name.startswith("bastion.")}


def test_rooms_import_only_along_the_arrows() -> None:
    wrong = {}
    for path in ROOT.rglob("*.py"):
        room = _room(path)
        wrong[path.relative_to(ROOT).as_posix()] = _imported_rooms(path) - ROOTS - {room} - ARROWS[room]
    assert {path: rooms for path, rooms in wrong.items() if rooms} == {}


def test_corruptions_are_tensor_functions() -> None:
    for path in (ROOT / "corruptions").glob("*.py"):
        assert _imported_rooms(path) <= {"corruptions", "errors", "rng"}, path


def test_reading_and_reporting_need_no_torch() -> None:
    reading = "recipe, run, reporting.html, measuring.facts, measuring.compare"
    code = f"import sys, bastion.cli, bastion.{reading.replace(', ', ', bastion.')}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_any_package_can_be_imported_first() -> None:
    """One with modules that import timm or torchvision imports the guard before anything else of bastion's."""
    guarded = [path for path in ROOT.glob("*/__init__.py") if "bastion._torchvision" in _imports(path)]
    for path in guarded:
        assert next(name for name in _imports(path) if name.startswith("bastion")) == "bastion._torchvision", path
    for path in ROOT.rglob("*.py"):
        needs = {"timm", "torchvision"} & {name.partition(".")[0] for name in _imports(path)}
        assert not needs or path.name == "_torchvision.py" or ROOT / _room(path) / "__init__.py" in guarded, path


def test_the_guard_leaves_a_torchvision_that_works() -> None:
    """Whatever it found; brought by a package that does not import it itself."""
    code = "import bastion.attacks, bastion.training.optim; from torchvision import transforms; transforms.Resize(4)"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.fixture
def other_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is imported in its place."""
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path / "torchvision.py"


def test_the_guard_does_nothing_where_torchvision_loads_by_itself(other_torchvision: Path) -> None:
    other_torchvision.write_text("name = 'a torchvision that loads'\n")
    guard = runpy.run_path(str(ROOT / "_torchvision.py"))
    assert guard["torchvision"].name
    assert guard["_declared"] is None


def test_the_guard_lets_other_failures_through(other_torchvision: Path) -> None:
    other_torchvision.write_text("raise RuntimeError('something else')\n")
    with pytest.raises(RuntimeError, match="something else"):
        runpy.run_path(str(ROOT / "_torchvision.py"))

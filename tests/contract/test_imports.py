"""The arrows of import in docs/architecture.md."""

from __future__ import annotations

import ast
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


def _imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "bastion" else [node.module]
            )
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("bastion.")}
    return found


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_rooms_import_only_along_the_arrows(path: Path) -> None:
    room = _room(path)
    allowed = ROOTS | {room} | ARROWS[room]
    assert _imported_rooms(path) <= allowed


@pytest.mark.parametrize("path", sorted((ROOT / "corruptions").glob("*.py")), ids=lambda path: path.stem)
def test_corruptions_are_tensor_functions(path: Path) -> None:
    assert _imported_rooms(path) <= {"corruptions", "errors", "rng"}


@pytest.mark.parametrize(
    "module",
    ["bastion", "bastion.cli", "bastion.reporting.html", "bastion.measuring.facts", "bastion.measuring.compare"],
)
def test_reading_and_reporting_need_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("first", ["data.augment", "models.timm", "training.optim", "measuring.runner", "attacks"])
def test_any_package_can_be_imported_first(first: str) -> None:
    """Each brings the guard along before timm, whatever was imported before it."""
    others = "bastion.training.trainer, bastion.data.imagefolder, bastion.models.fan, bastion.measuring.runner"
    code = f"import bastion.{first}; import {others}; import timm, torchvision"
    result = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_importing_timm_first_needs_the_guard_only_where_torchvision_fails() -> None:
    """The guard leaves a torchvision that works, whatever it found."""
    code = "import bastion._torchvision, torchvision, timm; from torchvision import transforms; transforms.Resize(4)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_guard_does_nothing_where_torchvision_loads_by_itself(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("name = 'a torchvision that loads'\n")
    code = (
        "import bastion._torchvision as guard, torchvision; "
        "assert torchvision.name and guard._declared is None, guard._declared"
    )
    env = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    assert subprocess.run([sys.executable, "-c", code], check=False, env=env).returncode == 0


def test_the_guard_lets_other_failures_through(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')\n")
    result = subprocess.run(
        [sys.executable, "-c", "import bastion._torchvision"],
        check=False,
        env={"PYTHONPATH": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
    )
    assert "RuntimeError: something else" in result.stderr

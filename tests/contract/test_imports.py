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
    "card",
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
    "torchrun",
}
# room -> the rooms it may import besides ROOTS and itself
ARROWS: dict[str, set[str]] = {
    **{name: set() for name in ROOTS},
    "run": set(),
    "models": {"run"},  # a model in a run's folder must be of that run
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
    "compat": {"attacks", "measuring", "reporting"},
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


def test_a_report_leaves_the_choice_of_interval_to_the_facts() -> None:
    """Facts know whether measuring stopped early; only shares that others published come without facts."""
    allowed = {"Estimate", "difference"}
    for path in (ROOT / "reporting").rglob("*.py"):
        named = {
            alias.name
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            and node.module in ("bastion.measuring.intervals", "bastion.measuring.sampling")
            for alias in node.names
        }
        assert named <= allowed | ({"wilson"} if path.stem == "published_rows" else set()), path


def test_reading_and_reporting_need_no_torch() -> None:
    reading = "recipe, run, reporting.html, measuring.facts, measuring.compare"
    code = f"import sys, bastion.cli, bastion.{reading.replace(', ', ', bastion.')}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def run_python(code: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {"PYTHONPATH": f"{folder}:{ROOT.parent}", "PATH": ""} if folder else None
    return subprocess.run([sys.executable, "-c", code], check=False, env=env, capture_output=True, text=True)


def test_timm_can_be_imported_after_bastion() -> None:
    """Whether torchvision's operators load or not; and `import bastion` alone imports neither torch nor torchvision."""
    code = "import bastion, sys; assert not {'torch', 'torchvision'} & {*sys.modules}; import timm, torchvision; "
    code += "from torchvision import transforms; transforms.Resize(4)"
    result = run_python(code)
    assert result.returncode == 0, result.stderr


def made_torchvision(folder: Path, has_ops: bool) -> None:
    """A package that begins as torchvision does; its operators are loaded or not."""
    (folder / "torchvision").mkdir()
    (folder / "torchvision" / "__init__.py").write_text("from . import extension, _meta_registrations\n")
    (folder / "torchvision" / "extension.py").write_text(f"def _has_ops():\n    return {has_ops}\n")
    (folder / "torchvision" / "_meta_registrations.py").write_text("")
    (folder / "torch.py").write_text(
        "class library:\n    class Library:\n        def __init__(self, *a): pass\n"
        "        def define(self, schema): print(schema.partition('(')[0])\n"
    )


@pytest.mark.parametrize(("has_ops", "declared"), [(True, []), (False, ["nms", "qnms"])])
def test_operators_are_declared_only_where_torchvision_did_not_load_them(
    has_ops: bool, declared: list[str], tmp_path: Path
) -> None:
    made_torchvision(tmp_path, has_ops)
    result = run_python("import bastion, torchvision", tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == declared


def test_other_failures_of_torchvision_are_told_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('something else')\n")
    assert "RuntimeError: something else" in run_python("import bastion, torchvision", tmp_path).stderr

"""What is installed: the versions that are allowed, and the wheel."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
RANGED = ("torch", "torchvision", "timm")


def ranges() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {each.name: each for each in map(Requirement, project["dependencies"]) if each.name in RANGED}


def pins(file: str) -> dict[str, str]:
    lines = (line for line in (ROOT / file).read_text().splitlines() if line and not line.startswith("#"))
    return dict(line.split("==") for line in lines)


def test_the_lowest_set_is_the_lowest_that_is_allowed() -> None:
    lowest = {name: next(each.version for each in r.specifier if each.operator == ">=") for name, r in ranges().items()}
    assert pins("constraints-lowest.txt") == lowest


def test_what_make_installs_is_allowed() -> None:
    pinned = pins("constraints.txt")
    assert all(each.specifier.contains(pinned[name]) for name, each in ranges().items())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    return next(folder.glob("bastion-*.whl"))


@pytest.mark.slow
def test_every_file_of_the_package_is_in_the_wheel(wheel: Path) -> None:
    """Recipes, suites, tables, templates, the zoo's weights and the demo's data among them."""
    source = ROOT / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    expected = {path for path in files if "__pycache__" not in path and ".egg-info" not in path}
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert packed == expected
    assert {Path(name).suffix for name in packed} >= {".yaml", ".csv", ".j2", ".css", ".js", ".safetensors"}


@pytest.mark.slow
def test_the_wheel_works_in_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Outside of the checkout, with what pip installs of its own accord at the pinned versions."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python, env = tmp_path / "venv" / "bin" / "python", {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}

    def run(*command: str | Path) -> str:
        done = subprocess.run([python, *command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("-m", "pip", "install", "-q", "--no-compile", "-c", ROOT / "constraints.txt", wheel)
    home = run("-c", "import bastion, timm; print(bastion.__file__)")
    assert Path(home.strip()).is_relative_to(tmp_path)
    assert "tiny/demo-robust" in run("-m", "bastion", "list", "recipes")
    assert "autoattack-linf" in run("-m", "bastion", "list", "suites")
    options = ["--suite", "demo", "--data", "cifar10-mini", "--limit", "4", "--run", "run"]
    assert "clean" in run("-m", "bastion", "measure", "zoo/cifar10-linf-vit", *options)

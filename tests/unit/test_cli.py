"""The command line as a person meets it: help, listings, and one clear line for whatever is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}


def bastion(
    *words: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "bastion", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env={**ENV, **(env or {})}, timeout=300)


def test_help_names_every_verb_and_needs_no_torch() -> None:
    result = bastion("--help")
    assert result.returncode == 0
    for verb in ("train", "measure", "report", "show", "list", "data", "demo"):
        assert f" {verb} " in result.stdout
    code = "import sys, bastion.cli, bastion.recipe, bastion.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("models", "vit/micro"),
        ("attacks", "fgsm-rs"),
        ("objectives", "adversarial"),
        ("probes", "accuracy"),
        ("data", "cifar10-mini"),
        ("recipes", "tiny/demo-robust"),
        ("suites", "demo"),
    ],
)
def test_list_shows_names_with_a_line_on_each(kind: str, name: str) -> None:
    lines = bastion("list", kind).stdout.splitlines()
    (line,) = [line for line in lines if line.split()[0] == name]
    assert len(line.split()) > 3


def test_list_takes_a_pattern() -> None:
    names = bastion("list", "models", "timm/vit_tiny*").stdout.split()
    assert "timm/vit_tiny_patch16_224" in names
    assert all(name.startswith("timm/vit_tiny") for name in names)


def test_show_resolves_a_recipe_and_counts_a_model() -> None:
    recipe = bastion("show", "tiny/demo-robust", "--set", "seed=5").stdout
    for part in ("seed: 5", "eps: 0.03137254901960784", "name: vit/micro", "parameters", "MACs"):
        assert part in recipe
    assert "1,205,642" in bastion("show", "vit/micro").stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "tiny/demo-robus"], "error: no recipe 'tiny/demo-robus': neither shipped with bastion nor a .yaml file; did you mean 'tiny/demo-robust'?"),
        (["train", "tiny/demo-robust", "--set", "optimizer.lrate=1"], "error: tiny/demo-robust: optimizer.lrate: unknown key; did you mean 'lr'?"),
        (["train", "tiny/demo-robust", "--set", "data.name=cifar10", "--run", "r"], "error: data set 'cifar10' is not in"),
        (["measure", "nowhere"], "error: no model 'nowhere': not a run, not a folder with card.json, not zoo/NAME (see `bastion list zoo`)"),
        (["report", "nowhere"], "error: nowhere: not a run directory (no provenance.json)"),
        (["show", "resnet18"], "error: show resnet18: not a recipe, not a run or model folder; unknown model 'resnet18'"),
        (["list", "atacks"], "error: list: unknown kind 'atacks'; did you mean 'attacks'?"),
        (["data", "get", "cifar"], "error: data get: nothing to get for 'cifar'; did you mean 'cifar10'?"),
        (["data", "verify", "cifar10"], "error: data set 'cifar10' is not in"),
        (["measure", "m", "--data", "imagefolder:root"], "error: --data imagefolder:root: expected NAME:key=value"),
    ],
)  # fmt: skip
def test_bad_input_gives_one_clear_line(tmp_path: Path, words: list[str], message: str) -> None:
    result = bastion(*words, cwd=tmp_path, env={"BASTION_DATA": str(tmp_path / "empty")})
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.startswith(message)
    assert len(result.stderr.splitlines()) == 1


def test_a_usage_error_is_code_2() -> None:
    assert bastion("train").returncode == 2
    assert bastion("fly").returncode == 2


def test_data_verify_prints_the_hashes() -> None:
    result = bastion("data", "verify", "cifar10-mini")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == [
        "train_images",
        "train_labels",
        "test_images",
        "test_labels",
    ]

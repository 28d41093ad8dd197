"""The command line as a person meets it: help, listings, and one clear line for whatever is wrong."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from rich.text import Text

from bastion import cli
from bastion.errors import Interrupted, printable
from bastion.listing import KINDS
from bastion.measuring.facts import read_measurements
from bastion.run import open_run, version


class Result(NamedTuple):
    code: int
    stdout: str
    stderr: str


Bastion = Callable[..., Result]


@pytest.fixture
def bastion(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Bastion:
    """`bastion("list", "models")` in an empty folder with an empty cache; in this process, a new one takes seconds."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BASTION_DATA", str(tmp_path / "empty"))
    monkeypatch.setenv("COLUMNS", "200")

    def bastion(*words: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["bastion", *words])
        with pytest.raises(SystemExit) as end:
            cli.main()
        return Result(int(end.value.code or 0), *capfd.readouterr())

    return bastion


def test_help_names_every_verb(bastion: Bastion) -> None:
    result = bastion("--help")
    for verb in ("train", "measure", "compare", "report", "show", "list", "data", "demo"):
        assert f" {verb} " in result.stdout


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
        ("zoo", "zoo/cifar10-linf-vit"),
    ],
)
def test_list_shows_names_with_a_line_on_each(bastion: Bastion, kind: str, name: str) -> None:
    lines = bastion("list", kind).stdout.splitlines()
    (line,) = [line for line in lines if line.split()[0] == name]
    assert len(line.split()) > 3


def test_list_takes_a_pattern(bastion: Bastion) -> None:
    names = bastion("list", "models", "timm/vit_tiny*").stdout.split()
    assert "timm/vit_tiny_patch16_224" in names
    assert all(name.startswith("timm/vit_tiny") for name in names)
    assert bastion("list", "attacks", "dlr").stdout.split()[0] == "apgd-dlr"
    assert [line.split()[0] for line in bastion("list").stdout.splitlines()] == list(KINDS)


def test_listing_needs_no_torch() -> None:
    code = "import sys; from bastion.listing import KINDS, listed; [listed(kind) for kind in KINDS]; "
    code += "listed('models', 'timm/vit*'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_list_fits_80_columns(monkeypatch: pytest.MonkeyPatch, bastion: Bastion) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(cli, "stdout", Console(file=screen, force_terminal=True, no_color=True, width=80))
    for kind in KINDS:
        bastion("list", kind)
    lines = screen.getvalue().splitlines()
    assert max(Text.from_ansi(line).cell_len for line in lines) <= 80
    assert any(str(Text.from_ansi(line)).split() == ["name", "about"] for line in lines)


def test_short_options_and_the_version(bastion: Bastion) -> None:
    assert bastion("--version").stdout == f"bastion {version('bastion')}\n"
    shown = bastion("measure", "-h").stdout
    assert "--device" in shown and "<bool>" not in shown


def test_names_are_completed() -> None:
    assert cli._names("attacks")("apgd-t") == ["apgd-t", "apgd-t-fast", "apgd-train"]


def test_show_resolves_a_recipe_and_counts_a_model(bastion: Bastion) -> None:
    recipe = bastion("show", "tiny/demo-robust", "--set", "seed=5").stdout
    for part in ("seed: 5", "eps: 8/255", "name: vit/micro", "parameters", "MACs"):
        assert part in recipe
    assert "1,205,642" in bastion("show", "vit/micro").stdout


TWO = "imagefolder:root=two,size=64,test_only=true"  # a folder of two classes
BAD_INPUT = {
    "train tiny/demo-robus": "no recipe 'tiny/demo-robus': neither shipped with bastion nor a .yaml file; "
    "did you mean 'tiny/demo-robust'?",
    "train tiny/demo-robust --set optimizer.weightdecay=1": "tiny/demo-robust: optimizer.weightdecay: unknown key; "
    "did you mean 'weight_decay'?",
    "train tiny/demo-robust --set data.name=cifar10 --run r": "data: data set 'cifar10' is not in",
    "train tiny/demo-robust --set objective.threat.norm=linv --run r": "objective.threat.norm: unknown norm",
    "train tiny/demo-robust --set objective.threat.eps=-1 --run r": "objective.threat.eps: input should be greater",
    "measure nowhere": "no model 'nowhere': not a run, not a folder with card.json, not zoo/NAME",
    "measure zoo/cifar10-linf-vit --data imagefolder:root": "'imagefolder:root': expected NAME:key=value",
    "measure zoo/cifar10-linf-vit --data no/where": "data: no/where: no such folder",
    "measure zoo/cifar10-linf-vit --attack pgd:steps": "'pgd:steps': expected NAME:key=value,key=value, got 'steps'",
    "measure zoo/cifar10-linf-vit --attack pgd:step_size=1": "probes.pgd:step_size=1.attack.step_size: unknown key",
    "measure zoo/cifar10-linf-vit --set steps=2": "demo: steps: unknown key; known: eps, about, paper, paper_data, "
    "adapt_size, axes, data, probes, studies, aggregates, curves; a setting of an attack is probes.pgd-20.attack.steps",
    "train tiny/demo-robust --set data=imagefolder:root=/nowhere,size=32 --run r": "data: /nowhere: no such folder",
    "train tiny/demo-robust --set data=/nowhere --run r": "data: /nowhere: no such folder",
    "measure zoo/cifar10-linf-vit --suite demoo": "no suite 'demoo': neither shipped with bastion nor a .yaml",
    f"measure zoo/cifar10-linf-vit --data {TWO}": "measure: the model has 10 classes, imagefolder has 2; say which of "
    "the model's they are (`class_map`)",
    f"measure zoo/cifar10-linf-vit --data {TWO},class_map=cifar": "data: class_map: no file cifar, and no map of this",
    f"measure zoo/cifar10-linf-vit --data {TWO},class_map=map.txt": "measure on imagefolder: the network was made for "
    "images of 32×32 and does not take 64×64",
    "measure zoo/cifar10-linf-vit --attack pgdd": "probes.pgdd.attack.name: unknown attack 'pgdd'; did you mean 'pgd'",
    "measure zoo/cifar10-linf-vit --attack pgd --norm l2": "eps: give one, such as 0.5; only linf has a default",
    "measure zoo/cifar10-linf-vit --attack pgd --norm l3": "probes.pgd.threat.norm: unknown norm 'l3'",
    "measure zoo/cifar10-linf-vit --norm l2 --eps 0.5": "measure: --norm goes with --attack; a suite has its own norm",
    "measure zoo/cifar10-linf-vit --suite autoattack-linf --norm l2": "measure: --norm goes with --attack; a suite has",
    "measure zoo/cifar10-linf-vit --keep some": "keep: must be a whole number",
    "measure zoo/cifar10-linf-vit --suite autoattack": "no suite 'autoattack': neither shipped with bastion nor a "
    ".yaml file, probe or study; did you mean 'autoattack-linf'?",
    "measure zoo/cifar10-linf-vit --suite sparsty": "no suite 'sparsty': neither shipped with bastion nor a .yaml "
    "file, probe or study; did you mean 'sparsity'?",
    "train tiny/demo-robust --set epochs=1": "tiny/demo-robust: epochs: unknown key; did you mean 'schedule.epochs'?",
    "compare nowhere zoo/cifar10-linf-vit": "no model 'nowhere': not a run",
    "compare zoo/cifar10-linf-vit zoo/cifar10-linf-resnet": "zoo/cifar10-linf-vit: not measured yet",
    "report nowhere": "no model 'nowhere': not a run",
    "report zoo/cifar10-linf-vit": "zoo/cifar10-linf-vit: not measured yet; run `bastion measure zoo/",
    "show resnet18": "show resnet18: nothing that `bastion list` names, no run and no folder",
    "measure resnet18": "no model 'resnet18': not a run, not a folder with card.json, not zoo/NAME (see `bastion list "
    "zoo`); did you mean 'timm/resnet18'?",
    "show PGD": "show PGD: nothing that `bastion list` names, no run and no folder; did you mean 'pgd'?",
    "show pgdd": "show pgdd: nothing that `bastion list` names, no run and no folder; did you mean 'pgd'?",
    "list attacks zzz": "list: no attack matches 'zzz'",
    "measure zoo/cifar10-linf-vit --device gpu": "device: 'gpu' cannot be used here",
    "show vit/micro --time": "show vit/micro: --time, and --set but for a model's name, are for recipes",
    "list atacks": "list: unknown kind 'atacks'; did you mean 'attacks'?",
    "data get cifar": "data get: nothing to get for 'cifar'; did you mean 'cifar10'?",
    "data verify cifar10": "data set 'cifar10' is not in",
}


@pytest.mark.parametrize("command", BAD_INPUT)
def test_bad_input_gives_one_clear_line(bastion: Bastion, tmp_path: Path, command: str) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "two" / name).mkdir(parents=True)
        Image.new("RGB", (40, 40)).save(tmp_path / "two" / name / "0.png")
    (tmp_path / "map.txt").write_text("cat 3\ndog 5\n")
    result = bastion(*command.split())
    assert result.code == 1
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {BAD_INPUT[command]}")
    assert len(result.stderr.splitlines()) == 1


def test_a_usage_error_is_code_2(bastion: Bastion) -> None:
    assert bastion("train").code == 2
    assert bastion("fly").code == 2
    result = bastion("measure", "a", "\u202egpj")  # shown without what a terminal would obey
    assert result.code == 2 and "\ufffdgpj" in result.stderr and printable(result.stderr) == result.stderr


@pytest.mark.parametrize("command", ["attack", "evaluate"])
def test_a_command_that_others_have_is_told_by_ours(command: str, bastion: Bastion) -> None:
    result = bastion(command, "zoo/cifar10-linf-vit", "--eps", "8/255")
    assert result.code == 2 and "Did you mean 'bastion measure MODEL --attack" in result.stderr


def test_data_verify_prints_the_hashes(bastion: Bastion) -> None:
    result = bastion("data", "verify", "cifar10-mini")
    parts = [line.split()[0] for line in result.stdout.splitlines()]
    assert parts == ["train_images", "train_labels", "test_images", "test_labels"]


def test_data_deepaugment_says_what_it_made_and_how_to_use_it(
    bastion: Bastion, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from bastion.deepaugment import fit, generate
    from bastion.recipe import load_recipe

    monkeypatch.setattr(generate, "MIN_PSNR", 0.0)  # two steps teach nothing
    monkeypatch.setattr(fit, "CHECKED", 16)
    words = ("data", "deepaugment", "cifar10-mini", "-o", "made", "--limit", "40", "--steps", "2")
    result = bastion(*words)
    assert result.code == 0, result.stderr
    *described, where, yaml, first, second = result.stdout.splitlines()
    assert [line.partition(";")[0] for line in described] == ["made/edsr.npz: 40 images", "made/cae.npz: 40 images"]
    (tmp_path / "mine.yaml").write_text("\n".join(["extends: tiny/demo-standard", yaml, first, second]))
    assert where == "in a recipe:" and len(load_recipe(tmp_path / "mine.yaml").extra) == 2
    other = bastion(*words, "--seed", "1")
    assert (other.code, len(other.stderr.splitlines())) == (1, 1)
    assert "made was made otherwise (seed: 0 -> 1); give another folder" in other.stderr
    assert bastion(*words[:-1], "0").code == 2
    assert "unknown data set 'cifar-10'; did you mean 'cifar10'" in bastion(*words[:2], "cifar-10", *words[3:]).stderr


def test_the_default_number_of_steps_is_that_of_the_networks(bastion: Bastion) -> None:
    from bastion.deepaugment import fit

    assert f"[default: {fit.STEPS}]" in bastion("data", "deepaugment", "--help").stdout


@pytest.mark.parametrize("option", [("--export", "adv.npz"), ("--until", "0.1")])
def test_a_shard_has_not_all_examples(bastion: Bastion, option: tuple[str, str]) -> None:
    result = bastion("measure", "zoo/cifar10-linf-resnet", "--shard", "1/1", "--limit", "2", *option)
    assert result.code == 1 and f"measure: {option[0]}" in result.stderr and "--shard" in result.stderr


def test_attacks_are_named_on_the_command_line_and_eps_may_be_several(bastion: Bastion, tmp_path: Path) -> None:
    asked = ["measure", "zoo/cifar10-linf-vit", "--limit", "4", "--workers", "1", "--run", str(tmp_path / "run")]
    result = bastion(*asked, "--attack", "fgsm", "--norm", "l2", "--eps", "0.1", "--eps", "1/2", "--keep", "all")
    assert result.code == 0
    assert "fgsm eps=0.1     ℓ2 ≤ 0.1" in result.stdout and "fgsm eps=0.5     ℓ2 ≤ 0.5" in result.stdout
    where = tmp_path / "run"
    assert result.stdout.splitlines()[-1] == f"facts: {where}; a page about them: bastion report {where}"
    (facts,) = read_measurements(open_run(tmp_path / "run"))
    assert facts.adversarial("fgsm eps=0.5").shape == (4, 3, 32, 32)
    assert "pgd:steps=2,step=2∕255 ℓ∞ ≤ 8/255" in bastion(*asked, "--attack", "pgd:steps=2,step=2/255").stdout
    wanted = ["--attack", "fgsm", "--export", str(tmp_path / "adv.npz")]
    assert bastion(*asked, *wanted).stdout.splitlines()[-1] == f"adversarial examples: {tmp_path / 'adv.npz'}"
    with np.load(tmp_path / "adv.npz") as stored:
        assert stored["x"].shape == (4, 3, 32, 32)
    refused = bastion(*asked, "--attack", "pgd", "--suite", "demo")
    assert refused.code == 1 and "--attack makes a suite of its own" in refused.stderr


def test_an_interrupted_demo_says_how_to_go_on(monkeypatch: pytest.MonkeyPatch, bastion: Bastion) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise Interrupted("train: stopped by a signal; go on with the same command and --resume", 2)

    monkeypatch.setattr("bastion.demo.train", stopped)
    result = bastion("demo")
    assert result.code == 130 and "--resume" not in result.stderr
    assert "Re-run `bastion demo` with the same -o to resume." in result.stderr


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 9 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes.\nError code 12"),
        RuntimeError("CUDA out of memory. Tried to allocate 9 GiB"),
    ],
)
def test_too_little_memory_is_one_line(bastion: Bastion, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail() -> None:
        raise error

    monkeypatch.setattr(cli, "app", fail)
    result = bastion("train", "x")
    assert result.code == 1 and result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: out of memory (") and "use a smaller batch" in result.stderr


def test_a_terminal_without_unicode_is_answered() -> None:
    words = [sys.executable, "-m", "bastion", "list", "suites"]
    for text in (words, [*words[:-1], "ℓ∞"]):
        done = subprocess.run(text, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, text=True)
        assert "Traceback" not in done.stderr and (done.stdout or done.stderr)

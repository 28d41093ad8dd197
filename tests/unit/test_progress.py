"""What a person sees while waiting: a line that fits the terminal, and moves."""

from __future__ import annotations

import importlib.util
import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor, nn

from bastion import Threat, journal, progress
from bastion.acceleration import accelerate
from bastion.attacks import APGD, PGD, AutoAttack, Ensemble, Square
from bastion.attacks.judge import judge
from bastion.attacks.minimal import Minimal
from bastion.probes import probes
from bastion.probes.two_phase import TwoPhase
from bastion.types import Attack, Batch


@pytest.mark.parametrize("unit", ["share", "items"])
def test_the_bar_fits_80_columns(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    screen = io.StringIO()
    terminal = Console(file=screen, force_terminal=True, no_color=True, width=80)
    monkeypatch.setattr(progress, "console", terminal)
    with progress.bar("training a-run-with-a-long-name-1a2b3c4d", 20_000, unit=unit) as advance:
        advance(7, note="loss 2.301  clean 12 %  robust 8 %  1234 images/s", left=3600.0)
    lines = [str(Text.from_ansi(line)) for line in screen.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80 and not any("images/s" in line and "ETA" not in line for line in lines)
    assert any("loss 2.301" in line and "ETA" in line and ":" in line.partition("ETA")[2] for line in lines)


class Output:
    """One output of a notebook, as `display` gives it; remembers every line."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, content: dict[str, str], *, raw: bool, display_id: bool) -> Output:
        assert raw and display_id and not self.lines
        self.update(content, raw=raw)
        return self

    def update(self, content: dict[str, str], *, raw: bool) -> None:
        self.lines.append(content["text/plain"])


@pytest.fixture
def output(monkeypatch: pytest.MonkeyPatch) -> Output:
    """The output of a notebook in which ipywidgets is not installed."""
    output, find = Output(), importlib.util.find_spec
    monkeypatch.setattr("IPython.display.display", output)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "ipywidgets" else find(name))
    monkeypatch.setattr(progress, "console", Console(file=io.StringIO(), force_jupyter=True, force_terminal=False))
    return output


@pytest.mark.parametrize("unit", ["share", "items"])
def test_a_notebook_without_ipywidgets_shows_one_plain_line(
    output: Output, monkeypatch: pytest.MonkeyPatch, unit: str
) -> None:
    monkeypatch.setattr(progress, "INTERVAL", 0.0)
    with progress.bar("measuring", 4, unit=unit) as advance:
        for done in range(1, 4):
            advance(done=done, note=f"pgd: {9 - done} of 9 survive", left=90.0)
    assert len(output.lines) == 4 and output.lines[-1] == "" and all(map(str.isprintable, output.lines))
    assert re.fullmatch(r". measuring ━+.* +(25%|1/4) pgd: 8 of 9 survive ETA 0:01:30", output.lines[0])
    assert max(map(len, output.lines)) <= 80


def test_what_takes_no_time_shows_nothing_in_a_notebook(output: Output) -> None:
    with progress.bar("measuring", 2) as advance:
        advance()
    assert output.lines == []


@pytest.mark.parametrize(
    "attack",
    [
        PGD(steps=6, restarts=2),
        APGD(steps=6, targets=2),
        Ensemble(members=(APGD(steps=5), Square(queries=20))),
        Minimal(fab_steps=5, fab_targets=1, bisections=4, steps=3, targets=2),
    ],
    ids=["pgd", "apgd", "ensemble", "minimal"],
)
def test_an_attack_tells_how_far_it_is(attack: Attack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "INTERVAL", 0.0)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4)).eval()
    x = torch.rand(8, 3, 4, 4)
    batch = Batch(torch.arange(8), x, model(x).argmax(1))
    told: list[tuple[float, int]] = []
    with journal.watched(lambda share, survivors: told.append((share, survivors))):
        judge(model, batch, attack, Threat("linf", 0.001), seed=0)
    shares = [share for share, _ in told]
    assert len(told) > 5 and shares == sorted(shares) and shares[0] < 0.2 and shares[-1] > 0.8
    assert all(survivors == 8 for _, survivors in told)


def test_the_passes_of_an_attack_are_known_before_it_runs() -> None:
    assert PGD(steps=10, restarts=3).passes("linf") == 33
    assert AutoAttack().passes("linf") == 101 + 9 * 101 + 9 * 201 + 5001
    assert AutoAttack().passes("l1") == 5 * 103 + 5 * 103 + 9 * 201 + 5001  # APGD in three phases
    assert Minimal().passes("linf") == 9 * 201 + 11 * 3 * 41


class Certain(nn.Module):
    """Class 0 wins for every image; counts the images it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.images = nn.Parameter(torch.linspace(-1, 1, 3 * 16 * 16)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.images += len(x)
        slope = 1e-3 * (x.flatten(1) * self.weights).sum(1)
        return torch.stack([10 + slope, -slope, slope], 1)


THREAT = {"norm": "linf", "eps": 0.1}
MEMBERS = [{"name": "pgd", "steps": 3}, {"name": "square", "queries": 20}]


@pytest.mark.parametrize(
    "spec",
    [
        {"name": "sanity", "threat": THREAT},
        {"name": "sanity", "threat": THREAT, "steps": 20, "queries": 5, "tries": 1},
        {"name": "flip-rate", "perturbation": "rotate"},
        {"name": "occlusion", "masks": 5},
        {"name": "patch-confidence", "steps": 8},
        {"name": "synthesis", "steps": 12},
        {"name": "frequency", "cutoffs": [0.1, 0.2], "attack": {"name": "pgd", "steps": 3}},
        {
            "name": "two-phase",
            "threat": THREAT,
            "first": 1,
            "share": 0.5,
            "attack": {"name": "ensemble", "members": MEMBERS},
        },
    ],
    ids=lambda spec: spec["name"],
)
def test_a_probe_says_how_many_passes_it_takes(spec: dict[str, Any]) -> None:
    model, probe = Certain().eval(), probes.build(spec)
    x = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    probe(accelerate(model, enabled=False), Batch(torch.arange(16), x, torch.zeros(16, dtype=torch.int64)), seed=0)
    assert probe.describe().passes == pytest.approx(model.images / 16, rel=0.25)


def test_two_phases_are_one_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "INTERVAL", 0.0)
    x = torch.rand(16, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    attack = Ensemble(members=(APGD(steps=20), Square(queries=40)))
    told: list[float] = []
    with journal.watched(lambda share, _: told.append(share)):
        TwoPhase(Threat("linf", 0.1), share=0.5, attack=attack, first=1)(
            accelerate(Certain().eval(), enabled=False),
            Batch(torch.arange(16), x, torch.zeros(16, dtype=torch.int64)),
            seed=0,
        )
    assert told == sorted(told) and told[0] < 0.2 and told[-1] > 0.8

"""What a person sees while waiting: a line that fits the terminal, and moves."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import nn

from bastion import Threat, journal, progress
from bastion.attacks import APGD, PGD, AutoAttack, Ensemble, Square
from bastion.attacks.judge import judge
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


@pytest.mark.parametrize(
    "attack",
    [PGD(steps=6, restarts=2), APGD(steps=6, targets=2), Ensemble(members=(APGD(steps=5), Square(queries=20)))],
    ids=["pgd", "apgd", "ensemble"],
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
    assert AutoAttack().passes("linf") == 101 + 9 * 101 + 9 * 101 + 5001

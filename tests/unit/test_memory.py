"""Freed memory is kept for the next step where bastion owns the process."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from bastion import cli

FAULTS = """
import resource, torch
from bastion.memory import keep_freed_memory
{call}
def step():
    torch.ones(40 << 20, dtype=torch.uint8)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc gives freed memory back by these rules")
def test_pages_of_freed_tensors_are_not_fetched_again() -> None:
    def faults(call: str) -> int:
        run = [sys.executable, "-c", FAULTS.format(call=call)]
        return int(subprocess.run(run, capture_output=True, text=True, check=True).stdout)

    assert 5 * faults("keep_freed_memory()") < faults("")


@pytest.mark.parametrize(
    ("arguments", "module"),
    [(["train", "base/micro"], "training.trainer.train"), (["measure", "zoo/x"], "measuring.runner.measure")],
)
def test_commands_own_their_process(arguments: list[str], module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def stop(*_: object, **__: object) -> None:
        calls.append("worked")
        raise SystemExit

    monkeypatch.setattr("bastion.memory.keep_freed_memory", lambda: calls.append("kept"))
    monkeypatch.setattr(f"bastion.{module}", stop)
    CliRunner().invoke(cli.app, arguments)
    assert calls == ["kept", "worked"]

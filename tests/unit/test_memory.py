"""Freed memory is kept for the next step where bastion owns the process."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

from bastion import cli
from bastion.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory


class Libc:
    """A glibc that refuses mmap thresholds above `most`, as some versions do."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.settings: dict[int, int] = {}

    def mallopt(self, key: int, value: int) -> int:
        accepted = key != M_MMAP_THRESHOLD or value <= self.most
        if accepted:
            self.settings[key] = value
        return int(accepted)


@pytest.mark.parametrize(("most", "expected"), [(1 << 40, 1 << 30), (32 << 20, 32 << 20)])
def test_the_largest_threshold_that_glibc_takes_is_set(
    most: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    libc = Libc(most)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: libc)
    keep_freed_memory()
    assert libc.settings == {M_MMAP_THRESHOLD: expected, M_TRIM_THRESHOLD: -1}


def test_other_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())  # musl
    keep_freed_memory()


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

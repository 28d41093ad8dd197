"""Free memory is what machine and control groups leave; freed memory is kept in processes of bastion's own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from bastion import cli, memory
from bastion.errors import BastionError
from bastion.memory import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, keep_freed_memory

CPU = torch.device("cpu")
MACHINE = 64 * 2**30


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 64 GiB available, whose files are below the folder."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "CGROUPS", tmp_path / "cgroup")
    write(tmp_path / "proc", {"meminfo": f"MemTotal: 1 kB\nMemAvailable:   {MACHINE // 1024} kB\n"})
    return tmp_path


def write(folder: Path, files: dict[str, object]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(f"{content}\n")


def group(limit: object, used: int, cache: int) -> dict[str, object]:
    return {"memory.max": limit, "memory.current": used, "memory.stat": f"file 9\ninactive_file {cache}"}


def group_v1(limit: int, used: int, cache: int) -> dict[str, object]:
    stat = f"inactive_file 9\ntotal_inactive_file {cache}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize("path", ["/", "/user.slice/job", "/a/path/of/the/host"])
def test_a_container_has_what_its_limit_leaves_and_the_cache(system: Path, path: str) -> None:
    write(system / "proc" / "self", {"cgroup": f"0::{path}"})
    folder = system / "cgroup" / "user.slice" / "job" if "job" in path else system / "cgroup"
    write(folder, group(8_000, 5_000, 1_500))
    assert memory._available(CPU) == 4_500
    with pytest.raises(BastionError, match=r"here: needs 0\.0 GiB"):
        memory.check_memory(4_501, CPU, "here", "free some")


def test_the_smallest_limit_of_all_groups_above_counts(system: Path) -> None:
    write(system / "proc" / "self", {"cgroup": "0::/slice/job"})
    write(system / "cgroup" / "slice" / "job", group("max", 100, 0))
    write(system / "cgroup" / "slice", group(3_000, 2_000, 0))
    assert memory._available(CPU) == 1_000


def test_control_groups_of_the_first_version(system: Path) -> None:
    write(system / "proc" / "self", {"cgroup": "4:cpu,cpuacct:/job\n3:memory:/job\n0::/"})
    write(system / "cgroup" / "memory" / "job", group_v1(8_000, 5_000, 1_500))
    write(system / "cgroup" / "memory", group_v1(9223372036854771712, 9_000, 0))
    assert memory._available(CPU) == 4_500


def test_without_a_limit_it_is_the_machines(system: Path) -> None:
    assert memory._available(CPU) == MACHINE
    write(system / "proc" / "self", {"cgroup": "0::/"})
    write(system / "cgroup", group("max", 100, 0))
    assert memory._available(CPU) == MACHINE


def test_a_system_that_does_not_tell_refuses_nothing(system: Path) -> None:
    (system / "proc" / "meminfo").unlink()
    assert memory._available(CPU) is None
    memory.check_memory(2**60, CPU, "here", "free some")


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

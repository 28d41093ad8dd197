"""Signals: noted once, and kept from processes that must not act on them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from bastion.signals import ignoring_interrupts, stoppable


@pytest.fixture(autouse=True)
def heard() -> Iterator[None]:
    """A shell may have started these tests with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_the_first_signal_is_a_request_and_the_second_acts() -> None:
    with pytest.raises(KeyboardInterrupt), stoppable() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def _hears() -> bool:
    os.kill(os.getpid(), signal.SIGINT)
    return signal.SIGINT not in signal.sigpending()


def test_processes_started_inside_do_not_hear_an_interruption() -> None:
    """A terminal sends Ctrl-C to all of them; one that still imports would answer with a traceback."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        with ignoring_interrupts():
            answer = pool.submit(_hears)
        assert not answer.result()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_an_interruption_while_processes_start_is_not_lost() -> None:
    with stoppable() as stop:
        with ignoring_interrupts():
            os.kill(os.getpid(), signal.SIGINT)
        assert stop


PARENT = """
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from bastion.signals import end_with_parent

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), end_with_parent)
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for the process in /proc")
def test_a_worker_that_waits_for_work_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout
        worker = int(parent.stdout.readline())
        parent.kill()
    deadline = time.monotonic() + 20
    while (path := Path(f"/proc/{worker}/stat")).exists() and path.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the worker still waits"
        time.sleep(0.05)

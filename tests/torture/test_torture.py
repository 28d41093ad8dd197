"""In short what `make torture` does at length: faults of each kind, and each kind of file damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bastion.run import create_run
from tests.torture import faults

FAULTS = 12


@pytest.mark.processes
def test_whatever_strikes_the_same_command_comes_to_the_same_end(tmp_path: Path) -> None:
    """In a process of its own, from which commands are forked: this one has computed gradients."""
    results = tmp_path / "results.jsonl"
    words = [sys.executable, "-m", "tests.torture", "--count", str(FAULTS), "--seed", "0", "--results", str(results)]
    done = subprocess.run(words, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    struck = [json.loads(line)["result"] for line in results.read_text().splitlines()]
    assert len(struck) == FAULTS
    assert sum(result["struck"] for result in struck) >= FAULTS - 2


def test_a_damaged_file_of_a_run_is_told_or_changes_no_number(tmp_path: Path) -> None:
    from tests.torture.matrix import FILES, RUNS, Matrix

    matrices = (Matrix(tmp_path / str(number), changes) for number, changes in enumerate(RUNS))
    verdicts = [verdict for matrix in matrices for verdict in matrix.verdicts(1, 0, first_reader=True)]
    assert {verdict.kind for verdict in verdicts} == FILES.keys()
    assert [verdict for verdict in verdicts if verdict.outcome.isupper()] == []
    told = {verdict.kind for verdict in verdicts if verdict.outcome == "detected"}
    assert told >= {"recipe", "provenance", "log", "card", "weights", "facts with pictures", "measurement"}
    assert told >= {"card of an epoch", "weights of an epoch", "networks of the objective", "torchrun's id"}
    assert "not read" not in {verdict.outcome for verdict in verdicts if verdict.kind == "older checkpoint"}


def test_a_command_that_starts_over_or_dies_of_nothing_is_noticed(tmp_path: Path) -> None:
    """The harness itself: both end with the right bits."""
    from tests.torture.__main__ import _unclear, _why_repeated
    from tests.torture.commands import Ended

    run = create_run(tmp_path / "run", seed=0)
    over = Ended((0,), "", [], 1.0, stored=frozenset({"a/b 3"}))
    assert "1 stored facts anew, such as a/b 3" in _why_repeated(over, tmp_path, None, {"a/b 2", "a/b 3"})
    assert _why_repeated(over, tmp_path, None, {"a/b 2"}) == ""
    assert "does not go on from step 4" in _why_repeated(over, tmp_path, 4, set())
    run.log({"kind": "event", "step": 4, "message": "resumed at step 4"})
    assert _why_repeated(over, tmp_path, 4, set()) == ""
    killed = Ended((-9,), "", [], 1.0)
    assert _unclear(killed, {9}) == "" and _unclear(killed, set()).startswith("ended by (-9,)")


def test_faults_strike_at_the_call_they_are_meant_for(tmp_path: Path) -> None:
    """The harness itself: a file of three writes, and the disk full at the second."""
    trace, folder = tmp_path / "trace", tmp_path / "folder"
    folder.mkdir()
    if (child := os.fork()) == 0:
        faults.arm(faults.Plan(faults.Fault("full", 3), f"{folder}/", str(trace)))
        status = 0
        try:
            with (folder / "file").open("wb", buffering=0) as file:  # calls 1 to 4
                for part in (b"one", b"two", b"three"):
                    file.write(part)
        except OSError as error:
            status = error.errno or 1
        os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 28  # ENOSPC
    assert (folder / "file").read_bytes() == b"one"
    assert faults.trace_kinds(trace) == ["create", "write", "write"]

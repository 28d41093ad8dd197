"""What the studies of `scripts/` share: jobs in two processes, intervals, verdicts on claims, tables of pages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from bastion.measuring.facts import Facts
from bastion.measuring.intervals import Estimate

PROCESSES = 2
HELD, FAILED, OPEN = "held", "did not hold", "cannot tell"


def in_processes(module: str, jobs: Iterable[Sequence[str]], logs: Path) -> None:
    """Run `python -m module JOB…` for each job, two at a time, of one thread each. What they print goes to `logs`."""
    logs.mkdir(parents=True, exist_ok=True)

    def run(job: Sequence[str]) -> None:
        began, env = time.monotonic(), {**os.environ, "OMP_NUM_THREADS": "1"}
        name = "-".join(part for part in job if not part.startswith("--"))
        with (logs / f"{name}.log").open("a") as log:
            done = subprocess.run([sys.executable, "-m", module, *job], env=env, stdout=log, stderr=log)
        if done.returncode:
            raise SystemExit(f"{' '.join(job)} failed; see {logs / name}.log")
        print(f"{' '.join(job)}: {(time.monotonic() - began) / 60:.1f} minutes", flush=True)

    with ThreadPoolExecutor(PROCESSES) as pool:
        list(pool.map(run, jobs))


def with_label(measured: Sequence[Facts], label: str) -> Facts:
    """The last measurement that has such a probe or study."""
    return next(facts for facts in reversed(measured) if label in facts.labels)


def students_t(values: Sequence[float] | np.ndarray[Any, Any]) -> Estimate:
    """The mean of a few numbers, such as one of each seed, with the 95 % interval of Student's t."""
    n, mean = len(values), float(np.mean(values))
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else math.inf
    return Estimate(mean, mean - half, mean + half, n)


def transformed(found: Estimate, change: Callable[[float], float]) -> Estimate:
    """By a function that is monotonic."""
    value, *ends = (change(each) for each in found[:3])
    return Estimate(value, min(ends), max(ends), found.n)


def minus(found: Estimate) -> Estimate:
    return transformed(found, lambda value: -value)


def verdict(found: Estimate, least: float = 0.0) -> str:
    """Is the number above `least`, as the claim has it?"""
    if found.low > least:
        return HELD
    return FAILED if found.high < least else OPEN


def within(found: Estimate, low: float, high: float) -> str:
    """Is the number between these two, as the claim has it?"""
    if low <= found.low and found.high <= high:
        return HELD
    return FAILED if found.high < low or found.low > high else OPEN


def both(*verdicts: str) -> str:
    """Of a claim in several parts."""
    return next((each for each in (FAILED, OPEN) if each in verdicts), HELD)


def points(found: Estimate) -> str:
    """A difference of shares, in points."""
    return f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def percent(found: Estimate) -> str:
    return f"{100 * found.value:.1f} [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def number(found: Estimate, form: str = ".2f") -> str:
    return f"{found.value:{form}} [{found.low:{form}}, {found.high:{form}}]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

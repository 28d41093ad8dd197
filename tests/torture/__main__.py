"""Strike, run the same command again, compare with a run that was left alone; until the time is up.

    python -m tests.torture --minutes 20 --seed 0
    python -m tests.torture --only "train | kill @37"      one fault once more, with all that was printed

Results are appended to a file, and a fault that stands there is not struck again: a run goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path

from bastion.errors import BastionError
from bastion.measuring.store import FactStore
from bastion.run import Run
from bastion.training.checkpoints import read_state
from tests.torture.commands import Command, Ended, resumed, run, warm_up
from tests.torture.faults import AT_RANDOM, KINDS, SIGNALS, Fault
from tests.torture.record import Record
from tests.torture.scenarios import SCENARIOS, Scenario, files, make_shared

MOMENTS = 40  # faults at random moments, of each kind in each scenario
BADNESS = ("lost", "different", "traceback")


@dataclass(frozen=True)
class Result:
    scenario: str
    kind: str
    fault: str
    struck: bool = True  # False: the command ended before
    lost: str = ""  # why, if it was; the same for the others
    different: str = ""
    traceback: str = ""

    @property
    def name(self) -> str:
        return f"{self.scenario} | {self.fault}"

    @property
    def bad(self) -> bool:
        return any(getattr(self, what) for what in BADNESS)


class Torture:
    """A folder with what is needed to strike, and references to compare with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.shared = folder / "shared"
        make_shared(self.shared)
        self.references: dict[str, tuple[Ended, dict[str, str]]] = {}

    def reference(self, scenario: Scenario) -> tuple[Ended, dict[str, str]]:
        """The command left alone: how it ended, and what counts of it."""
        if scenario.name not in self.references:
            folder = self._prepared(scenario)
            ended = run(scenario.command(folder), folder)
            if ended.code or "Traceback" in ended.output:
                raise SystemExit(f"{scenario.name}: fails by itself:\n{ended.output}")
            self.references[scenario.name] = ended, scenario.counts(folder)
            shutil.rmtree(folder)
        return self.references[scenario.name]

    def _prepared(self, scenario: Scenario) -> Path:
        # Of one length and one name, because pages and cards tell the names of folders.
        folder = self.folder / "work"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        scenario.prepare(folder, self.shared)
        return folder

    def strike(self, scenario: Scenario, fault: Fault, *, verbose: bool = False) -> Result:
        reference, wanted = self.reference(scenario)
        folder = self._prepared(scenario)
        command = scenario.command(folder)
        before = files(folder, scenario.replaces) if scenario.replaces else {}
        beside: list[Ended] = []

        def meanwhile() -> None:
            if fault.kind == "twice":
                beside.append(run(command, folder))
            elif fault.kind == "report":
                beside.append(run(Command(("report", str(folder / "run"), "-o", f"{folder}.html")), folder))

        timed = fault if fault.moment is None else Fault(fault.kind, None, fault.moment * reference.seconds)
        first = run(command, folder, timed, meanwhile)
        replaced = files(folder, scenario.replaces) if scenario.replaces else {}
        step, stored = newest_step(folder / "run"), stored_facts(folder / "run")
        second = run(resumed(command), folder)
        found = scenario.counts(folder) if second.code == 0 else {}
        if verbose:
            for ended in (first, *beside, second):
                print(f"--- {ended.codes} after {ended.seconds:.1f} s, {len(ended.calls)} file calls\n{ended.output}")
        ended = (first, *beside, second)
        # A leaderboard leaves out what it cannot read, and says so.
        torn = replaced not in (before, _part(wanted, before)) and "left out: " not in first.output
        lost = _why_lost(second, any(each.hung for each in ended), torn) or _why_repeated(second, folder, step, stored)
        differing = [name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name)]
        struck = fault.moment is not None or len(first.calls) >= (fault.call or 0)
        return Result(
            scenario.name,
            f"{fault.kind} at random" if fault.moment is not None else fault.kind,
            str(fault),
            struck,
            lost,
            "" if lost else ", ".join(sorted(differing)),
            next((text for each in ended if (text := _unclear(each, sent_by(fault, each, each is first)))), ""),
        )


def _part(wanted: dict[str, str], names: dict[str, str]) -> dict[str, str]:
    """Files that are replaced, by their names in the folder or below `model/`."""
    return {name: wanted[name.rpartition("/")[2]] for name in names}


def _why_lost(second: Ended, hung: bool, torn: bool) -> str:
    if hung:
        return "a command did not end"
    if second.code:
        return f"run again, it exits with {second.codes}: {second.output.strip()[-300:]}"
    return "the file that is replaced was neither old nor new" if torn else ""


def newest_step(run: Path) -> int | None:
    """The step of the newest whole checkpoint."""
    for path in sorted(run.glob("checkpoints/step-*.safetensors"), reverse=True):
        with suppress(BastionError):
            return int(read_state(path)["step"])
    return None


def stored_facts(run: Path) -> set[str]:
    """All facts of a run, `STORE POSITION`."""
    stores = [FactStore(folder) for folder in run.glob("facts/*/*") if folder.is_dir()]
    return {f"{store.name} {position}" for store in stores for position in store.stored([])["position"].tolist()}


def _why_repeated(second: Ended, folder: Path, step: int | None, stored: set[str]) -> str:
    """A command that starts over ends with the same bits: it must go on from what was stored."""
    if again := sorted(second.stored & stored):
        return f"run again, it measures {len(again)} stored facts anew, such as {again[0]}"
    if step is None:
        return ""
    said = [record["message"] for record in Run(folder / "run").history() if record["kind"] == "event"]
    return "" if f"resumed at step {step}" in said else f"run again, it does not go on from step {step}"


def sent_by(fault: Fault, ended: Ended, struck: bool) -> set[int]:
    """Signals that may end a process: what torchrun sends to the others when one has failed, and that of the fault."""
    others = {signal.SIGTERM, signal.SIGKILL} if len(ended.codes) > 1 else set()
    return others | ({SIGNALS.get(fault.kind.removesuffix("-half"), 0)} if struck else set())


def _unclear(ended: Ended, sent: set[int]) -> str:
    """A traceback, an exit without a word, or a signal that nobody sent."""
    if any(code < 0 and -code not in sent for code in ended.codes) and not ended.hung:
        return f"ended by {ended.codes}: {ended.output[-300:]}"
    if "Traceback (most recent" in ended.output or "Exception ignored" in ended.output:
        return ended.output.strip()[-2000:]
    silent = all(not line.startswith(("error: ", "stopped: ")) for line in ended.output.splitlines())
    if silent and any(code > 0 and code < 128 for code in ended.codes):
        return f"exits with {ended.codes} and says nothing of it: {ended.output[-300:]}"
    return ""


def faults(scenario: Scenario, calls: list[str], chance: random.Random) -> list[list[Fault]]:
    """All there are, by kind, each kind in random order."""
    kinds = [kind for kind in KINDS if kind != "report" or not scenario.replaces]
    groups = []
    for kind in kinds:
        numbers = [number for number, call in enumerate(calls, 1) if call in KINDS[kind]]
        groups.append([Fault(kind, number) for number in chance.sample(numbers, len(numbers))])
    return groups + [[Fault(kind, moment=round(chance.random(), 3)) for _ in range(MOMENTS)] for kind in AT_RANDOM]


def in_turn(torture: Torture, names: list[str], seed: int) -> Iterator[tuple[Scenario, Fault]]:
    """One of each kind in each scenario, then the next ones."""
    groups = []
    for name in names:
        chance = random.Random(f"{seed} {name}")
        calls = torture.reference(SCENARIOS[name])[0].calls
        groups += [[(SCENARIOS[name], fault) for fault in group] for group in faults(SCENARIOS[name], calls, chance)]
    random.Random(seed).shuffle(groups)
    yield from (pair for pair in chain.from_iterable(zip_longest(*groups)) if pair)


def table(results: list[Result]) -> str:
    """Faults by scenario: how many were struck; and what went wrong. Markdown."""
    struck = [result for result in results if result.struck]
    scenarios = [name for name in SCENARIOS if any(result.scenario == name for result in struck)]
    kinds = [*KINDS, *(f"{kind} at random" for kind in AT_RANDOM)]
    rows = {kind: [result for result in struck if result.kind == kind] for kind in kinds}
    rows["**faults**"] = struck
    rows |= {f"**{what}**": [result for result in struck if getattr(result, what)] for what in BADNESS}
    lines = [f"| | {' | '.join(scenarios)} | all |", f"| --- |{' ---: |' * (len(scenarios) + 1)}"]
    for name, row in rows.items():
        counts = Counter(result.scenario for result in row)
        lines.append(f"| {name} | {' | '.join(str(counts[each]) for each in scenarios)} | {len(row)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--count", type=int, default=10**6, help="no more than so many faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="the name of a fault, or a part of it")
    parser.add_argument("--scenarios", nargs="*", default=list(SCENARIOS), metavar="NAME")
    parser.add_argument("--results", type=Path, help="default: torture/seed-SEED.jsonl")
    given = parser.parse_args()
    began = time.monotonic()
    record = Record(given.results or Path("torture") / f"seed-{given.seed}.jsonl")
    done = set(record.results)
    warm_up()
    folder = Path(tempfile.mkdtemp(prefix="torture-")).resolve()
    try:
        torture, struck = Torture(folder), 0
        for scenario, fault in in_turn(torture, given.scenarios, given.seed):
            name = f"{scenario.name} | {fault}"
            if given.only not in name or (name in done and not given.only):
                continue
            if struck >= given.count or time.monotonic() - began > 60 * given.minutes:
                break
            struck += 1
            result = torture.strike(scenario, fault, verbose=bool(given.only))
            record.add(name, asdict(result))
            if result.bad:
                print(f"{name}: {asdict(result)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    results = [Result(**each) for each in record.results.values()]
    print(table(results))
    return int(any(result.bad for result in results))


if __name__ == "__main__":
    sys.exit(main())

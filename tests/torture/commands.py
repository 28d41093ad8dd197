"""Commands as forks of this process, which has imported everything and computed nothing: each starts at once.

This process must never run a model: torch's autograd does not survive a fork.
"""

from __future__ import annotations

import atexit
import gc
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import torch.distributed as dist

import bastion.cli
import bastion.measuring.runner
import bastion.reporting.html
import bastion.reporting.leaderboard
import bastion.reporting.leaderboard_files
import bastion.run
import bastion.training.trainer
from bastion.attacks import attacks
from bastion.data import datasets
from bastion.measuring import executors
from bastion.measuring.worker import Worker
from bastion.models import checkpoint, models
from bastion.probes import probes
from bastion.studies import studies
from bastion.training.objectives import objectives
from tests.torture.faults import VARIABLE, Fault, Plan, arm, start_worker, trace_kinds

PLUGINS = Path(__file__).parent / "plugins"
HANG = 240.0  # seconds after which a command is taken to wait for ever: machines may be busy
PATIENCE = 30.0  # that torchrun has with processes that are to end
NONE = Fault("kill", None)
_runs = itertools.count()
MODEL = {"name": "vit/micro", "img_size": 8, "stem": [4, 4], "embed_dim": 8, "depth": 1, "num_heads": 2}
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "BASTION_PLUGINS": str(PLUGINS), "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Command:
    """Words behind `bastion`; or a function. `ranks`: as many processes as torchrun would start."""

    words: tuple[str, ...]
    ranks: int = 1
    function: Callable[[], None] | None = None


@dataclass(frozen=True)
class Ended:
    codes: tuple[int, ...]  # of the processes; negative: the signal that ended one
    output: str
    calls: list[str]  # kinds of its file calls
    seconds: float
    hung: bool = False
    stored: frozenset[str] = frozenset()  # facts that it has measured, `STORE POSITION`

    @property
    def code(self) -> int:
        return next((code for code in self.codes if code), 0)


def warm_up() -> None:
    """Find all plug-ins, and import what workers import, once for all processes of all commands."""
    os.environ.update(ENVIRONMENT)
    for registry in (attacks, datasets, models, objectives, probes, studies):
        registry.names()
    multiprocessing.set_forkserver_preload([Worker.__module__, "tests.torture.faults"])
    forkserver.ensure_running()
    gc.freeze()  # what children never touch is not copied for them


def run(command: Command, folder: Path, fault: Fault = NONE, meanwhile: Callable[[], None] | None = None) -> Ended:
    """Run a command to its end, or until the fault ends it; `meanwhile` is called when the fault has stopped it.

    Files that count are below `folder`; its output and the trace of its file calls go beside it for the time being.
    """
    output, trace = (folder.with_name(f"{folder.name}.{next(_runs)}.{kind}") for kind in ("output", "trace"))
    plan = Plan(fault, f"{folder}/", str(trace))
    began = time.monotonic()
    with output.open("wb") as file:
        if command.ranks == 1:
            processes = [_fork(command, plan, file.fileno(), {})]
            codes, hung = _follow(processes, plan, began, meanwhile)
        else:
            server, port = _store_server()
            ranks = [_rank(number, command.ranks, port) for number in range(command.ranks)]
            processes = [_fork(command, plan, file.fileno(), each) for each in ranks]
            codes, hung = _follow(processes, plan, began, meanwhile)
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
    new = Path(f"{trace}.stored")
    stored = frozenset(new.read_text().splitlines() if new.exists() else ())
    seconds = time.monotonic() - began
    ended = Ended(codes, output.read_text(errors="replace"), trace_kinds(trace), seconds, hung, stored)
    for path in (output, trace, new):
        path.unlink(missing_ok=True)
    return ended


def _follow(
    processes: list[int], plan: Plan, began: float, meanwhile: Callable[[], None] | None
) -> tuple[tuple[int, ...], bool]:
    """Wait for all of them. As torchrun does, end the others when one has failed."""
    codes: dict[int, int] = {}
    failed = math.inf  # when
    strike = math.inf if plan.fault.moment is None else began + plan.fault.moment
    stopped = Path(f"{plan.trace}.stopped")
    while len(codes) < len(processes):
        time.sleep(0.005)
        now = time.monotonic()
        if now > strike:
            strike = math.inf
            _strike(processes, plan.fault)
        if stopped.exists() and (text := stopped.read_text()):
            stopped.unlink()
            _go_on(int(text), meanwhile)
        for process in [each for each in processes if each not in codes]:
            found, status = os.waitpid(process, os.WNOHANG)
            if found:
                codes[process] = os.waitstatus_to_exitcode(status)
                if codes[process] and failed == math.inf:
                    failed = now
                    for other in set(processes) - codes.keys():
                        os.kill(other, signal.SIGTERM)
        hung = now > began + HANG
        if hung or now > failed + PATIENCE:
            for process in set(processes) - codes.keys():
                os.killpg(process, signal.SIGKILL)
                codes[process] = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            return tuple(codes[process] for process in processes), hung
    return tuple(codes[process] for process in processes), False


def _go_on(process: int, meanwhile: Callable[[], None] | None) -> None:
    """Let a process that has stopped itself go on, after what is to happen meanwhile."""
    while Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "T":
        time.sleep(0.002)
    if meanwhile:
        meanwhile()
    os.kill(process, signal.SIGCONT)


def _strike(processes: list[int], fault: Fault) -> None:
    """At a moment: the last process of a command, or all of their groups with what a shell sends to a group."""
    with suppress(ProcessLookupError):  # it has ended by itself
        if fault.kind == "term":
            for process in processes:
                os.killpg(process, signal.SIGTERM)
            return
        os.kill(processes[-1], signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)
        if fault.kind == "stop":
            time.sleep(0.2)
            os.kill(processes[-1], signal.SIGCONT)


def _rank(number: int, ranks: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives its processes."""
    return {
        "RANK": str(number),
        "LOCAL_RANK": str(number),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "torture",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _store_server() -> tuple[int, int]:
    """A process that keeps the store of torchrun's agent, and its port."""
    reading, writing = os.pipe()
    server = os.fork()
    if server == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        os.write(writing, str(store.port).encode())
        while True:
            signal.pause()
    os.close(writing)
    port = int(os.read(reading, 16))
    os.close(reading)
    return server, port


def _fork(command: Command, plan: Plan, output: int, environment: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        nothing = os.open(os.devnull, os.O_RDONLY)
        for number, file in enumerate((nothing, output, output)):
            os.dup2(file, number)
        os.environ.update({**ENVIRONMENT, **environment, VARIABLE: plan.text()})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        forkserver._forkserver.ensure_running = lambda: None  # that of the parent serves all
        executors._start = start_worker
        bastion.run.time = SimpleNamespace(sleep=lambda seconds: None)  # a second command is refused at once
        arm(plan)
        status = _call(command)
        threading._shutdown()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _call(command: Command) -> int:
    """As the interpreter ends a script."""
    try:
        if command.function:
            command.function()
        else:
            sys.argv = ["bastion", *command.words]
            bastion.cli.main()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def save_model(folder: Path, seed: int) -> Command:
    """Python's way to store a model, as one command."""

    def save() -> None:
        from bastion.errors import BastionError

        model = {**MODEL, "num_classes": 3}
        stats = {"mean": (0.4,) * 3, "std": (0.2,) * 3, "shape": (3, 8, 8)}
        try:
            checkpoint.save(checkpoint.build(model, **stats, seed=seed), folder, {"seed": seed})
        except BastionError as error:
            print(f"error: {error}")
            raise SystemExit(1) from None
        except KeyboardInterrupt:
            raise SystemExit(130) from None

    return Command((f"save {folder}",), function=save)


def resumed(command: Command) -> Command:
    """What people type to go on."""
    return replace(command, words=(*command.words, "--resume")) if command.words[0] == "train" else command

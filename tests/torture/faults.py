"""File calls that are counted, and a fault that strikes at one of them.

`arm` works on the process that calls it and cannot be undone: it is for forked children. Python announces every open,
rename, removal and new folder to audit hooks, which may raise; writes and fsync are caught by a file class and a
function of our own. Every call below the tortured folder appends a record of fixed length to a trace, so that its place
there is its number among the calls of all processes of the command, and exactly one of them is struck.
"""

from __future__ import annotations

import builtins
import errno
import io
import json
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from bastion.measuring.store import FactStore

plain_open = io.open
RECORD = 16  # bytes of a trace per call
VARIABLE = "TORTURE"  # of the environment, by which worker processes are told
DAY = 86400.0

READS = ("read", "list")
CHANGES = ("create", "write", "fsync", "rename", "remove", "mkdir", "lock")
# Which calls a fault can strike at.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": READS + CHANGES,  # SIGKILL before the call
    "kill-half": ("write",),  # SIGKILL after half of the bytes
    "term": READS + CHANGES,  # SIGTERM
    "int": READS + CHANGES,  # Ctrl-C
    "stop": READS + CHANGES,  # SIGSTOP, and SIGCONT a moment later
    "twice": READS + CHANGES,  # SIGSTOP; the same command runs to its end beside it; SIGCONT
    "report": READS + CHANGES,  # SIGSTOP; `bastion report` of the folder as it is; SIGCONT
    "full": ("create", "write", "fsync", "rename", "mkdir"),  # ENOSPC here and at every later call
    "full-half": ("write",),  # the same, after half of the bytes
    "eio": (*READS, *CHANGES),  # once
    "readonly": ("create", "rename", "remove", "mkdir"),  # EROFS here and at every later call
    "short": ("write",),  # half of the bytes are written, and the call says so
    "fsync": ("fsync",),  # EIO
    "clock": READS + CHANGES,  # a day back
}
AT_RANDOM = ("kill", "term", "stop")  # also at any moment, not at a call


@dataclass(frozen=True)
class Fault:
    """`call`: the number of the file call; or `moment`, the share of the command's usual time."""

    kind: str
    call: int | None = None
    moment: float | None = None

    def __str__(self) -> str:
        return f"{self.kind} @{self.call}" if self.moment is None else f"{self.kind} ~{self.moment:.3f}"


@dataclass(frozen=True)
class Plan:
    """What a process needs to know to be struck."""

    fault: Fault
    root: str  # calls below it count
    trace: str

    def text(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def read(text: str) -> Plan:
        said = json.loads(text)
        return Plan(Fault(**said["fault"]), said["root"], said["trace"])


class Striker:
    """Counts calls, and strikes."""

    def __init__(self, plan: Plan) -> None:
        self.fault, self.root, self.trace_path = plan.fault, plan.root, plan.trace
        self.trace = os.open(plan.trace, os.O_RDWR | os.O_CREAT | os.O_APPEND)

    def covers(self, path: Any) -> str | None:
        if isinstance(path, int):
            try:
                path = os.readlink(f"/proc/self/fd/{path}")
            except OSError:
                return None
        try:
            text = os.fsdecode(os.fspath(path))
        except TypeError:
            return None
        return text if text.startswith(self.root) else None

    def number(self, kind: str) -> int:
        os.write(self.trace, f"{kind:<{RECORD - 1}}\n".encode())
        return os.lseek(self.trace, 0, os.SEEK_CUR) // RECORD

    def call(self, kind: str, path: str) -> bool:
        """True: only half of a write is to be done, and `after_half` called."""
        number, fault = self.number(kind), self.fault
        if fault.call is None or number < fault.call or kind not in KINDS[fault.kind]:
            return False
        if fault.kind in ("full", "full-half") and (number > fault.call or fault.kind == "full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        if fault.kind == "readonly":
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        if number > fault.call:
            return False
        if fault.kind in ("eio", "fsync"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        if fault.kind == "clock":
            set_clock_back()
        if SIGNALS.get(fault.kind) == signal.SIGSTOP:  # whoever waits for the command learns which process it was
            self.note_stopped()
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        return fault.kind in ("kill-half", "full-half", "short")

    def note_stored(self, case: str, positions: Any) -> None:
        """New facts: what was stored before must not be measured again."""
        with plain_open(f"{self.trace_path}.stored", "a") as file:
            file.write("".join(f"{case} {position}\n" for position in positions))

    def note_stopped(self) -> None:
        file = os.open(f"{self.trace_path}.stopped", os.O_WRONLY | os.O_CREAT)
        os.write(file, str(os.getpid()).encode())
        os.close(file)

    def after_half(self, path: str) -> None:
        if self.fault.kind == "kill-half":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fault.kind == "full-half":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


SIGNALS = {
    "kill": signal.SIGKILL,
    "term": signal.SIGTERM,
    "int": signal.SIGINT,
    **dict.fromkeys(("stop", "twice", "report"), signal.SIGSTOP),
}
_EVENTS = {
    "os.rename": "rename",
    "os.remove": "remove",
    "os.mkdir": "mkdir",
    "os.rmdir": "remove",
    "os.scandir": "list",
    "os.listdir": "list",
    "fcntl.flock": "lock",
}


def arm(plan: Plan) -> None:
    """From here on the file calls of this process count."""
    striker = Striker(plan)

    def hook(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = given
            kind = "create" if _writes(mode, flags) else "read"
        elif event in _EVENTS:
            path, kind = given[0], _EVENTS[event]
        else:
            return
        if (text := striker.covers(path)) is not None:
            striker.call(kind, text)

    class File(io.FileIO):
        def write(self, content: Any, /) -> int:
            view = memoryview(content).cast("B")
            path = striker.covers(self.fileno())
            if path is None or not striker.call("write", path):
                return super().write(view)
            done = super().write(view[: max(1, len(view) // 2)])
            striker.after_half(path)
            return done

    plain_fsync = os.fsync

    def struck_open(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        if not set(mode) & set("wax+") or striker.covers(file) is None:
            return plain_open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = File(file, mode.replace("b", "").replace("t", ""), closefd, opener)
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding or "utf-8", errors, newline)

    def struck_fsync(file: int) -> None:
        if (path := striker.covers(file)) is not None:
            striker.call("fsync", path)
        plain_fsync(file)

    def write(store: FactStore, positions: Any, *rest: Any) -> None:
        plain_write(store, positions, *rest)
        striker.note_stored(store.name, positions)

    plain_write = FactStore.write
    FactStore.write = write  # type: ignore[method-assign]
    io.open = builtins.open = struck_open  # type: ignore[assignment]
    os.fsync = struck_fsync
    sys.addaudithook(hook)


def _writes(mode: str | None, flags: int) -> bool:
    return bool(set(mode or "") & set("wax+")) or bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def set_clock_back() -> None:
    """The wall clock of this process alone; what counts seconds goes on, as it does on a real machine."""
    import bastion.run

    class Earlier(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) - timedelta(seconds=DAY)

    wall = time.time
    time.time = lambda: wall() - DAY
    bastion.run.datetime = Earlier  # type: ignore[misc]


def start_worker(*given: Any) -> None:
    """In place of the function that a worker process begins with."""
    from bastion.measuring import executors

    environment = given[-1]
    arm(Plan.read(environment[VARIABLE]))
    executors._start(*given)


def trace_kinds(path: Path) -> list[str]:
    """The kinds of all calls, the first one first."""
    return [line.strip() for line in path.read_text().splitlines()] if path.exists() else []

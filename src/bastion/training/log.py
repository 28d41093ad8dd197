"""The training log: jsonl for bastion, TensorBoard for people who like it, a line for the progress bar."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from bastion import storage
from bastion.progress import console
from bastion.run import Run


def note(run: Run, step: int, message: str, *, quiet: bool = False, **more: Any) -> None:
    """An event in the log and, unless `quiet`, on the screen."""
    run.log({"kind": "event", "step": step, "message": message, **more})
    if not quiet:
        console.print(message, markup=False)


class Log:
    """`silent`: of several processes one keeps the log."""

    def __init__(self, run: Run, step: int, *, silent: bool = False) -> None:
        self.run = run
        self.images = 0  # since the last record
        self.since = time.monotonic()
        with self._disk_errors():
            self.board = None if silent else SummaryWriter(str(run.tensorboard), purge_step=step or None)

    def __enter__(self) -> Log:
        self.hook, threading.excepthook = threading.excepthook, self._ignore_disk_errors
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with suppress(OSError) if error else self._disk_errors():  # the first error is the one to tell
                if self.board:
                    self.board.close()
        finally:
            threading.excepthook = self.hook

    def write_step(self, record: dict[str, Any], waited: float) -> str:
        """Store one step's numbers; returns them as a few words. `stall`: the share of time spent waiting for data."""
        seconds = time.monotonic() - self.since
        speed = {"images_per_s": self.images / seconds, "seconds": seconds, "stall": waited / seconds}
        record = {"kind": "step", **record, **speed}
        self._store("train", record)
        self.images, self.since = 0, time.monotonic()
        words = [f"loss {record['loss']:.3f}", f"clean {100 * record['clean_accuracy']:.0f} %"]
        if "robust_accuracy" in record:
            words.append(f"robust {100 * record['robust_accuracy']:.0f} %")
        return "  ".join([*words, f"{record['images_per_s']:.0f} images/s"])

    def write_epoch(self, record: dict[str, Any], epochs: int) -> None:
        """Store an epoch's numbers, and say them in a line."""
        self.since = time.monotonic()
        if not self.board:
            return
        self._store("validation", {"kind": "epoch", **record})
        with self._disk_errors():
            self.board.flush()
        words = [f"{self.run.name}  epoch {record['epoch']}/{epochs}"]
        for name in ("clean", "robust"):
            if f"val_{name}" in record:
                words.append(f"{name} {100 * record[f'val_{name}']:.1f} %")
        console.print("  ".join(words), markup=False)

    def _store(self, group: str, record: dict[str, Any]) -> None:
        if not self.board:
            return
        self.run.log(record)
        with self._disk_errors():
            for name, value in record.items():
                if isinstance(value, float):
                    self.board.add_scalar(f"{group}/{name}", value, record["step"])

    def _ignore_disk_errors(self, failed: threading.ExceptHookArgs) -> None:
        """The board writes in a thread, whose error the next call raises again: no need to print it, too."""
        if not isinstance(failed.exc_value, OSError):
            self.hook(failed)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """A full disk in a line."""
        try:
            yield
        except OSError as error:
            raise storage.disk_error(self.run.tensorboard, error) from error

"""The training log: jsonl for bastion, loggers for the tools that people like, a line for the progress bar."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

from bastion import storage
from bastion.errors import BastionError
from bastion.progress import console
from bastion.run import Run
from bastion.training.loggers.tensorboard import TensorBoard
from bastion.types import Logger


def note(run: Run, step: int, message: str, *, quiet: bool = False, **more: Any) -> None:
    """An event in the log and, unless `quiet`, on the screen."""
    run.log({"kind": "event", "step": step, "message": message, **more})
    if not quiet:
        console.print(message, markup=False)


class Log:
    """`silent`: of several processes one keeps the log."""

    def __init__(
        self, run: Run, step: int, recipe: Mapping[str, Any], loggers: Sequence[Logger], *, silent: bool = False
    ) -> None:
        self.run, self.step, self.recipe, self.silent = run, step, recipe, silent
        self.wanted, self.loggers = [] if silent else loggers, list[Logger]()  # the second: those that are open
        self.images = 0  # since the last record
        self.since = time.monotonic()

    def __enter__(self) -> Log:
        self.hook, threading.excepthook = threading.excepthook, self._ignore_disk_errors
        try:
            for logger in self.wanted:
                with self._errors_of(logger):
                    logger.open(self.run.folder, self.recipe, self.step)
                self.loggers.append(logger)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            for logger in self.loggers:
                with suppress(OSError) if error else self._errors_of(logger):  # the first error is the one to tell
                    logger.close()
        finally:
            for thread in threading.enumerate() if error else ():
                if type(thread).__module__.startswith("tensorboard."):  # failed, and about to tell the hook
                    thread.join(timeout=1)
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
        if self.silent:
            return
        self._store("validation", {"kind": "epoch", **record})
        for logger in self.loggers:
            with self._errors_of(logger):
                logger.flush()
        words = [f"{self.run.name}  epoch {record['epoch']}/{epochs}"]
        for name in ("clean", "robust"):
            if f"val_{name}" in record:
                words.append(f"{name} {100 * record[f'val_{name}']:.1f} %")
        console.print("  ".join(words), markup=False)

    def _store(self, group: str, record: dict[str, Any]) -> None:
        if self.silent:
            return
        self.run.log(record)
        numbers = {f"{group}/{name}": value for name, value in record.items() if isinstance(value, float)}
        for logger in self.loggers:
            with self._errors_of(logger):
                logger.write(numbers, record["step"])

    def _ignore_disk_errors(self, failed: threading.ExceptHookArgs) -> None:
        """TensorBoard writes in a thread, whose error the next call raises again: no need to print it, too."""
        if not isinstance(failed.exc_value, OSError):
            self.hook(failed)

    @contextmanager
    def _errors_of(self, logger: Logger) -> Iterator[None]:
        """A full disk, or a server that cannot be reached, in a line."""
        try:
            yield
        except OSError as error:
            if isinstance(logger, TensorBoard):
                raise storage.disk_error(self.run.tensorboard, error) from error
            raise BastionError(
                f"the logger {type(logger).__name__} failed: {error}; go on with --resume, and without it if need be: "
                "`loggers` may change"
            ) from error

"""Graceful stop at SIGINT and SIGTERM, and worker processes that end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process, resource_tracker
from types import FrameType


class StopRequest:
    """`received`: the number of the signal, None if there was none."""

    received: int | None = None

    def __bool__(self) -> bool:
        return self.received is not None


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM; a second one acts at once, as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request  # only the main thread may set handlers
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: FrameType | None) -> None:
        request.received = number
        restore()

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    for number in previous:
        signal.signal(number, note)
    try:
        yield request
    finally:
        restore()


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Processes started inside ignore Ctrl-C from the start; their parent handles it."""
    if not hasattr(signal, "pthread_sigmask"):  # not on every system
        yield
        return
    resource_tracker.ensure_running()  # it would unblock the signal when it starts
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Make this process end as soon as its parent is gone, even if that was killed."""
    parent = parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)  # safe, as files are whole or absent

    threading.Thread(target=follow, daemon=True).start()

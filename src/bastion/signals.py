"""SIGINT and SIGTERM as a request that is honoured at the next safe point; processes that end with their parent."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import parent_process, resource_tracker
from types import FrameType


class StopRequest:
    """`received` is the number of the signal, or None so far."""

    received: int | None = None

    def __bool__(self) -> bool:
        return self.received is not None


@contextmanager
def stoppable() -> Iterator[StopRequest]:
    """Catch the first SIGINT or SIGTERM; a second one acts at once, as it would have without this."""
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
def deaf_children() -> Iterator[None]:
    """Processes started inside never hear Ctrl-C, from their first instruction on: their parent decides."""
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
    """From here on this process ends as soon as its parent is gone, even one that was killed and could not say so."""
    parent = parent_process()
    if parent is None:
        return

    def follow() -> None:
        parent.join()
        os._exit(1)  # what a block has written is whole or absent

    threading.Thread(target=follow, daemon=True).start()

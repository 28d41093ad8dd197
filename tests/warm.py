"""`bastion` and `python -c` as processes that need not import torch first: forked from one that has.

python warm.py SOCKET          serves until the process $WATCHED is gone
python warm.py SOCKET ARGS…    runs `bastion ARGS…` there: same folder, environment and files, same exit status
"""

from __future__ import annotations

import array
import importlib
import json
import os
import pkgutil
import runpy
import socket
import sys
from pathlib import Path
from typing import IO

MOST = 1 << 20  # bytes of a request


def serve(address: str) -> None:
    _import_everything()
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(f"{address}.new")
    listening.listen()
    os.rename(f"{address}.new", address)  # whoever sees it is heard
    listening.settimeout(1)
    while _is_alive(int(os.environ["WATCHED"])):
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        child = os.fork()
        if child == 0:
            listening.close()
            if os.fork() == 0:  # nobody has to wait for it
                answer(connection)
            os._exit(0)
        os.waitpid(child, 0)
        connection.close()


def _import_everything() -> None:
    """But for plug-ins of users, which whoever is forked looks for in its own environment."""
    import bastion
    from bastion.data import mini

    for module in pkgutil.walk_packages(bastion.__path__, "bastion."):
        if module.name != "bastion.__main__":
            importlib.import_module(module.name)
    mini.cifar10_mini()


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def answer(connection: socket.socket) -> None:
    """Run a request in a child; tell its number, and when it has ended its exit status."""
    connection.settimeout(None)
    sent, passed, _, _ = connection.recvmsg(MOST, socket.CMSG_SPACE(12))
    files = array.array("i", passed[0][2])
    request = json.loads(sent)
    child = os.fork()
    if child:
        connection.sendall(f"{child}\n".encode())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(f"{status}\n".encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    _take_one_core(os.environ.get("PYTEST_XDIST_WORKER", "gw0"))
    os.setsid()
    run(request["arguments"])


def _take_one_core(worker: str) -> None:
    """As many worker processes are started as there are cores; the other ones have tests of their own to run."""
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(worker.removeprefix("gw")) % len(cores)]})


def run(arguments: list[str]) -> None:
    try:
        if arguments[:1] == ["-c"]:
            sys.argv = ["-c"]
            exec(compile(arguments[1], "<example>", "exec", dont_inherit=True), {"__name__": "__main__"})
        else:
            sys.argv = ["bastion", *arguments]
            runpy.run_module("bastion", run_name="__main__")
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    else:
        status = 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class Started:
    """`bastion` with these arguments, as a process of its own that reads and writes these files."""

    def __init__(self, address: str | Path, *arguments: str, files: tuple[int, int, int] = (0, 1, 2)) -> None:
        request = {"folder": str(Path.cwd()), "environment": dict(os.environ), "arguments": arguments}
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(str(address))
        self._connection.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
        )
        self._told: IO[str] = self._connection.makefile()
        self.pid = int(self._told.readline())

    def is_running(self) -> bool:
        return _is_alive(self.pid)

    def wait(self) -> int:
        """The exit status; of a process that a signal ended, minus its number."""
        with self._connection, self._told:
            return int(self._told.readline())


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(Started(sys.argv[1], *sys.argv[2:]).wait())

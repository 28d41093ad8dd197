"""`bastion` and `python -c` as processes that need not import torch first: forked from one that has.

python warm.py SOCKET          serves until its parent is gone
python warm.py SOCKET ARGS…    runs `bastion ARGS…` there: same folder, environment and files, same exit status
"""

from __future__ import annotations

import array
import json
import os
import runpy
import socket
import sys
from pathlib import Path

MOST = 1 << 20  # bytes of a request


def serve(address: str) -> None:
    import bastion.cli
    import bastion.measuring.runner
    import bastion.reporting.html
    import bastion.show
    import bastion.training.trainer  # noqa: F401

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen()
    parent = os.getppid()
    listening.settimeout(1)
    while os.getppid() == parent:
        try:
            connection, _ = listening.accept()
        except TimeoutError:
            continue
        if os.fork() == 0:
            listening.close()
            answer(connection)
        connection.close()


def answer(connection: socket.socket) -> None:
    """Run a request in a child, and tell its exit status."""
    connection.settimeout(None)
    sent, passed, _, _ = connection.recvmsg(MOST, socket.CMSG_SPACE(12))
    files = array.array("i", passed[0][2])
    request = json.loads(sent)
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        connection.sendall(json.dumps(status).encode())
        os._exit(0)
    for number, file in enumerate(files):
        os.dup2(file, number)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.setsid()
    run(request["arguments"])


def run(arguments: list[str]) -> None:
    try:
        if arguments[:1] == ["-c"]:
            sys.argv = ["-c"]
            exec(compile(arguments[1], "<example>", "exec"), {"__name__": "__main__"})
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


def ask(address: str, arguments: list[str]) -> int:
    request = {"folder": str(Path.cwd()), "environment": dict(os.environ), "arguments": arguments}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        connection.sendmsg(
            [json.dumps(request).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))]
        )
        return int(json.loads(connection.recv(64)))


if __name__ == "__main__":
    if len(sys.argv) == 2:
        serve(sys.argv[1])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))

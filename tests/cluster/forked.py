"""Run `launcher` in a process of its own, forked from one that has imported it.

A fresh interpreter takes most of a second of processor time to import what a command needs,
hundreds of times in a run of these tests. Exit code, streams, working directory and environment are
the process's own; only the imports are shared. Tests that signal a process, or need a fresh one,
start one of their own.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
MODULE = "jaxlaunch.launcher.cli.main"
NOT_IMPORTED = ("jaxlaunch.launcher.agent",)  # it runs in pods


def run_forked(
    arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run `launcher ARGUMENTS` to its end. Kill it and raise TimeoutExpired after `timeout` s."""
    request = json.dumps({"arguments": arguments, "cwd": os.fspath(cwd), "env": dict(env)}).encode()
    with (
        tempfile.TemporaryFile("w+") as out,
        tempfile.TemporaryFile("w+") as err,
        socket.socket(socket.AF_UNIX) as end,
    ):
        end.connect(os.fspath(start_server()))
        socket.send_fds(end, [len(request).to_bytes(4, "big")], [out.fileno(), err.fileno()])
        end.sendall(request)
        answers = end.makefile()
        pid = int(answers.readline())
        end.settimeout(timeout)
        try:
            code = int(answers.readline())
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired(list(arguments), timeout) from None
        for stream in (out, err):
            stream.seek(0)
        return subprocess.CompletedProcess(["launcher", *arguments], code, out.read(), err.read())


@functools.cache
def start_server() -> Path:
    """Return the socket of this process's server, which starts on the first call."""
    folder = tempfile.TemporaryDirectory(prefix="forked-")
    atexit.register(folder.cleanup)
    path = Path(folder.name, "socket")
    command = [sys.executable, "-m", "tests.cluster.forked", path]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    atexit.register(process.kill)
    assert process.stdout.readline() == b"ready\n", "the server of commands did not start"
    return path


def serve(path: str) -> None:
    """Fork a process for each request until the process that started this one has ended."""
    sys.argv[:] = [importlib.import_module(MODULE).__file__ or MODULE]
    for module in pkgutil.walk_packages(
        importlib.import_module("jaxlaunch.launcher").__path__, "jaxlaunch.launcher."
    ):
        if not module.name.startswith(NOT_IMPORTED) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    importlib.import_module("kubernetes.client")
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(64)
        os.write(1, b"ready\n")
        while (
            listener in select.select([listener, 0], [], [])[0]
        ):  # its standard input ends with who started it
            connection, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                answer_request(connection)
            connection.close()


def answer_request(connection: socket.socket) -> NoReturn:
    """Run the request in a child; answer with its pid and exit code (negative: a signal)."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    size, streams, _, _ = socket.recv_fds(connection, 4, 2)
    with connection.makefile("rb") as reader:
        request = json.loads(reader.read(int.from_bytes(size, "big")))
    pid = os.fork()
    if pid == 0:
        connection.close()
        run_command(request, streams)
    connection.sendall(f"{pid}\n".encode())
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with suppress(BrokenPipeError):  # nobody waits any more
        connection.sendall(f"{code}\n".encode())
    os._exit(0)


def run_command(request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run the command in this process, which ends as any interpreter does."""
    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv += request["arguments"]
    sys.modules[MODULE].main()
    raise AssertionError("the command's main function has returned")


if __name__ == "__main__":
    serve(sys.argv[1])

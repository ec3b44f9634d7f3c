"""Start agents and launchers as children of this process, from processes that imported them.

A fresh interpreter spends a third of a second of processor time on the imports of an agent, and
nearly a second on those of `launcher run`. Here a server imports a program once. For a start it
forks a process that forks the program and ends: this process is then the parent of the program, as
if it had started it itself. Streams, working directory, environment, session and exit code are the
program's own; only the imports are shared.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import dataclasses
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]
AGENT = "jaxlaunch.launcher.agent.__main__"
LAUNCHER = "jaxlaunch.launcher.cli.main"
# What each program imports only once it runs.
IMPORTS = {
    AGENT: ("jaxlaunch.launcher.agent.agent",),
    LAUNCHER: ("jaxlaunch.launcher.cli.run", "jaxlaunch.launcher.cli.live_block"),
}
# prctl(2): orphans below this process become its children.
PR_SET_CHILD_SUBREAPER = 36
MAX_REQUEST_BYTES = 2**17
# One start at a time, whichever thread asks.
_LOCK = threading.Lock()


@dataclasses.dataclass
class ForkedProcess:
    """A started program: what the tests use of subprocess.Popen."""

    args: Sequence[str]
    pid: int
    returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, or None while the program runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired."""
        if self.poll() is None:
            descriptor = os.pidfd_open(self.pid)
            try:
                has_ended = bool(select.select([descriptor], [], [], timeout)[0])
            finally:
                os.close(descriptor)
            if not has_ended:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        code = self.poll()
        assert code is not None, "a pidfd is readable once the process has ended"
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start_program(
    module: str,
    arguments: Sequence[str] = (),
    *,
    cwd: Path,
    env: Mapping[str, str],
    stdout: int,
    stderr: int,
) -> ForkedProcess:
    """Start `python -m MODULE ARGUMENTS` in a session of its own, with an empty standard input."""
    request = json.dumps({"arguments": [*arguments], "cwd": os.fspath(cwd), "env": dict(env)})
    with _LOCK, _adopting_orphans():
        server = _start_server(module)
        socket.send_fds(server, [request.encode()], [stdout, stderr])
        pid = int(server.recv(64))
    return ForkedProcess([module, *arguments], pid)


@contextlib.contextmanager
def _adopting_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@functools.cache
def _start_server(module: str) -> socket.socket:
    """Return the connection to the server of a program, which ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forkserver", module, str(theirs.fileno())],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    atexit.register(process.kill)
    assert ours.recv(64) == b"ready", f"the server of {module} did not start"
    return ours


def serve(module: str, connection: socket.socket) -> None:
    """Start the program for each request until the process that asks has ended."""
    for name in (module, *IMPORTS[module]):
        importlib.import_module(name)
    gc.freeze()
    pid_reader, pid_writer = os.pipe()
    connection.send(b"ready")
    while True:
        data, streams, _, _ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 2)
        if not data:
            return
        middle = os.fork()
        if middle == 0:
            pid = os.fork()
            if pid == 0:
                for end in (connection.detach(), pid_reader, pid_writer):
                    os.close(end)
                run_program(module, json.loads(data), streams)
            os.write(pid_writer, str(pid).encode())
            os._exit(0)
        # Only now is the program an orphan, which the process that asks adopts.
        os.waitpid(middle, 0)
        connection.send(os.read(pid_reader, 64))
        for stream in streams:
            os.close(stream)


def run_program(module: str, request: Mapping[str, Any], streams: Sequence[int]) -> NoReturn:
    """Run the program in this process, which ends as any interpreter does."""
    os.setsid()
    for number, stream in enumerate([os.open(os.devnull, os.O_RDONLY), *streams]):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.argv[:] = [importlib.import_module(module).__file__ or module, *request["arguments"]]
    sys.modules[module].main()
    raise AssertionError("the program's main function has returned")


if __name__ == "__main__":
    serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))

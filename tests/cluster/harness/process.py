"""The daemons of a cluster: started, found again and stopped.

Each carries a mark in its environment, so that reading /proc finds it, even if its starter was
killed before it could record it. The mark is not a file, so it cannot be stale.
"""

import os
import select
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.cluster.harness.places import LOGS, RUN

MARK = "JAXLAUNCH_TEST_CLUSTER"
# Nine times the weight of a test's own process, twice that of all pods: while pods compute,
# a server that has to wait its turn makes every test wait, and webhooks miss their deadlines.
NICENESS = -10
# Percent that a Go program's memory grows by before it collects garbage. At Go's own 100 that is
# more than a third of the API server's time.
COLLECTS = "400"
# A Go program's threads spin while they look for work: where one runs at a time, daemons that have
# little to do take a quarter less processor time. The API server has much to do.
PARALLEL = {"apiserver"}
ONE_AT_A_TIME = {"GOMAXPROCS": "1"}


class Daemon(NamedTuple):
    name: str
    pid: int
    leads: bool  # it was started here; else it is a child of that one: a shim, of containerd's


class StartError(RuntimeError):
    """A part of the cluster did not start; the message has the end of its log."""


def start(name: str, command: Sequence[str | Path], env: Mapping[str, str] = os.environ) -> None:
    """Start `command` in a session of its own, with its output in the log of that name."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = os.fspath(LOGS / f"{name}.log")
    words = ["nice", "-n", str(NICENESS), *(os.fspath(word) for word in command)]
    pid = os.posix_spawnp(
        words[0],
        words,
        {
            "GOGC": COLLECTS,
            **({} if name in PARALLEL else ONE_AT_A_TIME),
            **env,
            MARK: f"{RUN}:{name}",
        },
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGINT, signal.SIGPIPE],
    )
    with suppress(
        OSError
    ):  # where Linux groups processes by session, a process's own niceness counts within its group
        Path(f"/proc/{pid}/autogroup").write_text(str(NICENESS))


def find_processes() -> Iterator[Daemon]:
    """Yield every living process with this cluster's mark; children have their parent's name."""
    prefix = f"{MARK}={RUN}:".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            for variable in (folder / "environ").read_bytes().split(b"\0"):
                if variable.startswith(prefix):
                    pid = int(folder.name)
                    yield Daemon(variable.removeprefix(prefix).decode(), pid, os.getsid(pid) == pid)


def find_daemons() -> dict[str, int]:
    """Return the main process of each living daemon, by name."""
    return {daemon.name: daemon.pid for daemon in find_processes() if daemon.leads}


def stop(*names: str, within: float = 10) -> None:
    """End the daemons of these names: TERM, and KILL after `within` seconds."""
    pids = [daemon.pid for daemon in find_processes() if daemon.name in names]
    end_processes(pids, signal.SIGTERM, within)
    end_processes(pids, signal.SIGKILL, within)


def kill(*, but: str = "", within: float = 10) -> None:
    """Kill every daemon but one at once; none of them has anything to save."""
    end_processes(
        [daemon.pid for daemon in find_processes() if daemon.name != but], signal.SIGKILL, within
    )


def end_processes(pids: Sequence[int], number: int, within: float) -> None:
    """Send the signal and wait until all have ended, or until the timeout."""
    deadline = time.monotonic() + within
    poll = select.poll()
    handles = set()
    for pid in pids:
        with suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            handles.add(handle)
            poll.register(handle, select.POLLIN)
            signal.pidfd_send_signal(handle, number)
    waiting = set(handles)
    while waiting and (remaining_s := deadline - time.monotonic()) > 0:
        for handle, _ in poll.poll(remaining_s * 1000):
            poll.unregister(handle)
            waiting.discard(handle)
    for handle in handles:
        os.close(handle)
    for pid in pids:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def wait_until_ready(name: str, probe: Callable[[], object], within: float = 300) -> None:
    """Wait until `probe` is true. Raises Down if the daemon ends first or time runs out."""
    deadline = time.monotonic() + within
    last: object = "nothing yet"
    probed_at = time.monotonic()
    while time.monotonic() < deadline:
        try:
            if last := probe():
                return
        except (OSError, RuntimeError) as error:
            last = error
        if name in find_daemons():
            probed_at = time.monotonic()
        elif time.monotonic() > probed_at + 5:  # within its exec, a process shows no environment
            raise StartError(f"{name} ended while it started\n{read_tail(name)}")
        time.sleep(0.02)
    raise StartError(
        f"{name} was not ready after {within:.0f} s; the last answer: {last}\n{read_tail(name)}"
    )


def read_tail(name: str, lines: int = 15) -> str:
    log = LOGS / f"{name}.log"
    text = log.read_text(errors="replace") if log.exists() else ""
    return f"the end of {log}:\n" + "\n".join(
        f"  {line[:400]}" for line in text.splitlines()[-lines:]
    )

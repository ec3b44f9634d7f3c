"""Agents of a run on this machine: pack them, run one generation, and kill leftover processes.

All runs of one version share a packed agent in the user's cache. In a pod no process outlives the
container. Here a program outlives a killed agent if a wrapper such as `sh -c` is between them,
because only the wrapper dies with the agent. Such orphans are found by the uid of the run in their
environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import signal
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxlaunch import atomic_file, contract, user_cache
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.agent.io.link import choose_free_port
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.jobs.logs.lines import parse_line
from jaxlaunch.launcher.local.held_output import HeldOutput
from jaxlaunch.records.log_lines import LineSplitter
from jaxlaunch.runs.layout import Lock

if TYPE_CHECKING:
    from jaxlaunch.launcher.local.ssh import SshHosts

PACKED_NAME = "agent-{}.pyz"
# Other packed agents are removed, except for the most recent ones and those of the last day.
_MAX_RECENT_FILES, _RECENT_S = 5, 86_400.0
# Agents cut lines at half of this length, and put the rank before them.
_MAX_LINE = 2 * contract.MAX_LINE
# The longest wait for killed processes to end.
KILL_TIMEOUT_S = 10.0
POLL_S = 0.02
# If the folder does not exist, as on macOS, no process is found.
_PROC = Path("/proc")
# The end of an agent's command line.
_AGENT_COMMAND = re.compile(rb"\0-I\0[^\0]*/agent-\w+\.pyz\0$")


# --- the packed agent -----------------------------------------------------------------------------


def pack_agent(fallback: Path) -> Path:
    """Return the packed agent from the cache, or from `fallback` if the cache cannot be used."""
    name = PACKED_NAME.format(pack.archive_digest())
    try:
        folder = user_cache.cache_folder("agent")
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = _ensure_packed(folder, name)
        _prune_packed(folder)
        return file
    except (OSError, RuntimeError):
        # A RuntimeError means that the user has no home.
        return _ensure_packed(fallback, name)


def _ensure_packed(folder: Path, name: str) -> Path:
    """Return the packed agent in a folder, and create it if necessary. Raises OSError."""
    file = folder / name
    if _is_trusted(file):
        # The modification time is the time of the last use.
        os.utime(file)
        return file
    with atomic_file.open_draft(file) as draft:
        draft.touch(mode=0o600)
        draft.write_bytes(pack.pack_compiled())
    if not _is_trusted(file):
        raise PermissionError(f"{file} belongs to another user")
    return file


def _is_trusted(file: Path) -> bool:
    """Return whether the file exists and only this user can have written it."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _prune_packed(folder: Path) -> None:
    """Remove packed agents of other versions, and drafts of processes that were killed.

    Files that were used within a day stay: an agent has read its whole file by then.
    """
    pattern = PACKED_NAME.format("*")
    files = [*folder.glob(pattern), *folder.glob(f"{pattern}.*{atomic_file.DRAFT_SUFFIX}")]
    # Another run may remove them at the same time.
    with contextlib.suppress(OSError):
        files_by_use = sorted((file.lstat().st_mtime, file) for file in files)
        for used_at, file in files_by_use[:-_MAX_RECENT_FILES]:
            if used_at < time.time() - _RECENT_S:
                file.unlink()


# --- one generation -------------------------------------------------------------------------------


class Gang:
    """The agents of one generation of a job, as child processes, and their output."""

    def __init__(
        self,
        environ: Mapping[str, str],
        job: JobSpec,
        generation: int,
        lock: Lock,
        remote: SshHosts | None = None,
    ) -> None:
        self._selector = selectors.DefaultSelector()
        self._environ, self._job, self._lock = environ, job, lock
        self._remote, self._generation = remote, generation
        if remote is None:
            self._leader_address = f"127.0.0.1:{choose_free_port()}"
            self._packed_agent = pack_agent(lock.folder)
        else:
            self._leader_address = remote.choose_leader_address(lock.folder)
        # The number of open streams of each host's agent.
        self._open_streams = [0] * job.pod_count
        # The number of lost agents of each host.
        self._lost_agents = [0] * job.pod_count
        self._is_ending = False
        self._agents = [self._start_agent(host) for host in range(job.pod_count)]

    def _start_agent(self, host: int) -> subprocess.Popen[bytes]:
        variables = {
            contract.LEADER: self._leader_address,
            contract.SLICE: str(host // self._job.pods),
            contract.INDEX: str(host % self._job.pods),
            contract.GENERATION: str(self._generation),
            contract.POD_UID: str(uuid.uuid4()),
        }
        variables = {**self._environ, **variables}
        if self._remote is None:
            agent = self._start_here(variables)
        else:
            agent = self._remote.start_agent(host, variables, self._lock.folder, self._job.grace)
        for stream in (agent.stdout, agent.stderr):
            self._selector.register(stream, selectors.EVENT_READ, (host, LineSplitter(_MAX_LINE)))  # type: ignore[arg-type]
        self._open_streams[host] = 2
        return agent

    def _start_here(self, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-I", str(self._packed_agent)],
            env=variables,
            # Nothing reads stdin. It is the lock's descriptor, so that the folder stays locked
            # while an agent lives. The agent's processes do not inherit it.
            stdin=self._lock.descriptor,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            # A Ctrl-C must reach the agents only through this process.
            start_new_session=True,
        )

    def send_signal(self, number: int) -> None:
        """Signal every live agent, and stop replacing lost agents."""
        self._is_ending = True
        for agent in self._agents:
            if agent.poll() is None:
                agent.send_signal(number)

    def follow_output(self, output: HeldOutput, say: Callable[[str], None]) -> list[int]:
        """Pass every line to `output` until the last agent has ended; return exit codes by host.

        An agent that is lost alone is started again, as a Job restarts a pod.
        """
        while self._selector.get_map():
            ready = self._selector.select(output.wait_s())
            output.show_due()
            for key, _ in ready:
                host, splitter = key.data
                data = os.read(key.fd, 65536)
                for text in splitter.feed(data) if data else splitter.finish():
                    output.handle_line(parse_line(host, text.decode(errors="replace")))
                if data:
                    continue
                self._selector.unregister(key.fileobj).fileobj.close()  # type: ignore[union-attr]
                self._open_streams[host] -= 1
                if self._open_streams[host]:
                    continue
                output.end_host(host)
                if self._should_replace(host, self._agents[host].wait()):
                    say(f"starting another agent for host {host}")
                    self._agents[host] = self._start_agent(host)
        return [agent.wait() for agent in self._agents]

    def _should_replace(self, host: int, code: int) -> bool:
        """Decide whether to start a new agent for a host whose agent has ended with a code."""
        if self._is_ending or not self._job.replaces_hosts:
            return False
        if code in contract.OUTCOMES:
            # The agent ended with the gang's verdict.
            self._is_ending = True
            return False
        self._lost_agents[host] += code != contract.LEFT_GANG
        return self._lost_agents[host] <= self._job.restarts.crash


# --- leftover processes ---------------------------------------------------------------------------


def kill_orphans(value: str, variable: str = contract.UID) -> int:
    """Kill the processes of this user with a value in their environment; return their number.

    By default `value` is the uid of a run. While an agent has it, its processes are not orphans,
    and none is killed.
    """
    killed_pids: set[int] = set()
    entry = f"{variable}={value}".encode()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while value and (pids := find_processes(entry)) and time.monotonic() < deadline:
        if any(_is_agent(pid) for pid in pids):
            break
        for pid in pids:
            _kill_process(pid, entry)
        # Processes that they have started in the meantime are found in the next pass.
        killed_pids |= pids
        time.sleep(POLL_S)
    return len(killed_pids)


def await_agents(entries: Sequence[bytes], timeout_s: float) -> None:
    """Wait until no agent has these entries in its environment, and kill what is left then."""
    deadline = time.monotonic() + timeout_s
    while pids := find_processes(*entries):
        late_s = time.monotonic() - deadline
        if late_s > KILL_TIMEOUT_S:
            return
        if late_s >= 0 or not any(_is_agent(pid) for pid in pids):
            for pid in pids:
                _kill_process(pid, *entries)
        time.sleep(10 * POLL_S)


def find_processes(*entries: bytes) -> set[int]:
    """Return the pids of processes with entries in their environment, which no zombie has."""
    names = [item.name for item in os.scandir(_PROC)] if _PROC.is_dir() else []
    pids = {int(name) for name in names if name.isdecimal()} - {os.getpid()}
    return {pid for pid in pids if _has_entries(pid, entries)}


def _is_agent(pid: int) -> bool:
    return _AGENT_COMMAND.search(_read_proc(pid, "cmdline")) is not None


def _has_entries(pid: int, entries: Sequence[bytes]) -> bool:
    try:
        is_own_process = (_PROC / str(pid)).stat().st_uid == os.geteuid()
    except OSError:
        return False
    return is_own_process and {*_read_proc(pid, "environ").split(b"\0")}.issuperset(entries)


def _read_proc(pid: int, name: str) -> bytes:
    try:
        return (_PROC / str(pid) / name).read_bytes()
    except OSError:
        # The process has ended, or this user may not read it.
        return b""


def _kill_process(pid: int, *entries: bytes) -> None:
    """Kill a process if it still has the entries, because its pid may have been reused."""
    # The process may have ended.
    with contextlib.suppress(OSError):
        process = os.pidfd_open(pid)
        try:
            if _has_entries(pid, entries):
                signal.pidfd_send_signal(process, signal.SIGKILL)
        finally:
            os.close(process)

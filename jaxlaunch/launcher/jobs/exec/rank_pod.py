"""The pod of a rank, and commands that run next to the rank's process."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import inspect
import os
import secrets
import signal
import sys
import zlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jaxlaunch.launcher.errors import ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.exec import enter_rank
from jaxlaunch.launcher.jobs.status import collect, hosts, roles
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.client import Cluster

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.streams import CommandStream

# How long the command that ends the hold may take.
_END_S = 30.0
_END_AGENT = f"import os, signal; os.kill(1, {signal.SIGTERM.value})"


def program_arguments(module: ModuleType) -> list[str]:
    """Return the arguments with which any Python >= 3.10 runs a module of one file."""
    # In a URL, the source itself would be several times as long.
    packed = base64.b85encode(zlib.compress(inspect.getsource(module).encode(), 9)).decode()
    code = "import base64, zlib; exec(zlib.decompress(base64.b85decode({!r})))"
    return ["-I", "-c", code.format(packed)]


@dataclasses.dataclass(frozen=True)
class RankPod:
    """The running pod of a rank."""

    cluster: Cluster
    namespace: str
    rank: int
    pod: str
    container: str
    # The name of Python in the container.
    python: str

    def start(
        self, command: Sequence[str], entry: str, *, has_terminal: bool = False
    ) -> CommandStream:
        """Start a command next to the process of the rank.

        Args:
            command: The command; if it is empty, a shell.
            entry: Name by which `interrupt` finds its processes, from `new_entry`.
            has_terminal: Whether it gets a terminal.

        Raises:
            ClusterError: If the command cannot be started.
        """
        terminal = os.environ.get("TERM", "") if has_terminal else ""
        return self._run(["enter", str(self.rank), entry, terminal, *command], has_terminal)

    def start_program(self, module: ModuleType) -> CommandStream:
        """Start a module of one file next to the process of the rank. Raises ClusterError."""
        return self.start([self.python, *program_arguments(module)], new_entry())

    def interrupt(self, entry: str) -> None:
        """Send SIGINT to the processes of a command. Raises ClusterError."""
        with self._run(["interrupt", entry], False) as stream:
            while stream.exit_code is None:
                stream.wait()
                stream.receive()

    def end_hold(self) -> bool:
        """Let the agents of a held job end, and return whether they were told to.

        Raises ClusterError if the command cannot be started.
        """
        with self.start([self.python, "-c", _END_AGENT], new_entry()) as stream:
            # The pod may be gone before the answer arrives.
            with contextlib.suppress(UnreachableError):
                while stream.exit_code is None and stream.wait(timeout_s=_END_S)[0]:
                    stream.receive()
            return stream.exit_code in (None, 0)

    def open_port(self, port: int) -> Any:
        """Open a connection to a port of the pod. Raises ClusterError."""
        return streams.open_port(self.cluster, self.namespace, self.pod, port)

    def _run(self, words: Sequence[str], has_terminal: bool) -> CommandStream:
        argv = [self.python, *program_arguments(enter_rank), *words]
        return streams.open_command(
            self.cluster, self.namespace, self.pod, self.container, argv, has_terminal=has_terminal
        )


def new_entry() -> str:
    """Return a name for the processes of a command."""
    return secrets.token_hex(8)


def find_pod(
    cluster: Cluster, namespace: str, name: str, rank: int | None, host: int | None
) -> RankPod:
    """Return the pod of a rank, as `select_pod` does, of the role that is held or decides.

    Raises UserError if there is no such job, rank or host, or if its container does not run.
    """
    snapshot = collect.read_snapshot(cluster, namespace, name)
    if isinstance(snapshot, NoSuchJob):
        message = f"Job {name} not found in namespace {snapshot.namespace}."
        raise UserError(message, "see `launcher list`.")
    if "pods" in snapshot.unread_reasons:
        raise ClusterError(f"The pods of {name} are not known: {'; '.join(snapshot.unread)}")
    held_part = next(iter(roles.held_parts(snapshot)), None)
    return select_pod(cluster, held_part or roles.decisive_part(snapshot), rank, host)


def select_pod(cluster: Cluster, snapshot: Snapshot, rank: int | None, host: int | None) -> RankPod:
    """Return the pod of a rank, or of the first rank of a host; by default of rank 0.

    Raises UserError if there is no such rank or host, or if its container does not run.
    """
    name, namespace, members = snapshot.name, snapshot.namespace, snapshot.members
    if host is None:
        rank = rank or 0
        if rank >= members.process_count:
            raise UserError(f"{name} has no rank {rank}: its last is {members.process_count - 1}.")
        number = members.host_of(rank)
    else:
        number = host
        rank = next(iter(members.ranks_of(host)), 0) if rank is None else rank
        if host >= snapshot.expected_hosts:
            last = snapshot.expected_hosts - 1
            raise UserError(f"{name} has no host {host}: its last is {last}.")
    pod = next((pod for pod in snapshot.hosts if pod.number == number), None)
    if pod is None or not pod.running or pod.is_init:
        hint = f"`launcher explain -n {namespace} {name}` says why."
        raise UserError(f"Host {number} of {name} does not run.", hint)
    argv = hosts.jobset_main_container(snapshot.jobset).get("command") or [sys.executable]
    return RankPod(cluster, namespace, rank, pod.pod, pod.container, argv[0])

"""The hosts of `launcher run --hosts`: check them, and start their agents through ssh.

Nothing is copied: all hosts see the job's folder, the run folder and this Python at the same paths.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from jaxlaunch import contract, isolated
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.agent.io.link import bracket_ipv6, choose_free_port
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.local.ssh_host import HEARTBEAT_S, HostFacts, Request
from jaxlaunch.records import codec

# ssh never asks for a password, and ends when the connection was silent for two minutes.
SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=30", "-o", "ServerAliveCountMax=4")
# ssh ends with this code if it has no connection.
NO_CONNECTION = 255
# The longest answer time of a host, including the import of its modules from a shared folder.
ANSWER_S = 120.0
# The beginning of the name of a file in the run folder while hosts are checked.
_MARK_PREFIX = ".ssh-check-"
# The key of the gang, in the run folder while it runs.
_KEY = ".ssh.key"


class SshAgent(subprocess.Popen[bytes]):
    """The agent of a host, behind the ssh process that connects to it."""

    def send_signal(self, sig: int) -> None:
        """Send a signal to the agent and not to ssh."""
        assert self.stdin is not None
        with contextlib.suppress(OSError):
            self.stdin.write(f"{int(sig)}\n".encode())

    def write_heartbeats(self) -> None:
        """Write an empty line at intervals until ssh ends."""
        assert self.stdin is not None
        # A ValueError means that stdin is closed.
        with contextlib.suppress(OSError, ValueError):
            while self.poll() is None:
                self.stdin.write(b"\n")
                time.sleep(HEARTBEAT_S)

    def wait(self, timeout: float | None = None) -> int:
        """Return the agent's exit code, or minus its signal; NO_CONNECTION for a lost host."""
        code = super().wait(timeout)
        first = contract.FIRST_SIGNAL_CODE
        is_signal = first < code < first + signal.NSIG and code != contract.LEFT_GANG
        return first - code if is_signal else code


@dataclasses.dataclass(frozen=True)
class SshHosts:
    """The hosts that run a job's agents, in the order of their indexes.

    Attributes:
        names: Names as ssh takes them: USER@HOST, or a Host of ssh_config.
    """

    names: Sequence[str]

    def check_hosts(self, job: JobSpec, run_folder: Path, paths: Iterable[Path]) -> None:
        """Raise UserError if a host cannot run the job.

        Args:
            job: The job.
            run_folder: The run folder, which exists.
            paths: Other paths that the job needs.
        """
        if len(self.names) != job.pod_count:
            message = f"--hosts names {len(self.names)}, and the job has {job.pod_count} hosts."
            raise UserError(message, f"name {job.pod_count}, or set hosts=…")
        if shutil.which("ssh") is None:
            raise UserError("--hosts: ssh is not on PATH.", "install OpenSSH's client.")
        host_names = [_read_host_name(name) for name in self.names]
        are_loopback = [contract.loopback_host(f"{name}:0") is not None for name in host_names]
        if are_loopback[0] and not all(are_loopback):
            other = self.names[are_loopback.index(False)]
            raise UserError(
                f"--hosts: {other} cannot reach host 0, whose name is {host_names[0]}.",
                "name it as the other hosts do, or name another host first.",
            )
        # No host can remember that a file with a new name does not exist.
        mark, digest = secrets.token_hex(4), pack.archive_digest()
        file = run_folder / f"{_MARK_PREFIX}{mark}"
        request = Request(os.getcwd(), str(run_folder), [os.getcwd(), *map(str, paths)], file.name)
        # The key of the gang has this mode, so another user of a host could not read it either.
        file.touch(mode=0o600)
        file.write_text(mark)
        try:
            for name, facts in zip(self.names, _ask_hosts(self.names, request), strict=True):
                if facts.mark != mark:
                    raise UserError(
                        f"--hosts: {name} does not see the run folder {run_folder}: a file there "
                        f"has {mark} on this machine and {facts.mark or 'nothing'} on {name}.",
                        "name a folder that all hosts share, as the same user, with --run-dir; "
                        "nothing is copied.",
                    )
                if facts.missing_paths:
                    path = facts.missing_paths[0]
                    message = f"--hosts: {path} is on this machine and not on {name}."
                    raise UserError(message, "all hosts must share it; nothing is copied.")
                if facts.digest != digest:
                    raise UserError(
                        f"--hosts: {name} has another jaxlaunch at {sys.executable}: agent "
                        f"{facts.digest[:8]} there, {digest[:8]} here.",
                        "install the same version on all hosts.",
                    )
        finally:
            file.unlink()

    def choose_leader_address(self, run_folder: Path) -> str:
        """Return an address of host 0 on which nothing listens."""
        name = self.names[0]
        try:
            port = _ask_host(name, Request(os.getcwd(), str(run_folder))).free_port
        except UserError:
            # The host was lost after the check, and so is its next agent.
            port = choose_free_port()
        return f"{bracket_ipv6(_read_host_name(name))}:{port}"

    @contextlib.contextmanager
    def make_key(self, run_folder: Path) -> Iterator[dict[str, str]]:
        """Yield the variable of the key by which the agents recognize each other."""
        path = run_folder / _KEY
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(secrets.token_bytes(32))
        try:
            yield {contract.GANG_SECRET: str(path)}
        finally:
            path.unlink(missing_ok=True)

    def start_agent(
        self, host: int, variables: Mapping[str, str], run_folder: Path, grace_s: float
    ) -> SshAgent:
        """Start the agent of a host."""
        request = Request(os.getcwd(), str(run_folder), variables=variables, grace_s=grace_s)
        agent = SshAgent(
            _ssh_command(self.names[host]),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            # A Ctrl-C must reach the agent only through `send_signal`.
            start_new_session=True,
        )
        assert agent.stdin is not None
        with contextlib.suppress(OSError):
            agent.stdin.write(_encode_request(request))
        threading.Thread(target=agent.write_heartbeats, daemon=True).start()
        return agent


def _ask_hosts(names: Sequence[str], request: Request) -> list[HostFacts]:
    """Return the facts of hosts, which are asked at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(names)) as pool:
        return list(pool.map(lambda name: _ask_host(name, request), names))


def _ask_host(name: str, request: Request) -> HostFacts:
    command, data = _ssh_command(name), _encode_request(request)
    try:
        answer = subprocess.run(
            command,
            input=data,
            capture_output=True,
            timeout=ANSWER_S,
            # A Ctrl-C must not end ssh: it is handled after the check.
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        message = f"--hosts: {name} did not answer in {ANSWER_S:.0f} s."
        raise UserError(message, f"try `ssh {name} true`.") from None
    # A shell's own start files may print lines before the answer.
    lines = answer.stdout.splitlines()
    if answer.returncode or not lines:
        output = answer.stderr.decode(errors="replace").strip().splitlines()
        reason = output[-1] if output else "it printed nothing"
        hint = f"{sys.executable} must be there, with jaxlaunch."
        if answer.returncode == NO_CONNECTION:
            hint = f"`ssh -o BatchMode=yes {name} true` must work without a password."
        raise UserError(
            f"--hosts: ssh to {name} ended with exit code {answer.returncode}: {reason}.", hint
        )
    try:
        return codec.read_record(HostFacts, json.loads(lines[-1]))
    except ValueError:
        text = lines[-1].decode(errors="replace")[:200]
        raise UserError(
            f"--hosts: {name} has another jaxlaunch at {sys.executable}, which answered {text!r}.",
            "install the same version on all hosts.",
        ) from None


def _read_host_name(name: str) -> str:
    """Return the name or the address that ssh_config has for a host."""
    options = subprocess.run(["ssh", "-G", "--", name], capture_output=True, text=True)
    values = dict(line.split(" ", 1) for line in options.stdout.splitlines() if " " in line)
    return values.get("hostname", name.rpartition("@")[2])


def _ssh_command(name: str) -> list[str]:
    module = isolated.inline_arguments("jaxlaunch.launcher.local.ssh_host")
    # A name that begins with a dash is not an option.
    return [*SSH, "--", name, f"exec {shlex.join([sys.executable, *module])}"]


def _encode_request(request: Request) -> bytes:
    return json.dumps(dataclasses.asdict(request)).encode() + b"\n"

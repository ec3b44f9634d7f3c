"""Failure jobs on two ssh hosts, each an sshd with a PID namespace of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.io.link import choose_free_port
from jaxlaunch.launcher.local import agents
from tests import needs
from tests.gang.agents import child_pids, poll_until
from tests.gang.failure_jobs import CODES, PROGRAM, read_verdict, write_job
from tests.gang.runs import LAUNCHER

pytestmark = pytest.mark.extended
SSHD_CONFIG = """\
ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
PermitRootLogin yes
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
LoginGraceTime 0
"""
SSH_CONFIG = """\
Host {host}
  HostName 127.0.0.1
  Port {port}
"""
# The lines for all hosts.
SSH_DEFAULTS = """\
Host *
  User root
  IdentityFile {folder}/key
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile {folder}/known_hosts
"""
SSHD = """\
set -e
mount -t tmpfs tmpfs /run
mkdir /run/sshd
mount --bind {folder}/shadow /etc/shadow
mount --bind {folder}/passwd /etc/passwd
exec {sshd} -D -e -f {config}
"""


class SshHosts:
    """Two hosts, a and b, and an `ssh` that knows them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.daemons = folder, dict[str, subprocess.Popen[bytes]]()
        # sshd lets nobody in whose account is locked, as root's may be.
        (folder / "shadow").write_text("root:*:1:0:99999:7:::\n")
        # The start files of root's own shell may wait for a lock that an ended host left.
        account = f"root:x:0:0::{folder}:/bin/sh"
        accounts = re.sub("(?m)^root:.*", account, Path("/etc/passwd").read_text())
        (folder / "passwd").write_text(accounts)
        subprocess.run(["ssh-keygen", "-q", "-N", "", "-f", folder / "key"], check=True)
        config = ""
        for host in "ab":
            port = choose_free_port()
            config += SSH_CONFIG.format(host=host, port=port)
            (folder / f"sshd-{host}").write_text(SSHD_CONFIG.format(folder=folder, port=port))
            self.start_host(host)
        (folder / "config").write_text(config + SSH_DEFAULTS.format(folder=folder))
        wrapper = folder / "bin" / "ssh"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
        wrapper.chmod(0o755)
        self.environ = {**os.environ, "PATH": f"{wrapper.parent}:{os.environ['PATH']}"}

    def start_host(self, host: str) -> None:
        config = self.folder / f"sshd-{host}"
        script = SSHD.format(sshd=shutil.which("sshd"), config=config, folder=self.folder)
        namespaces = ("--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
        with (self.folder / f"{host}.log").open("w") as log:
            self.daemons[host] = subprocess.Popen(
                ["unshare", *namespaces, "sh", "-c", script], stdout=log, stderr=log
            )

    def stop_host(self, host: str) -> None:
        """End a host with everything that runs on it."""
        self.daemons[host].kill()
        self.daemons[host].wait()

    def can_connect(self) -> bool:
        commands = [("ssh", host, "true") for host in "ab"]
        answers = [subprocess.run(command, env=self.environ) for command in commands]
        return all(answer.returncode == 0 for answer in answers)

    def start_run(self, kind: str, hosts: str = "a,b") -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*LAUNCHER, "run", write_job(self.folder, kind), "--hosts", hosts],
            cwd=self.folder,
            env=self.environ,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_ranks(self, kind: str, run: subprocess.Popen[str], attempt: int = 1) -> None:
        def have_started() -> bool:
            return len(list(self.folder.glob(f"{kind}-{attempt}-*"))) == 2

        assert poll_until(lambda: have_started() or run.poll() is not None)
        assert have_started(), run.communicate()[1]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[SshHosts]:
    for tool, package in (("sshd", "server"), ("ssh", "client"), ("ssh-keygen", "client")):
        needs.tool(tool, package=f"openssh-{package}")
    needs.tool("unshare", package="util-linux")
    if os.geteuid() != 0:
        needs.absent("sshd needs root")
    (tmp_path / "program.py").write_text(PROGRAM)
    ssh_hosts = SshHosts(tmp_path)
    try:
        assert poll_until(ssh_hosts.can_connect)
        yield ssh_hosts
    finally:
        for host in ssh_hosts.daemons:
            ssh_hosts.stop_host(host)


def cut_connection(run: subprocess.Popen[str]) -> None:
    """Break the connection to b."""
    (connection,) = (
        pid
        for pid in child_pids(run.pid)
        if b"\0--\0b\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )
    os.kill(connection, signal.SIGKILL)


def has_processes(run_folder: Path) -> bool:
    return bool(agents.find_processes(f"{contract.RUN_DIR}={run_folder}".encode()))


def test_jobs_end_as_on_one_machine(hosts: SshHosts) -> None:
    waiting = ("stop", "cut", "rejoin", "host")
    kinds = ("done", "raise", "kill", "lose", "exit", "again")
    runs = dict[str, subprocess.Popen[str]]()
    # The runs start one after the other, because JAX uses its port long after it was chosen.
    for kind in (*kinds, *waiting):
        runs[kind] = hosts.start_run(kind)
        if kind in waiting:
            hosts.wait_for_ranks(kind, runs[kind])
        else:
            runs[kind].communicate()
    run_folders = {kind: hosts.folder / "runs" / kind for kind in runs}
    runs["stop"].send_signal(signal.SIGINT)
    cut_connection(runs["cut"])
    # The next agent on b starts after the save of the earlier one.
    cut_connection(runs["rejoin"])
    hosts.wait_for_ranks("rejoin", runs["rejoin"], attempt=2)
    runs["rejoin"].send_signal(signal.SIGINT)
    for kind in ("stop", "cut", "rejoin"):
        runs[kind].communicate()
    hosts.stop_host("b")
    runs["host"].communicate()

    codes = {kind: CODES[kind] for kind in kinds} | dict.fromkeys(waiting, 80) | {"host": 81}
    assert {kind: run.returncode for kind, run in runs.items()} == codes
    whole_gang = ("done", "again", "stop", "cut", "rejoin")
    ranks = {**dict.fromkeys(runs, 1), **dict.fromkeys(whole_gang)}
    assert {kind: read_verdict(folder)[1] for kind, folder in run_folders.items()} == ranks
    for kind in ("stop", "rejoin"):
        assert read_verdict(run_folders[kind])[0] == contract.INTERRUPTED
    assert read_verdict(run_folders["host"])[0] == "lost"
    for folder in run_folders.values():
        assert poll_until(lambda: not has_processes(folder)), folder  # noqa: B023
        assert not list(folder.glob(".ssh*"))


def test_unreachable_host_is_refused(hosts: SshHosts) -> None:
    hosts.stop_host("b")
    run = hosts.start_run("done")
    _, errors = run.communicate()
    assert run.returncode == 2
    assert "--hosts: ssh to b ended with exit code 255" in errors
    assert "`ssh -o BatchMode=yes b true` must work" in errors
    assert not list((hosts.folder / "runs" / "done").glob(".ssh*"))

"""The check of the hosts of `launcher run --hosts`, with an `ssh` that answers for them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.local.roles import run_roles
from jaxlaunch.launcher.local.run import LocalRun
from jaxlaunch.launcher.local.ssh import NO_CONNECTION, SshHosts

JOB = "name: x\nhosts: 2\naccelerator: {type: cpu}\ncommand: [python, -c, 'pass']\n"


@pytest.fixture
def check_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks hosts whose `ssh` runs a shell script on this machine."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=os.pathsep)
    job_file, run_folder = tmp_path / "job.yaml", tmp_path / "run"
    job_file.write_text(JOB)
    run_folder.mkdir()
    (tmp_path / "bin").mkdir()

    def check(script: str, names: str = "a,b") -> None:
        program = tmp_path / "bin" / "ssh"
        # The last two arguments are the host and its command.
        arguments = 'host="${@: -2:1}" command="${@: -1}"'
        names_of_config = '[ "$1" != -G ] || { echo "hostname ${command#here.}"; exit; }'
        program.write_text(f"#!/bin/bash\n{arguments}\n{names_of_config}\n{script}\n")
        program.chmod(0o755)
        hosts = SshHosts(names.split(","))
        hosts.check_hosts(jobs.load_job(job_file), run_folder, [tmp_path])
        assert list(run_folder.iterdir()) == []

    return check


def print_facts(**facts: Any) -> str:
    defaults = {"digest": pack.archive_digest(), "mark": None, "missing_paths": [], "free_port": 1}
    return f"echo Welcome; echo {shlex.quote(json.dumps(defaults | facts))}"


def test_hosts_that_share_the_folders_are_accepted(check_hosts: Any) -> None:
    # The sixth word is the session, which a Ctrl-C on the terminal does not reach.
    own_session = 'read -r _ _ _ _ _ session _ </proc/$$/stat; [ "$session" = $$ ] || exit 9'
    check_hosts(f'{own_session}; exec sh -c "$command"')


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (
            print_facts(),
            r"a does not see the run folder .*: a file there has \w{8} on this machine "
            "and nothing on a",
        ),
        ("echo Hello", "a has another jaxlaunch at .*, which answered 'Hello'"),
        ("echo '{}'", "a has another jaxlaunch at .*, which answered '{}'"),
        ("exit 255", "ssh to a ended with exit code 255: it printed nothing"),
        ("echo 'Permission denied (publickey).' >&2; exit 255", "255: Permission denied"),
        (f"echo '{sys.executable}: not found' >&2; exit 127", "127: .*python.*: not found"),
    ],
)
def test_host_that_cannot_run_the_job_is_refused(check_hosts: Any, script: str, text: str) -> None:
    with pytest.raises(UserError, match=text):
        check_hosts(script)


def test_host_with_another_jaxlaunch_or_folder_is_refused(check_hosts: Any) -> None:
    answer = 'answer=$(sh -c "$command"); [ $host = a ] || answer=${answer/%s}; echo "$answer"'
    digest = pack.archive_digest()
    text = f"b has another jaxlaunch at .*: agent 00000000 there, {digest[:8]} here"
    with pytest.raises(UserError, match=text):
        check_hosts(answer % f"{digest[:8]}/00000000")
    with pytest.raises(UserError, match="/data is on this machine and not on b"):
        check_hosts(answer % '\\"missing_paths\\": []/\\"missing_paths\\": [\\"/data\\"]')


def test_host_0_must_be_reachable_from_the_others(check_hosts: Any) -> None:
    with pytest.raises(UserError, match="b cannot reach host 0, whose name is localhost"):
        check_hosts("exit 1", "here.localhost,b")


def test_number_of_hosts_is_that_of_the_job(check_hosts: Any) -> None:
    with pytest.raises(UserError, match="names 3, and the job has 2 hosts"):
        check_hosts("exit 1", "a,b,c")


def test_lost_host_0_gets_another_agent(check_hosts: Any, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exit code 255"):
        check_hosts("exit 255")
    hosts = SshHosts(["a", "b"])
    address = hosts.choose_leader_address(tmp_path)
    assert address.rpartition(":")[2].isdecimal()
    agent = hosts.start_agent(0, {"X": "y"}, tmp_path, grace_s=1.0)
    assert agent.wait() == NO_CONNECTION
    agent.send_signal(signal.SIGTERM)
    agent.communicate()


def test_job_with_roles_is_refused(tmp_path: Path) -> None:
    job_file = tmp_path / "job.yaml"
    roles = "a: {ends: true, command: [python, x.py]}, b: {command: [python, y.py]}"
    job_file.write_text(f"name: x\naccelerator: {{type: cpu}}\njobs: {{{roles}}}\n")
    file = jobs.read_job(job_file, may_have_roles=True)
    local = LocalRun(tmp_path / "run", tmp_path, remote=SshHosts(["a", "b"]))
    with pytest.raises(UserError, match="a job with roles"):
        run_roles(file, local, lambda line: None, lambda text: None)

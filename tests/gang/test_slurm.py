"""Failure jobs under Debian's Slurm: two nodes, whose daemons run in namespaces of this machine."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.io.link import choose_free_port
from tests import needs
from tests.gang.agents import poll_until
from tests.gang.failure_jobs import CODES, PROGRAM, read_verdict, write_job
from tests.gang.runs import LAUNCHER
from tests.launcher.invoke import launcher

pytestmark = pytest.mark.extended
CONF = """\
ClusterName=lab
SlurmctldHost=n0(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
CredType=cred/none
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SlurmdParameters=config_overrides
MinJobAge=3600
FirstJobId={ports[3]}
ReturnToService=2
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
NodeName=n0 NodeHostname=n0 NodeAddr=127.0.0.1 Port={ports[0]} CPUs=32
NodeName=n1 NodeHostname=n0 NodeAddr=127.0.0.1 Port={ports[1]} CPUs=32
PartitionName=all Nodes=ALL Default=YES State=UP
"""
DAEMONS = """\
hostname n0
mount --bind {folder}/hosts /etc/hosts
slurmctld -c -D &
slurmd -N n0 -D &
slurmd -N n1 -D &
wait
"""


class SlurmCluster:
    """A Slurm cluster, as its users see it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def call(self, *command: str, stdin: str | None = None) -> str:
        """Return what a command of Slurm prints."""
        return subprocess.run(
            command,
            env=self.environ,
            cwd=self.folder,
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    def are_nodes_idle(self) -> bool:
        answer = subprocess.run(
            ["sinfo", "--noheader", "--Node", "--format=%T"],
            env=self.environ,
            capture_output=True,
            text=True,
        )
        return answer.stdout.split() == ["idle", "idle"]

    def job_fields(self, number: str) -> dict[str, str]:
        """Return the fields of a job by name."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str) -> dict[str, str]:
        assert poll_until(lambda: self.job_fields(number)["JobState"] in states)
        return self.job_fields(number)

    def wait_for_requeue(self, number: str) -> None:
        assert poll_until(lambda: self.job_fields(number)["Restarts"] == "1")
        # On a busy machine, Slurm may have started the job again before this process sees it.
        self.wait_for_state(number, "PENDING", "RUNNING", "FAILED", "COMPLETED")

    def end_requeue_delay(self, number: str) -> None:
        """Start a requeued job before the two minutes of Slurm's delay."""
        if self.job_fields(number)["JobState"] != "PENDING":
            return
        # slurmd refuses a job whose credential is not younger, in whole seconds, than its last end.
        # The update fails if the job has just started.
        with contextlib.suppress(subprocess.CalledProcessError):
            self.call("scontrol", "update", f"JobId={number}", "StartTime=now+5")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    for tool in ("slurmctld", "slurmd", "sbatch"):
        needs.tool(tool, package="slurm-wlm")
    needs.tool("unshare", package="util-linux")
    if os.geteuid() != 0:
        needs.absent("Slurm's daemons need root")
    folder = tmp_path_factory.mktemp("slurm")
    # The number of a job determines the port of its leader, which another cluster may use here.
    ports = [choose_free_port() for _ in range(4)]
    conf = CONF.format(folder=folder, port=ports[2], ports=ports)
    (folder / "slurm.conf").write_text(conf)
    (folder / "hosts").write_text("127.0.0.1 localhost n0 n1\n")
    (folder / "program.py").write_text(PROGRAM)
    slurm = SlurmCluster(folder)
    namespaces = ("--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc")
    with (folder / "daemons.log").open("w") as log:
        daemons = subprocess.Popen(
            ["unshare", *namespaces, "sh", "-c", DAEMONS.format(folder=folder)],
            env=slurm.environ,
            stdout=log,
            stderr=log,
        )
    try:
        assert poll_until(slurm.are_nodes_idle)
        yield slurm
    finally:
        daemons.kill()
        daemons.wait()


def test_jobs_end_as_on_this_machine(
    cluster: SlurmCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run_launcher = functools.partial(launcher, capsys, monkeypatch)
    shutil.copy(cluster.folder / "program.py", tmp_path)
    monkeypatch.chdir(cluster.folder)
    monkeypatch.setenv("SLURM_CONF", cluster.environ["SLURM_CONF"])
    numbers, local_runs = {}, {}
    for kind in CODES:
        script = run_launcher("render", "--slurm", str(write_job(cluster.folder, kind)))
        assert script.code == 0, script.err
        numbers[kind] = cluster.call("sbatch", "--parsable", stdin=script.out)
        local_runs[kind] = subprocess.Popen(
            [*LAUNCHER, "run", write_job(tmp_path, kind)],
            cwd=tmp_path,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    # The requeue comes first, because Slurm ends the delay by itself after two minutes.
    cluster.wait_for_requeue(numbers["kill"])
    cluster.end_requeue_delay(numbers["kill"])
    assert poll_until(lambda: (tmp_path / "stop-1-0").exists() and (tmp_path / "stop-1-1").exists())
    local_runs["stop"].terminate()
    assert {kind: run.wait() for kind, run in local_runs.items()} == CODES

    # At the time limit the agents alone get the signal, and the job starts again.
    assert poll_until(lambda: len(list(cluster.folder.glob("stop-1-*"))) == 2)
    # The job cannot start again before the nodes resume, even if this process is slow.
    nodes = ("scontrol", "update", "NodeName=n0,n1")
    cluster.call(*nodes, "State=DRAIN", "Reason=test")
    cluster.call("scancel", "--signal=TERM", numbers["stop"])
    cluster.wait_for_requeue(numbers["stop"])
    listing = run_launcher("list")
    assert ["stop", "Restarting"] in [line.split()[:2] for line in listing.out.splitlines()]
    answer = run_launcher("explain", "stop")
    assert f"waits until Slurm starts job {numbers['stop']} again" in answer.out
    cluster.call(*nodes, "State=RESUME")
    cluster.end_requeue_delay(numbers["stop"])
    assert poll_until(lambda: len(list(cluster.folder.glob("stop-2-*"))) == 2)
    cluster.call("scancel", numbers["stop"])

    for kind, number in numbers.items():
        job = cluster.wait_for_state(number, "COMPLETED", "FAILED", "CANCELLED")
        assert job["ExitCode"] == f"{CODES[kind]}:0", kind
        run_folder = cluster.folder / "runs" / kind
        assert read_verdict(run_folder) == read_verdict(tmp_path / "runs" / kind)
        assert job["Restarts"] == ("1" if kind in ("kill", "stop") else "0"), kind
        assert not list(run_folder.glob("*.key"))
    states = {code: "Failed" for code in CODES.values()} | {0: "Done", 80: "Stopped"}
    rows = [line.split()[:2] for line in run_launcher("list").out.splitlines()[1:]]
    assert sorted(rows) == sorted([kind, states[code]] for kind, code in CODES.items())
    assert "`launcher render --slurm" in run_launcher("explain", "raise").out

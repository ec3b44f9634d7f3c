"""Failures that repeat, and programs that ask to be run again, in real pods of a JobSet."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.errors import UnreachableError
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.jobs.status.hosts import metrics_port
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.report.cluster_jobs import ClusterJobs
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Workspace, make_workspace, program_command, wait_for
from tests.cluster.waiting import wait_until


class Ending(NamedTuple):
    """A job, and how its JobSet must end."""

    words: tuple[str, ...]
    job: Mapping[str, Any]
    end: str
    # Restarts of the JobSet, and those that count toward its limit.
    counters: tuple[int, int]
    # The exit code of its last containers.
    code: int
    # Whether its records outlive the pods.
    is_kept: bool = False


KEPT = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
QUICK: dict[str, Any] = {"resources": {"cpu": "10m"}, "grace": "3s"}
NO_PLACE = {"in_place": 0, "crash": 2}
CODES = {"42": "free", "99": "charged", "43": "free-new-pods", "44": "charged-new-pods"}
ENDINGS = {
    # Default restarts: the second attempt in the same pods is the last.
    "raise": Ending(("raise",), {}, "Failed", (0, 0), 70),
    "raise-two": Ending(("raise",), {"hosts": 2}, "Failed", (0, 0), 70),
    # Without restarts in place, the second set of pods is the last.
    "raise-pods": Ending(("raise",), {"restarts": NO_PLACE}, "Failed", (1, 1), 70, True),
    "exit-pods": Ending(("exit",), {"restarts": NO_PLACE}, "Failed", (1, 1), 70, True),
    "exit": Ending(("exit",), {}, "Failed", (0, 0), 70),
    "segfault": Ending(("segfault",), {}, "Failed", (0, 0), 70),
    "changes": Ending(("changes",), {}, "Completed", (0, 0), 0),
    # Two attempts with code 42 in the same pods, and a third one that finishes.
    "free": Ending(("requeue", "42", "2"), {"hosts": 2}, "Completed", (0, 0), 0),
    "free-pods": Ending(
        ("requeue", "42", "2"), {"restarts": NO_PLACE, "hosts": 2}, "Completed", (2, 0), 0
    ),
    "new-pods": Ending(("requeue", "43", "2"), {}, "Completed", (2, 0), 0),
    "charged": Ending(("requeue", "99", "2"), {}, "Completed", (0, 0), 0),
    "charged-pods": Ending(("requeue", "99", "2"), {"restarts": NO_PLACE}, "Completed", (2, 2), 0),
    "charged-new": Ending(("requeue", "44", "2"), {}, "Completed", (2, 2), 0),
    "used-up": Ending(("requeue", "99", "9"), {"restarts": NO_PLACE}, "Failed", (2, 2), 86),
}


@pytest.fixture(scope="module")
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def storage(cluster: Access, workspace: Workspace) -> Path:
    """Return the folder behind the claim that keeps the records."""
    return preparations.make_claim(cluster, workspace.namespace)


@pytest.fixture(scope="module")
def gangs(workspace: Workspace, storage: Path) -> Mapping[str, Gang]:
    """Start all jobs at once."""
    return {name: start_job(workspace, name, ending) for name, ending in ENDINGS.items()}


def start_job(workspace: Workspace, name: str, ending: Ending) -> Gang:
    restarts = {"codes": CODES} | dict(ending.job.get("restarts", {}))
    job = {**QUICK, **ending.job, "restarts": restarts}
    command = program_command("repeats.py", *ending.words)
    return workspace.start(name, KEPT if ending.is_kept else Defaults(), command=command, **job)


@pytest.mark.parametrize("name", ENDINGS)
def test_jobset_ends_after_these_restarts(gangs: Mapping[str, Gang], name: str) -> None:
    gang, ending = gangs[name], ENDINGS[name]
    assert (gang.wait_for_end(), gang.counters) == (ending.end, ending.counters)
    hosts = wait_until(
        lambda: gang.hosts,
        lambda hosts: all(host.terminated for host in hosts),
        f"{name}'s containers ended",
    )
    assert {host.terminated["exitCode"] for host in hosts} == {ending.code}
    reports = [host.termination_report for host in hosts]
    verdicts = [report.verdict for report in reports if report is not None]
    if ending.code == 70:
        # The message of the first attempt, although that of the second differs.
        words = {"raise": "bad batch in attempt 1 of generation 0", "exit": "exit code 3"}
        expected = words.get(ending.words[0], "SIGSEGV")
        assert all(expected in verdict.message for verdict in verdicts) and verdicts
        assert {report.attempt for report in reports if report is not None} == {2}


def test_surfaces_show_the_same_restarts(workspace: Workspace, gangs: Mapping[str, Gang]) -> None:
    """The program of the last job ends twice in the same pods, and then runs on."""
    names = ("raise", "raise-pods", "free", "free-pods", "new-pods", "charged-pods", "used-up")
    for name in names:
        gangs[name].wait_for_end()
    running = workspace.start(
        "stays", KEPT, command=program_command("repeats.py", "stays"), **QUICK
    )
    wait_for("both ends are counted", lambda: read_restart_metric(running) == 2)
    jobs = ClusterJobs(workspace.cluster, explain_job)

    def read_surfaces() -> dict[str, dict[str, int]]:
        listed = json.loads(workspace.launcher("list", "-o", "json").stdout)
        table = {row["name"]: row["restarts"] for row in jobs.read_table(running.namespace).rows}
        counts = {row["name"]: {"list": row["restarts"]["total"]} for row in listed}
        for name in (*names, "stays"):
            status = workspace.launcher("status", name, "-o", "json").stdout
            explained = workspace.launcher("explain", name).stdout
            match = re.search(r"restarts: (\d+)", explained)
            page = jobs.read_job(running.namespace, name)
            counts[name] |= {
                "status": json.loads(status)["restarts"]["total"],
                "explain": int(match[1]) if match else 0,
                "dashboard": table[name],
                "page": -1 if page is None else page.to_json()["restarts"],
            }
        return {name: counts[name] for name in (*names, "stays")}

    # The heartbeat of the running job is up to 15 s older than its metrics.
    counts = wait_until(
        read_surfaces, lambda counts: set(counts["stays"].values()) == {2}, "all have counted"
    )
    assert all(len(set(surfaces.values())) == 1 for surfaces in counts.values()), counts
    # In the same pods after the first end, and the restarts of the JobSet.
    assert counts["raise"]["list"] == 1 and counts["free"]["list"] == 2
    for name in ("free-pods", "new-pods", "charged-pods", "used-up"):
        assert counts[name]["list"] == gangs[name].counters[0] == 2


def read_restart_metric(gang: Gang) -> int:
    """Return the sum of jaxlaunch_restarts_total over its causes, as host 0 exports it."""
    (leader,) = gang.wait_until_running()
    port = metrics_port(gang.jobset)
    assert port is not None
    request = b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n"
    try:
        answer = streams.exchange_bytes(
            gang.cluster, gang.namespace, leader.pod, port, request
        ).decode()
    except UnreachableError:
        # The agent has not opened its port yet.
        return 0
    samples = re.findall(r"^jaxlaunch_restarts_total(?:\{.*\})? ([\d.]+)", answer, re.MULTILINE)
    return sum(int(float(sample)) for sample in samples)


def test_refused_start_in_pods_keeps_the_result(workspace: Workspace, storage: Path) -> None:
    def read_summary() -> dict[str, Any]:
        summary: dict[str, Any] = json.loads(
            (storage / "again/.jaxlaunch/summary.json").read_text()
        )
        return summary

    finishing = program_command("repeats.py", "requeue", "42", "0")
    gang = workspace.start("again", KEPT, command=finishing, **QUICK)
    assert gang.wait_for_end() == "Completed"
    result = read_summary()
    assert (result["status"], result["step"]) == ("done", 3)
    assert workspace.launcher("delete", "again", "--yes").returncode == 0
    refused = program_command("repeats.py", "refuse", "78")
    gang = workspace.start("again", KEPT, command=refused, **QUICK)
    assert gang.wait_for_end() == "Failed"
    kept = read_summary()
    assert kept["verdict"] == result["verdict"] and (kept["status"], kept["step"]) == ("done", 3)
    assert [row["code"] for row in kept["starts"]] == [0, 78] and kept["starts"][1]["refusal"]
    assert "no_checkpoint (78)" in workspace.launcher("status", "again").stdout

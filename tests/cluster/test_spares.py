"""An elastic gang of real pods with a spare loses four pods, and another one loses a node.

The first continues each time and ends with the losses of an undisturbed run. The object of the
second one's node stays.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.kubernetes.kinds import PODS
from jaxlaunch.records import members
from tests.cluster import nodes, preparations, processes, waiting
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, Gang, Workspace, make_workspace, wait_for
from tests.cluster.harness import build, images, second_node
from tests.cluster.harness.places import NODE
from tests.cluster.test_recovery import (
    SAVED,
    job_keys,
    newest_step,
    read_attempts,
    read_losses,
    wait_for_checkpoint,
)
from tests.compiled import QUICK_COMPILES
from tests.found import shows

pytestmark = pytest.mark.extended

SEAT = "jaxlaunch.test/seat-of-a-host"  # a resource of the node: without a free one a pod waits
SEATS, FEW = 4, 2
STEPS = 300
JOB = job_keys(STEPS, lr=1e-4)
SEATED = {"name": "main", "resources": {"requests": {SEAT: "1"}, "limits": {SEAT: "1"}}}
ELASTIC: dict[str, Any] = {
    "hosts": {"min": 2, "max": 3},
    "spares": 1,
    "timeouts": {"replace": "20s"},  # longer than the 10 s after which Kubernetes makes a pod again
    "pod": {"spec": {"containers": [SEATED]}},
}
STEADY: dict[str, Any] = {"hosts": 3, "restarts": {"in_place": 0, "crash": 0}}
WAITS = (
    "import pathlib, time\nwhile not pathlib.Path('/checkpoints/stranded.end').exists(): "
    "time.sleep(0.2)"
)
STRANDED: dict[str, Any] = {
    "image": images.BASE,
    "command": ["python", "-c", WAITS],
    "hosts": 2,
    "spares": 1,
    "resources": {"cpu": "10m"},
    "tolerations": [{"key": second_node.TAINT, "operator": "Exists"}],
    "pod": {"spec": {"containers": [SEATED]}},
}


class Moment(NamedTuple):
    """The state of a run at a moment."""

    hosts: tuple[int, ...]  # that hold ranks, in the order of these; none where that is not known
    spares: tuple[int, ...]
    explained: str
    saved: int  # its newest step on storage
    # The pod that the lines of `logs --rank 1` name last, as far as a pod knows its own name.
    reads_rank_1: str


class Run:
    """A job that holds before its next step except while something happens to it."""

    def __init__(self, workspace: Workspace, volume: Path) -> None:
        self._here, self.folder, self._hold = workspace, volume / "elastic", volume / "elastic.hold"
        self.gang = workspace.start("elastic", SAVED, env=hold_file(self._hold), **JOB, **ELASTIC)

    def status(self) -> Mapping[str, Any]:
        status: Mapping[str, Any] = json.loads(
            self._here.launcher("status", "elastic", "-o", "json").stdout
        )
        return status

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def delete(self, host: int) -> None:
        """Delete a host's pod as `kubectl delete --force` does, while the run trains."""
        self.release()
        pod = next(
            host_of_gang.pod for host_of_gang in self.gang.hosts if host_of_gang.number == host
        )
        pods = f"/api/v1/namespaces/{self._here.namespace}/pods"
        self._here.access.api.delete(f"{pods}/{pod}?gracePeriodSeconds=0")

    def await_ends(self, attempts: int) -> None:
        wait_for(
            f"{attempts} of its attempts have ended", lambda: read_attempts(self.folder) >= attempts
        )

    def hold_saved(self) -> Moment:
        """Hold the run after its next save."""
        wait_for_checkpoint(self.folder, after=newest_step(self.folder))
        self._hold.touch()
        return self.moment()

    def moment(self) -> Moment:
        status = self.status()
        lines = self._here.launcher("logs", "elastic", "--rank", "1").stdout.splitlines()
        steps = [line.rpartition(" ")[2] for line in lines if "reads on" in line]
        hosts = (
            members.parse_members(status["members"], 1, SEATS).hosts if status["members"] else ()
        )
        explained = self._here.launcher("explain", "elastic").stdout
        return Moment(
            tuple(hosts),
            tuple(status["spares"]),
            explained,
            newest_step(self.folder),
            steps[-1] if steps else "",
        )

    def once(self, description: str, is_so: Callable[[Mapping[str, Any]], object]) -> Moment:
        wait_for(description, lambda: is_so(self.status()))
        return self.moment()


def hold_file(by: Path) -> Mapping[str, str]:
    return QUICK_COMPILES | {"HOLD": f"/checkpoints/{by.name}"}


@pytest.fixture(scope="module")
def workspace(cluster: Access, image: str) -> Iterator[Workspace]:
    if not cluster.is_ours:
        pytest.skip("the node of the pods gets a resource of its own, and its folders are read")
    with (
        make_workspace(cluster, image) as workspace,
        nodes.offer_resource(cluster, NODE, SEAT, SEATS),
    ):
        yield workspace


@pytest.fixture(scope="module")
def folder(workspace: Workspace) -> Path:
    """Return the checkpoints of both jobs, by name."""
    return preparations.make_claim(workspace.access, workspace.namespace)


@pytest.fixture(scope="module")
def moments(workspace: Workspace, folder: Path) -> Mapping[str, Moment]:
    """Return the moments of the run by name, after its success."""
    run, moments = Run(workspace, folder), {}
    steady = workspace.start("steady", SAVED, env=hold_file(folder / "never"), **JOB, **STEADY)
    run.hold_saved()
    moments["started"] = run.once("its spare is ready", lambda status: len(status["spares"]) == 1)
    lose_hosts(workspace, run, moments)
    lose_leader(workspace, run, moments)
    run.release()
    assert run.gang.wait_for_end() == "Completed", run.gang.read_lines()
    assert steady.wait_for_end() == "Completed", steady.read_lines()
    wait_for("its spare has left", lambda: all(host.has_ended for host in run.gang.hosts))
    return moments


def lose_hosts(workspace: Workspace, run: Run, moments: dict[str, Moment]) -> None:
    """Lose a host, whose pod returns as the spare; then the spare and a host without a node."""
    lost = moments["started"].hosts[1]
    nodes.set_resource(workspace.access, NODE, SEAT, FEW)
    run.delete(lost)
    run.await_ends(1)
    moments["spare used"] = run.hold_saved()
    nodes.set_resource(workspace.access, NODE, SEAT, SEATS)
    moments["spare again"] = run.once(
        "the pod is the next spare", lambda status: status["spares"] == [lost]
    )
    nodes.set_resource(workspace.access, NODE, SEAT, FEW)
    run.delete(lost)
    wait_for("the spare is gone", lambda: not run.status()["spares"])
    moments["spare lost"] = run.hold_saved()
    run.delete(moments["spare lost"].hosts[2])
    run.await_ends(2)
    moments["no spare left"] = run.moment()
    moments["shrunk"] = run.hold_saved()
    nodes.set_resource(workspace.access, NODE, SEAT, SEATS)
    moments["growing"] = run.once("both hosts are back", lambda status: len(status["spares"]) == 2)
    run.release()
    run.await_ends(3)
    moments["grown"] = run.hold_saved()


def lose_leader(workspace: Workspace, run: Run, moments: dict[str, Moment]) -> None:
    nodes.set_resource(workspace.access, NODE, SEAT, FEW)
    run.delete(0)
    run.await_ends(4)
    moments["no leader"] = run.once(
        "the pod of host 0 has ended", lambda status: status["members"] is None
    )
    nodes.set_resource(workspace.access, NODE, SEAT, SEATS)
    moments["leader again"] = run.hold_saved()


@pytest.fixture(scope="module")
def stranded(workspace: Workspace, folder: Path) -> Mapping[str, subprocess.CompletedProcess[str]]:
    """Collect `explain` and `status` of a gang with a pod on a lost node whose object stays."""
    gang = workspace.start("stranded", SAVED, **STRANDED)
    (spare,) = wait_for("its spare is ready", lambda: read_status(workspace, gang)["spares"])
    with nodes.change_nodes(), second_node.join_node(build.build_programs(), images.BASE):
        nodes.set_resource(workspace.access, second_node.NODE, SEAT, 1)
        nodes.set_resource(workspace.access, NODE, SEAT, FEW)
        delete_pod(workspace, newest_pod(gang, spare))
        wait_for(
            "its pod is on the second node",
            lambda: newest_pod(gang, spare)["spec"].get("nodeName") == second_node.NODE,
        )
        wait_for("it is the spare again", lambda: read_status(workspace, gang)["spares"] == [spare])
        last = int(read_status(workspace, gang)["members"][-1])
        delete_pod(workspace, newest_pod(gang, last))
        wait_for("they change places", lambda: read_status(workspace, gang)["spares"] == [last])
        pod = newest_pod(gang, spare)
        second_node.stop_kubelet()
        second_node.mark_unknown()
        results = {"no kubelet": wait_for_explanation(workspace, gang, "but the agent of host")}
        second_node.lose_node(processes.find_processes(pod))
        results["not ready"] = wait_for_explanation(
            workspace, gang, "no spare is ready, since host"
        )
        workspace.cluster.delete(PODS, pod["metadata"]["name"], workspace.namespace)
        results["deleted"] = workspace.launcher("explain", gang.name)
        results["hosts"] = workspace.launcher("status", gang.name, "-o", "wide")
        (folder / "stranded.end").touch()
        wait_for(
            "the leader is done", lambda: newest_pod(gang, 0)["status"]["phase"] == "Succeeded"
        )
        results["done"] = workspace.launcher("explain", gang.name)
        assert not gang.status.get("terminalState")
        delete_pod(workspace, pod)
        assert gang.wait_for_end() == "Completed"
        nodes.set_resource(workspace.access, NODE, SEAT, SEATS)
    return results


def read_status(workspace: Workspace, gang: Gang) -> Mapping[str, Any]:
    status: Mapping[str, Any] = json.loads(
        workspace.launcher("status", gang.name, "-o", "json").stdout
    )
    return status


def wait_for_explanation(
    workspace: Workspace, gang: Gang, words: str
) -> subprocess.CompletedProcess[str]:
    """Wait until `explain` contains these words, and return its result."""
    return waiting.wait_until(
        lambda: workspace.launcher("explain", gang.name),
        lambda seen: words in seen.stdout,
        words,
        PATIENCE_S,
    )


def newest_pod(gang: Gang, host: int) -> Any:
    """Return the newest pod of a host, or an empty one."""
    label = "batch.kubernetes.io/job-completion-index"
    pods = [pod for pod in gang.pods if pod["metadata"]["labels"][label] == str(host)]
    return max(
        pods,
        key=lambda pod: pod["metadata"]["creationTimestamp"],
        default={"spec": {}, "status": {}},
    )


def delete_pod(workspace: Workspace, pod: Any) -> None:
    """Delete a pod as `kubectl delete --force` does."""
    path = f"/api/v1/namespaces/{workspace.namespace}/pods/{pod['metadata']['name']}"
    workspace.access.api.delete(f"{path}?gracePeriodSeconds=0")


def test_running_gang_reports_a_node_without_its_kubelet(stranded: Mapping[str, Any]) -> None:
    output = stranded["no kubelet"].stdout
    assert re.search(
        r"stranded runs: node node-1 has not answered since .*, but the agent of host "
        r"\d on it does",
        output,
    )
    shows("but the agent of host … on it does", output)


def test_pod_on_a_lost_node_is_not_a_spare(stranded: Mapping[str, Any]) -> None:
    reason = f"node {second_node.NODE} has not answered since "
    for moment in ("not ready", "deleted"):
        output = stranded[moment].stdout
        assert re.search(f"no spare is ready, since host . is missing: {reason}", output), output
        assert f"if it is gone for good: kubectl delete node {second_node.NODE}" in output
        shows("with its ranks on hosts … since … missing:", output)
    assert re.search(
        rf"\n *\d +- +no +Terminating +{second_node.NODE} ", stranded["hosts"].stdout
    ), stranded["hosts"]


def test_finished_gang_names_the_pod_that_blocks_its_job(stranded: Mapping[str, Any]) -> None:
    output = stranded["done"].stdout
    assert re.search(
        r"stranded has finished, but its Job is not complete before pod \S+ has ended: node ",
        output,
    ), output
    assert f"kubectl delete node {second_node.NODE}" in output
    shows("has finished, but its Job is not complete", output)


def test_spare_takes_the_ranks_of_a_lost_host(moments: Mapping[str, Moment]) -> None:
    (spare,), (_, lost, last) = moments["started"].spares, moments["started"].hosts
    used, spare_again = moments["spare used"], moments["spare again"]
    assert (used.hosts, used.spares) == ((0, spare, last), ())
    assert (
        f"with its ranks on hosts 0, {spare}, {last}; no spare is ready, since host "
        f"{lost} is missing" in (used.explained)
    )
    assert used.reads_rank_1 == f"elastic-w-0-{spare}"
    assert moments["started"].reads_rank_1 == f"elastic-w-0-{lost}"
    assert (spare_again.hosts, spare_again.spares) == ((0, spare, last), (lost,))
    assert (
        f"ranks on hosts {members.Members(used.hosts, 1).to_wire().replace(',', ', ')}; spare: "
        f"host {lost}" in (spare_again.explained)
    )


def test_loss_of_a_spare_does_not_disturb_the_run(moments: Mapping[str, Moment]) -> None:
    lost = moments["spare lost"]
    assert lost.hosts == moments["spare again"].hosts and lost.spares == ()
    assert (
        f"no spare is ready, since host {moments['started'].hosts[1]} is missing" in lost.explained
    )


def test_run_continues_with_fewer_hosts_until_others_return(moments: Mapping[str, Moment]) -> None:
    first, second, third = moments["spare lost"].hosts
    away = sorted({*range(SEATS)} - {first, second})
    wait, shrunk, growing, grown = (
        moments[name] for name in ("no spare left", "shrunk", "growing", "grown")
    )
    assert f"waits for host {third} to come back" in wait.explained
    assert "no spare is left" in wait.explained
    assert shrunk.hosts == (first, second)
    assert "runs with 2 of 3 hosts: " in shrunk.explained
    assert f"waits for hosts {away[0]}, {away[1]} to grow again" in shrunk.explained
    assert SEAT in shrunk.explained
    assert f"hosts {away[0]}, {away[1]} will hold ranks after the next save" in growing.explained
    assert len(grown.hosts) == 3 and {first, second} < {*grown.hosts} and len(grown.spares) == 1
    assert "preempted (80): stopped to continue with 3 hosts instead of 2" in grown.explained


def test_pod_that_replaces_host_0_leads_and_has_rank_0(moments: Mapping[str, Moment]) -> None:
    assert "waits for host 0, which leads, to come back" in moments["no leader"].explained
    assert "ranks on" not in moments["no leader"].explained
    leader_again = moments["leader again"]
    assert leader_again.hosts[0] == 0 and sorted((*leader_again.hosts, *leader_again.spares)) == [
        *range(SEATS)
    ]


def test_losses_equal_those_of_an_undisturbed_run(
    moments: Mapping[str, Moment], folder: Path
) -> None:
    """Compare to the bit on three hosts, and up to rounding on two."""
    undisturbed, elastic = read_losses(folder, "steady"), read_losses(folder, "elastic")
    assert [*elastic] == [*undisturbed] == [*range(1, STEPS + 1)]
    wide = moments["no spare left"].saved
    assert {step: loss for step, loss in elastic.items() if step <= wide} == {
        step: loss for step, loss in undisturbed.items() if step <= wide
    }
    assert elastic == pytest.approx(undisturbed, abs=1e-5)

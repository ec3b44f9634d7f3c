"""A gang of real pods with a spare, which may also run on fewer hosts, loses four pods: it goes on each time, and ends
as an undisturbed run does. Another loses a node whose object stays."""

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
from tests.cluster.gangs import PATIENCE_S, Gang, Place, place, until
from tests.cluster.harness import build, images, second_node
from tests.cluster.harness.places import NODE
from tests.cluster.test_recovery import SAVED, await_checkpoint, ended, losses, newest, of_hosts
from tests.compiled import QUICK_COMPILES
from tests.found import shows

pytestmark = pytest.mark.extended

SEAT = "jaxlaunch.test/seat-of-a-host"  # a resource of the node: without a free one a pod waits
SEATS, FEW = 4, 2
STEPS = 300
JOB = of_hosts(STEPS, lr=1e-4)
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
    """What was seen of the run."""

    hosts: tuple[int, ...]  # that hold ranks, in the order of these; none where that is not known
    spares: tuple[int, ...]
    explained: str
    saved: int  # its newest step on storage
    # The pod that the lines of `logs --rank 1` name last, as far as a pod knows its own name.
    reads_rank_1: str


class Run:
    """The job, which waits before its next step except while something happens to it."""

    def __init__(self, here: Place, volume: Path) -> None:
        self._here, self.folder, self._hold = here, volume / "elastic", volume / "elastic.hold"
        self.gang = here.start("elastic", SAVED, env=held(self._hold), **JOB, **ELASTIC)

    def status(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads(
            self._here.launcher("status", "elastic", "-o", "json").stdout
        )
        return found

    def release(self) -> None:
        self._hold.unlink(missing_ok=True)

    def delete(self, host: int) -> None:
        """Deletes its pod as `kubectl delete --force` does, while the run trains."""
        self.release()
        pod = next(one.pod for one in self.gang.hosts if one.number == host)
        pods = f"/api/v1/namespaces/{self._here.namespace}/pods"
        self._here.access.api.delete(f"{pods}/{pod}?gracePeriodSeconds=0")

    def await_ends(self, attempts: int) -> None:
        until(f"{attempts} of its attempts have ended", lambda: ended(self.folder) >= attempts)

    def hold_saved(self) -> Moment:
        """Holds it when it has saved once more."""
        await_checkpoint(self.folder, after=newest(self.folder))
        self._hold.touch()
        return self.moment()

    def moment(self) -> Moment:
        status = self.status()
        lines = self._here.launcher("logs", "elastic", "--rank", "1").stdout.splitlines()
        told = [line.rpartition(" ")[2] for line in lines if "reads on" in line]
        hosts = (
            members.parse_members(status["members"], 1, SEATS).hosts if status["members"] else ()
        )
        explained = self._here.launcher("explain", "elastic").stdout
        return Moment(
            tuple(hosts),
            tuple(status["spares"]),
            explained,
            newest(self.folder),
            told[-1] if told else "",
        )

    def once(self, what: str, is_so: Callable[[Mapping[str, Any]], object]) -> Moment:
        until(what, lambda: is_so(self.status()))
        return self.moment()


def held(by: Path) -> Mapping[str, str]:
    return QUICK_COMPILES | {"HOLD": f"/checkpoints/{by.name}"}


@pytest.fixture(scope="module")
def here(cluster: Access, image: str) -> Iterator[Place]:
    if not cluster.is_ours:
        pytest.skip("the node of the pods gets a resource of its own, and its folders are read")
    with place(cluster, image) as found, nodes.offering(cluster, NODE, SEAT, SEATS):
        yield found


@pytest.fixture(scope="module")
def folder(here: Place) -> Path:
    """The checkpoints of both jobs, by name."""
    return preparations.make_claim(here.access, here.namespace)


@pytest.fixture(scope="module")
def seen(here: Place, folder: Path) -> Mapping[str, Moment]:
    """By name, the moments of the run, which has ended well."""
    run, found = Run(here, folder), {}
    steady = here.start("steady", SAVED, env=held(folder / "never"), **JOB, **STEADY)
    run.hold_saved()
    found["started"] = run.once("its spare is ready", lambda status: len(status["spares"]) == 1)
    lose_hosts(here, run, found)
    lose_leader(here, run, found)
    run.release()
    assert run.gang.ended() == "Completed", run.gang.lines()
    assert steady.ended() == "Completed", steady.lines()
    until("its spare has left", lambda: all(host.has_ended for host in run.gang.hosts))
    return found


def lose_hosts(here: Place, run: Run, found: dict[str, Moment]) -> None:
    """A host, whose pod comes back as the spare; the spare, and a host, while no node takes another pod."""
    lost = found["started"].hosts[1]
    nodes.offer(here.access, NODE, SEAT, FEW)
    run.delete(lost)
    run.await_ends(1)
    found["spare used"] = run.hold_saved()
    nodes.offer(here.access, NODE, SEAT, SEATS)
    found["spare again"] = run.once(
        "the pod is the next spare", lambda status: status["spares"] == [lost]
    )
    nodes.offer(here.access, NODE, SEAT, FEW)
    run.delete(lost)
    until("the spare is gone", lambda: not run.status()["spares"])
    found["spare lost"] = run.hold_saved()
    run.delete(found["spare lost"].hosts[2])
    run.await_ends(2)
    found["no spare left"] = run.moment()
    found["shrunk"] = run.hold_saved()
    nodes.offer(here.access, NODE, SEAT, SEATS)
    found["growing"] = run.once("both hosts are back", lambda status: len(status["spares"]) == 2)
    run.release()
    run.await_ends(3)
    found["grown"] = run.hold_saved()


def lose_leader(here: Place, run: Run, found: dict[str, Moment]) -> None:
    nodes.offer(here.access, NODE, SEAT, FEW)
    run.delete(0)
    run.await_ends(4)
    found["no leader"] = run.once(
        "the pod of host 0 has ended", lambda status: status["members"] is None
    )
    nodes.offer(here.access, NODE, SEAT, SEATS)
    found["leader again"] = run.hold_saved()


@pytest.fixture(scope="module")
def stranded(here: Place, folder: Path) -> Mapping[str, subprocess.CompletedProcess[str]]:
    """What `explain` and `status` say of a gang, one of whose pods is on a node that is gone and whose object stays."""
    gang = here.start("stranded", SAVED, **STRANDED)
    (spare,) = until("its spare is ready", lambda: status(here, gang)["spares"])
    with nodes.changing(), second_node.joined(build.binaries(), images.BASE):
        nodes.offer(here.access, second_node.NODE, SEAT, 1)
        nodes.offer(here.access, NODE, SEAT, FEW)
        delete(here, pod_of(gang, spare))
        until(
            "its pod is on the second node",
            lambda: pod_of(gang, spare)["spec"].get("nodeName") == second_node.NODE,
        )
        until("it is the spare again", lambda: status(here, gang)["spares"] == [spare])
        last = int(status(here, gang)["members"][-1])
        delete(here, pod_of(gang, last))
        until("they change places", lambda: status(here, gang)["spares"] == [last])
        pod = pod_of(gang, spare)
        second_node.stop_kubelet()
        second_node.unknown()
        found = {"no kubelet": explained(here, gang, "but the agent of host")}
        second_node.lose(processes.everything(pod))
        found["not ready"] = explained(here, gang, "no spare is ready, since host")
        here.cluster.delete(PODS, pod["metadata"]["name"], here.namespace)
        found["deleted"] = here.launcher("explain", gang.name)
        found["hosts"] = here.launcher("status", gang.name, "-o", "wide")
        (folder / "stranded.end").touch()
        until("the leader is done", lambda: pod_of(gang, 0)["status"]["phase"] == "Succeeded")
        found["done"] = here.launcher("explain", gang.name)
        assert not gang.status.get("terminalState")
        delete(here, pod)
        assert gang.ended() == "Completed"
        nodes.offer(here.access, NODE, SEAT, SEATS)
    return found


def status(here: Place, gang: Gang) -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(here.launcher("status", gang.name, "-o", "json").stdout)
    return found


def explained(here: Place, gang: Gang, words: str) -> subprocess.CompletedProcess[str]:
    """What `explain` says, once it has these words."""
    return waiting.until(
        lambda: here.launcher("explain", gang.name),
        lambda seen: words in seen.stdout,
        words,
        PATIENCE_S,
    )


def pod_of(gang: Gang, host: int) -> Any:
    """The newest pod of a host; one of nothing but empty parts while there is none."""
    label = "batch.kubernetes.io/job-completion-index"
    found = [pod for pod in gang.pods if pod["metadata"]["labels"][label] == str(host)]
    return max(
        found,
        key=lambda pod: pod["metadata"]["creationTimestamp"],
        default={"spec": {}, "status": {}},
    )


def delete(here: Place, pod: Any) -> None:
    """As `kubectl delete --force` does."""
    path = f"/api/v1/namespaces/{here.namespace}/pods/{pod['metadata']['name']}"
    here.access.api.delete(f"{path}?gracePeriodSeconds=0")


def test_a_gang_that_runs_although_the_kubelet_of_a_node_is_gone_says_so(
    stranded: Mapping[str, Any],
) -> None:
    said = stranded["no kubelet"].stdout
    assert re.search(
        r"stranded runs: node node-1 has not answered since .*, but the agent of host "
        r"\d on it does",
        said,
    )
    shows("but the agent of host … on it does", said)


def test_a_pod_on_a_node_that_is_gone_is_no_spare_and_what_to_do_is_said(
    stranded: Mapping[str, Any],
) -> None:
    gone = f"node {second_node.NODE} has not answered since "
    for moment in ("not ready", "deleted"):
        said = stranded[moment].stdout
        assert re.search(f"no spare is ready, since host . is missing: {gone}", said), said
        assert f"if it is gone for good: kubectl delete node {second_node.NODE}" in said
        shows("with its ranks on hosts … since … missing:", said)
    assert re.search(
        rf"\n *\d +- +no +Terminating +{second_node.NODE} ", stranded["hosts"].stdout
    ), stranded["hosts"]


def test_a_gang_that_is_done_says_which_pod_keeps_its_job_from_it(
    stranded: Mapping[str, Any],
) -> None:
    said = stranded["done"].stdout
    assert re.search(
        r"stranded has finished, but its Job is not complete before pod \S+ has ended: node ", said
    ), said
    assert f"kubectl delete node {second_node.NODE}" in said
    shows("has finished, but its Job is not complete", said)


def test_a_spare_takes_the_ranks_of_a_lost_host_whose_next_pod_is_the_spare(
    seen: Mapping[str, Moment],
) -> None:
    (spare,), (_, lost, last) = seen["started"].spares, seen["started"].hosts
    used, again = seen["spare used"], seen["spare again"]
    assert (used.hosts, used.spares) == ((0, spare, last), ())
    assert (
        f"with its ranks on hosts 0, {spare}, {last}; no spare is ready, since host "
        f"{lost} is missing" in (used.explained)
    )
    assert used.reads_rank_1 == f"elastic-w-0-{spare}"
    assert seen["started"].reads_rank_1 == f"elastic-w-0-{lost}"
    assert (again.hosts, again.spares) == ((0, spare, last), (lost,))
    assert (
        f"ranks on hosts {members.Members(used.hosts, 1).to_wire().replace(',', ', ')}; spare: "
        f"host {lost}" in (again.explained)
    )


def test_the_loss_of_a_spare_disturbs_nothing(seen: Mapping[str, Moment]) -> None:
    lost = seen["spare lost"]
    assert lost.hosts == seen["spare again"].hosts and lost.spares == ()
    assert f"no spare is ready, since host {seen['started'].hosts[1]} is missing" in lost.explained


def test_it_continues_with_fewer_hosts_until_others_are_back(seen: Mapping[str, Moment]) -> None:
    first, second, third = seen["spare lost"].hosts
    away = sorted({*range(SEATS)} - {first, second})
    wait, shrunk, growing, grown = (
        seen[name] for name in ("no spare left", "shrunk", "growing", "grown")
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


def test_the_pod_that_takes_the_place_of_host_0_leads_and_holds_rank_0(
    seen: Mapping[str, Moment],
) -> None:
    assert "waits for host 0, which leads, to come back" in seen["no leader"].explained
    assert "ranks on" not in seen["no leader"].explained
    again = seen["leader again"]
    assert again.hosts[0] == 0 and sorted((*again.hosts, *again.spares)) == [*range(SEATS)]


def test_losses_are_those_of_an_undisturbed_run(seen: Mapping[str, Moment], folder: Path) -> None:
    """To the bit on three hosts, and by rounding on two."""
    undisturbed, found = losses(folder, "steady"), losses(folder, "elastic")
    assert [*found] == [*undisturbed] == [*range(1, STEPS + 1)]
    wide = seen["no spare left"].saved
    assert {step: loss for step, loss in found.items() if step <= wide} == {
        step: loss for step, loss in undisturbed.items() if step <= wide
    }
    assert found == pytest.approx(undisturbed, abs=1e-5)

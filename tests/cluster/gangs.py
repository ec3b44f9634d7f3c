"""Jobs on a real cluster as tests start and watch them: rendered, changed where a test needs it, and created."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from launcher import hosts, podlogs
from launcher.cluster import Cluster
from launcher.hosts import Host
from launcher.jobset import NAME_LABEL, render
from launcher.kinds import CONFIGMAPS, JOBSETS, NETWORK_POLICIES, PODS
from launcher.logs import Line, Select
from launcher.profile import Profile
from launcher.schema import JobSpec

PATIENCE_S = 240.0  # the machine is shared: long enough never to be the reason
PROGRAMS = Path(__file__).parent / "programs"
KINDS = {kind.kind: kind for kind in (JOBSETS, NETWORK_POLICIES, CONFIGMAPS)}
T = TypeVar("T")
Object = dict[str, Any]


def program(name: str, *arguments: str) -> list[str]:
    """The command that runs a file of programs/ in any image that has a Python."""
    return ["python", "-c", (PROGRAMS / name).read_text(), *arguments]


def until(what: str, look: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """The first true answer; fails with `what` when patience ends."""
    end = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < end, f"{what}: not within {seconds:.0f} s"
        time.sleep(0.1)
    return answer


class Gang:
    """One job in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    def start(self, profile: Profile, change: Callable[[Object], None] = lambda jobset: None, **job: Any) -> Gang:
        """Creates the job's objects; `change` may alter its JobSet before."""
        document = {"name": self.name, "namespace": self.namespace, "accelerator": {"type": "cpu"}} | job
        for made in render(JobSpec.model_validate(document), profile):
            if made["kind"] == "JobSet":
                change(made)
            self.cluster.create(KINDS[made["kind"]], made)
        return self

    @property
    def jobset(self) -> Object:
        found = self.cluster.get(JOBSETS, self.name, self.namespace)
        assert found is not None, f"JobSet {self.name} is gone"
        return found

    @property
    def status(self) -> Object:
        return self.jobset.get("status", {})

    @property
    def counters(self) -> tuple[int, int]:
        """Restarts, and those that count towards the budget."""
        status = self.status
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the newest generation."""
        return hosts.newest(self.jobset, self.cluster.list(PODS, self.namespace, labels=f"{NAME_LABEL}={self.name}"))

    def ended(self) -> str:
        """Completed or Failed, once it is."""
        return until(f"{self.name} ends", lambda: self.status.get("terminalState", ""))

    def runs(self, generation: int = 0) -> list[Host]:
        """All hosts of a generation, once their containers run."""

        def running() -> list[Host]:
            found = self.hosts
            wanted = hosts.wanted(self.jobset)
            is_whole = len(found) == wanted and all(host.running and host.generation == generation for host in found)
            return found if is_whole else []

        return until(f"generation {generation} of {self.name} runs", running)

    def lines(self, **select: Any) -> list[Line]:
        """What the newest generation's pods wrote so far."""
        jobset = self.jobset
        sources = [podlogs.source(jobset, host) for host in self.hosts if host.has_started]
        return list(podlogs.read(self.cluster, self.namespace, sources, Select(**select)))

    def says(self, text: str) -> str:
        """The newest generation's line that holds `text`, once there is one."""
        return until(
            f"{self.name} says {text!r}", lambda: next((one.text for one in self.lines() if text in one.text), "")
        )


def without_agent(command: list[str]) -> Callable[[Object], None]:
    """Puts another command in the agent's place."""

    def change(jobset: Object) -> None:
        for one in jobset["spec"]["replicatedJobs"]:
            one["template"]["spec"]["template"]["spec"]["containers"][0]["command"] = command

    return change


def verdicts(found: list[Host]) -> list[Mapping[str, Any]]:
    """What the agents of these hosts left at their end."""
    return [host.farewell["verdict"] for host in found if host.farewell is not None]

"""Jobs on a real cluster as tests start and watch them: rendered, changed where a test needs it, and submitted."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from jaxlaunch.launcher.job.defaults import ClusterDefaults, Defaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.jobs.logs import lines as podlogs
from jaxlaunch.launcher.jobs.logs.lines import Line, Selection
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.jobs.status.hosts import Host
from jaxlaunch.launcher.jobs.submit import Submission
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.launcher.manifests import code
from jaxlaunch.launcher.manifests.jobset import render, resolve
from jaxlaunch.records.verdict import Verdict
from tests.cluster import forked, preparations, waiting
from tests.cluster.access import Access

PATIENCE_S = 600.0  # the machine is shared: long enough never to be the reason
PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[2]
T = TypeVar("T")
Object = dict[str, Any]
Change = Callable[[Object], None]


def program(name: str, *arguments: str) -> list[str]:
    """The command that runs a file of programs/ in any image that has a Python."""
    return ["python", "-c", (PROGRAMS / name).read_text(), *arguments]


def until(what: str, look: Callable[[], T], seconds: float = PATIENCE_S) -> T:
    """The first true answer; fails with `what` when patience ends."""
    return waiting.until(look, bool, what, seconds)


class Gang:
    """One job in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

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
        """Restarts, and those that count toward the limit."""
        status = self.status
        return status.get("restarts", 0), status.get("restartsCountTowardsMax", 0)

    @property
    def pods(self) -> list[Object]:
        return self.cluster.list(PODS, self.namespace, labels=f"{NAME_LABEL}={self.name}")

    @property
    def hosts(self) -> list[Host]:
        """The hosts of the newest generation."""
        return hosts.newest_hosts(self.jobset, self.pods)

    def ended(self) -> str:
        """Completed or Failed, once it is."""
        return until(f"{self.name} ends", lambda: self.status.get("terminalState", ""))

    def runs(self, generation: int = 0) -> list[Host]:
        """All hosts of a generation, once their containers run."""
        wanted = hosts.count_hosts(self.jobset)

        def running() -> list[Host]:
            jobset = self.jobset
            status, there = jobset.get("status", {}), hosts.newest_hosts(jobset, self.pods)
            found = [host for host in there if host.running and host.generation == generation]
            if len(found) == wanted:
                return found
            over = status.get("terminalState") or any(
                host.generation > generation for host in there
            )
            assert not over, f"{self.name} ran on without it: {status}, {there}"
            return []

        return until(f"generation {generation} of {self.name} runs", running)

    def lines(self, **select: Any) -> list[Line]:
        """What the newest generation's pods wrote so far."""
        jobset = self.jobset
        started = [podlogs.log_source(jobset, host) for host in self.hosts if host.has_started]
        # Asked often, by who waits.
        by_kubelet = [dataclasses.replace(one, agent_port=None) for one in started]
        return list(
            podlogs.read_logs(
                self.cluster,
                self.namespace,
                by_kubelet,
                Selection(**select),
                report_unread=print,
                say=print,
            )
        )

    def says(self, text: str) -> str:
        """The newest generation's line that holds `text`, once there is one."""
        return until(
            f"{self.name} says {text!r}",
            lambda: next((one.text for one in self.lines() if text in one.text), ""),
        )


class Place:
    """A namespace of the cluster, the image of its jobs, and the product's own way to it."""

    def __init__(self, access: Access, namespace: str, image: str) -> None:
        self.access, self.namespace, self.image = access, namespace, image
        self.cluster = Cluster.connect()

    def start(
        self, name: str, defaults: Defaults, change: Change = lambda jobset: None, **job: Any
    ) -> Gang:
        """Submits a job; `change` may alter its JobSet before."""
        document = {
            "name": name,
            "namespace": self.namespace,
            "image": self.image,
            "accelerator": {"type": "cpu"},
        }
        spec = JobSpec.model_validate(document | job)
        resolved = resolve(spec, ClusterDefaults(defaults))
        manifests = render(resolved, code.build_bundle(resolved.code, Path()))
        change(manifests[0])
        Submission(self.cluster, manifests, lambda text: None).submit()
        return Gang(self.cluster, self.namespace, name)

    def launcher(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The command line in this namespace."""
        return forked.run(
            [*words, "-n", self.namespace], cwd=Path.cwd(), env=self.access.env, timeout=PATIENCE_S
        )


@contextmanager
def place(access: Access, image: str) -> Iterator[Place]:
    """A fresh namespace, at the restricted level, for the tests of a module."""
    namespace = preparations.make_namespace(access, "restricted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(access.kubeconfig))
        yield Place(access, namespace, image)
    preparations.remove_namespace(access, namespace)


def without_agent(command: list[str]) -> Change:
    """Puts another command in the agent's place."""

    def change(jobset: Object) -> None:
        for one in jobset["spec"]["replicatedJobs"]:
            one["template"]["spec"]["template"]["spec"]["containers"][0]["command"] = command

    return change


def verdicts(found: list[Host]) -> list[Verdict]:
    """What the agents of these hosts left at their end."""
    return [report.verdict for host in found if (report := host.termination_report) is not None]

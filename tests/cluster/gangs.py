"""Start and watch jobs on a real cluster: rendered, changed where a test needs it, submitted."""

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


def program_command(name: str, *arguments: str) -> list[str]:
    """Return the command that runs a file of programs/ in any image with a Python."""
    return ["python", "-c", (PROGRAMS / name).read_text(), *arguments]


def wait_for(description: str, condition: Callable[[], T], timeout_s: float = PATIENCE_S) -> T:
    """Return the first true result of `condition`. Fail with the description after `timeout_s`."""
    return waiting.wait_until(condition, bool, description, timeout_s)


class Gang:
    """One job in its namespace."""

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self.cluster, self.namespace, self.name = cluster, namespace, name

    @property
    def jobset(self) -> Object:
        jobset = self.cluster.get(JOBSETS, self.name, self.namespace)
        assert jobset is not None, f"JobSet {self.name} is gone"
        return jobset

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

    def wait_for_end(self) -> str:
        """Wait for the end and return Completed or Failed."""
        return wait_for(f"{self.name} ends", lambda: self.status.get("terminalState", ""))

    def wait_until_running(self, generation: int = 0) -> list[Host]:
        """Wait until all hosts of a generation run and return them."""
        host_count = hosts.count_hosts(self.jobset)

        def find_running() -> list[Host]:
            jobset = self.jobset
            status, newest = jobset.get("status", {}), hosts.newest_hosts(jobset, self.pods)
            running = [host for host in newest if host.running and host.generation == generation]
            if len(running) == host_count:
                return running
            has_moved_on = status.get("terminalState") or any(
                host.generation > generation for host in newest
            )
            assert not has_moved_on, f"{self.name} ran on without it: {status}, {newest}"
            return []

        return wait_for(f"generation {generation} of {self.name} runs", find_running)

    def read_lines(self, **selection: Any) -> list[Line]:
        """Return what the newest generation's pods wrote so far."""
        jobset = self.jobset
        sources = [podlogs.log_source(jobset, host) for host in self.hosts if host.has_started]
        # Asked often, by who waits.
        by_kubelet = [dataclasses.replace(source, agent_port=None) for source in sources]
        return list(
            podlogs.read_logs(
                self.cluster,
                self.namespace,
                by_kubelet,
                Selection(**selection),
                report_unread=print,
                say=print,
            )
        )

    def wait_for_line(self, text: str) -> str:
        """Wait for a line of the newest generation that contains `text` and return it."""
        return wait_for(
            f"{self.name} says {text!r}",
            lambda: next((line.text for line in self.read_lines() if text in line.text), ""),
        )


class Workspace:
    """A namespace of the cluster, the image of its jobs, and the product's own client."""

    def __init__(self, access: Access, namespace: str, image: str) -> None:
        self.access, self.namespace, self.image = access, namespace, image
        self.cluster = Cluster.connect()

    def start(
        self, name: str, defaults: Defaults, change: Change = lambda jobset: None, **job: Any
    ) -> Gang:
        """Submit a job; `change` may alter its JobSet before."""
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
        """Run a command of the launcher in this namespace."""
        return forked.run_forked(
            [*words, "-n", self.namespace], cwd=Path.cwd(), env=self.access.env, timeout=PATIENCE_S
        )


@contextmanager
def make_workspace(access: Access, image: str) -> Iterator[Workspace]:
    """Yield a fresh namespace at the restricted level for the tests of a module."""
    namespace = preparations.make_namespace(access, "restricted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(access.kubeconfig))
        yield Workspace(access, namespace, image)
    preparations.remove_namespace(access, namespace)


def replace_agent(command: list[str]) -> Change:
    """Replace the agent by another command."""

    def change(jobset: Object) -> None:
        for job in jobset["spec"]["replicatedJobs"]:
            job["template"]["spec"]["template"]["spec"]["containers"][0]["command"] = command

    return change


def read_verdicts(hosts: list[Host]) -> list[Verdict]:
    """Return the verdicts in the termination messages of these hosts."""
    return [report.verdict for host in hosts if (report := host.termination_report) is not None]

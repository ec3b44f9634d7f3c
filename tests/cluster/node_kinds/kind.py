"""A kind of node, written from its provider's pages and never from the launcher's own data.

What a pod may ask of a node is here twice, on purpose: launcher/platforms says what is asked for,
these modules say what is there, and test_node_kinds.py has the scheduler compare them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

EFFECT = "NoSchedule"  # of every taint here


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of node, and the jobs whose pods may run on it."""

    name: str
    source: str  # where its labels, taints and sizes were read
    labels: Mapping[str, str]
    taints: Mapping[str, str]  # key -> value
    allocatable: Mapping[str, str]
    takes: tuple[str, ...]  # names of jobs of its platform


@dataclasses.dataclass(frozen=True)
class Platform:
    """The kinds of node of a platform, and jobs for it."""

    kinds: tuple[Kind, ...]
    jobs: Mapping[str, str]  # name -> lines of its YAML
    defaults: str = ""

    def meant_for(self, job: str) -> list[str]:
        """Return the kinds on which a job may run."""
        return [kind.name for kind in self.kinds if job in kind.takes]


def cpu_left(vcpus: int) -> str:
    """Return the CPUs that the kubelet leaves to pods, on GKE and EKS alike.

    It reserves 6 % of the first core, 1 % of the next, 0.5 % of the next two and 0.25 % of the
    others (GKE: Plan node sizes; Karpenter's instance types).
    """
    reserved = sum(
        60 if core == 0 else 10 if core == 1 else 5 if core < 4 else 2.5 for core in range(vcpus)
    )
    return f"{int(1000 * vcpus - reserved)}m"


def split_names(jobs: str) -> tuple[str, ...]:
    """Return the names in a text, between commas."""
    return tuple(name.strip() for name in jobs.split(",") if name.strip())


def find_unknown_jobs(platform: Platform) -> Iterable[str]:
    """Return names of jobs that a kind accepts but that do not exist."""
    return {job for kind in platform.kinds for job in kind.takes} - platform.jobs.keys()

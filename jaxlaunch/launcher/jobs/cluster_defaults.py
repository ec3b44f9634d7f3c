"""What a cluster decides about a job before it is rendered: its cluster defaults, and whether its gang has a Secret."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, SECRETS

if TYPE_CHECKING:
    from jaxlaunch.launcher.job.load import JobFile  # pydantic is most of a start, and few commands read a job

NAME = "jaxlaunch"  # of the ConfigMap
SYSTEM = "jaxlaunch-system"  # the namespace of what is every team's


def find_defaults(cluster: Cluster, namespace: str) -> tuple[ClusterDefaults, str | None]:
    """Return the defaults for jobs in a namespace, its own before the cluster's; and where they are, None for our own.

    Raises JobFaults with everything that is wrong with them.
    """
    for place in dict.fromkeys((namespace, SYSTEM)):
        # Whoever may not read it does without, as on a cluster that has none.
        with ignore_forbidden():
            if (config_map := cluster.get(CONFIGMAPS, NAME, place)) is not None:
                where = f"ConfigMap {place}/{NAME}"
                return defaults.of_config_map(config_map, where), where
    return ClusterDefaults(), None


def settle_gang_secret(file: JobFile, cluster: Cluster, namespace: str, say: Callable[[str], None]) -> JobFile:
    """Set `gang_secret` where the job file leaves it out: true for several hosts, if the user may create Secrets."""
    if file.spec.gang_secret is not None:
        return file
    has_several = file.spec.host_count > 1
    may = has_several and cluster.may("create", SECRETS, namespace)
    if has_several and not may:
        say(
            f"the hosts' traffic is not encrypted, since you may not create Secrets in namespace {namespace}: "
            "the job's NetworkPolicy alone keeps others out (docs/kubernetes.md, Many hosts)"
        )
    return dataclasses.replace(file, spec=file.spec.model_copy(update={"gang_secret": may}))

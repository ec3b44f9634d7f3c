"""The cluster defaults that a cluster's owner left in the cluster."""

from __future__ import annotations

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.kubernetes.client import ApiError, Cluster
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS

NAME = "jaxlaunch"  # of the ConfigMap
SYSTEM = "jaxlaunch-system"  # the namespace of what is every team's


def find(cluster: Cluster, namespace: str) -> tuple[ClusterDefaults, str | None]:
    """The defaults for jobs in a namespace, its own before the cluster's; and where they are, None for our own.

    Raises JobFaults with everything that is wrong with them.
    """
    for place in dict.fromkeys((namespace, SYSTEM)):
        try:
            found = cluster.get(CONFIGMAPS, NAME, place)
        except ApiError as error:
            if error.status != 403:
                raise
            continue  # whoever may not read it does without, as on a cluster that has none
        if found is not None:
            where = f"ConfigMap {place}/{NAME}"
            return defaults.of_config_map(found, where), where
    return ClusterDefaults(), None

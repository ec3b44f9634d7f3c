"""The profile that a cluster's owner left in the cluster."""

from __future__ import annotations

from launcher import profile
from launcher.cluster import ApiError, Cluster
from launcher.kinds import CONFIGMAPS
from launcher.profile import Profile

NAME = "jaxlaunch"  # of the ConfigMap
SYSTEM = "jaxlaunch-system"  # the namespace of what is every team's


def find(cluster: Cluster, namespace: str) -> tuple[Profile, str | None]:
    """The profile for jobs in a namespace, its own before the cluster's; and where it is, None for the defaults.

    Raises JobFaults with everything that is wrong with it.
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
            return profile.of_config_map(found, where), where
    return Profile(), None

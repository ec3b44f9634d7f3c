"""The cluster defaults of a namespace, and the decision whether a gang gets a Secret."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, SECRETS

if TYPE_CHECKING:
    # Importing pydantic takes most of the start-up time, and few commands read a job.
    from jaxlaunch.launcher.job.load import JobFile

# ConfigMap with the defaults of a namespace.
CONFIG_MAP_NAME = "jaxlaunch"
# Namespace whose defaults apply to namespaces without their own.
SYSTEM_NAMESPACE = "jaxlaunch-system"


def find_defaults(cluster: Cluster, namespace: str) -> tuple[ClusterDefaults, str | None]:
    """Return the defaults for jobs in a namespace, and their source, None for the built-in ones.

    The namespace's own defaults replace those of SYSTEM_NAMESPACE. Raises JobFaultsError if the
    ConfigMap has mistakes.
    """
    for defaults_namespace in dict.fromkeys((namespace, SYSTEM_NAMESPACE)):
        # If the user may not read the ConfigMap, it counts as missing.
        with ignore_forbidden():
            config_map = cluster.get(CONFIGMAPS, CONFIG_MAP_NAME, defaults_namespace)
            if config_map is not None:
                source = f"ConfigMap {defaults_namespace}/{CONFIG_MAP_NAME}"
                return defaults.read_config_map(config_map, source), source
    return ClusterDefaults(), None


def resolve_gang_secret(
    file: JobFile, cluster: Cluster, namespace: str, say: Callable[[str], None]
) -> JobFile:
    """Return the job with `gang_secret` set.

    The default is true if the job has several hosts and the user may create Secrets. If the user
    may not, `say` is called with a warning.
    """
    if file.spec.gang_secret is not None:
        return file
    has_several_hosts = any(part.spec.host_count > 1 for part, _ in file.list_parts())
    is_allowed = has_several_hosts and cluster.is_allowed("create", SECRETS, namespace)
    if has_several_hosts and not is_allowed:
        say(
            "the hosts' traffic is not encrypted, since you may not create Secrets in namespace "
            f"{namespace}: the job's NetworkPolicy alone keeps others out. Ask the cluster "
            "administrator for the verb create on secrets, as the role jaxlaunch-user of "
            "k8s/install.yaml has it within its policy; gang_secret: false accepts it and says "
            "nothing"
        )
    return file.with_values(gang_secret=is_allowed)

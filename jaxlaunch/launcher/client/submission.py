"""From a job file to a submission: the cluster, its defaults and the manifests of the job."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.jobs import cluster_defaults
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.manifests.jobset import PreparedJob, prepare

Say = Callable[[str], None]


def read_defaults(
    cluster: Cluster, namespace: str, defaults_file: Path | None, say: Say
) -> ClusterDefaults:
    """Return the defaults of a file, or else those of the cluster, and say where they are."""
    if defaults_file is not None:
        return defaults.load_defaults(defaults_file)
    default_values, source = cluster_defaults.find_defaults(cluster, namespace)
    if source is not None:
        say(f"the cluster defaults are in {source}")
    return default_values


def prepare_job(
    file: JobFile, cluster: Cluster, namespace: str, default_values: ClusterDefaults, say: Say
) -> PreparedJob:
    """Return the job with the defaults of a cluster, and a Secret if the user may create it."""
    file = cluster_defaults.resolve_gang_secret(file, cluster, namespace, say)
    return prepare(file, default_values, namespace)

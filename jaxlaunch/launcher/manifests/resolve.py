"""resolve(job, defaults) → ResolvedJob: every value that the cluster defaults or the platform fill in, settled once.

Pure. Each subject is a file: what it takes of the job and of the cluster (resolve), what may be wrong with that
(faults), what it adds to the pods (patch). Whoever checks, renders or estimates a job afterwards takes the resolved job
and looks at no defaults. A value that no one has given stays None, for the faults.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from jaxlaunch.launcher.errors import Fault, KeyPath
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.kubernetes.labels import MAIN_CONTAINER
from jaxlaunch.launcher.manifests import code, network, nodes, security, storage
from jaxlaunch.launcher.manifests.code import JobCode
from jaxlaunch.launcher.manifests.network import JobNetwork
from jaxlaunch.launcher.manifests.nodes import JobNodes
from jaxlaunch.launcher.manifests.security import JobSecurity
from jaxlaunch.launcher.manifests.storage import JobStorage


@dataclasses.dataclass(frozen=True)
class ResolvedJob:
    """A job with all that its pods need. `spec` is as the file has it: what a subject has settled is read there."""

    spec: JobSpec
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    network: JobNetwork
    nodes: JobNodes
    storage: JobStorage
    security: JobSecurity
    code: JobCode
    filled: Mapping[KeyPath, KeyPath]  # key of the job → key of the cluster defaults that its value comes from

    def faults(self) -> Iterator[Fault]:
        """Everything that keeps the job from running there, with what to do about it."""
        yield from code.faults(self.code, taken=(MAIN_CONTAINER, *self.network.containers))
        yield from nodes.faults(self.nodes)
        yield from network.faults(self.network, self.nodes)
        yield from storage.faults(self.storage)


def resolve(job: JobSpec, defaults: ClusterDefaults) -> ResolvedJob:
    """The job as this cluster would run it. What the job gives counts before the defaults, and these before ours."""
    given = defaults.values
    where = job.platform or given.platform
    connected = network.resolve(job, given, where)
    stored = storage.resolve(job, given, where)
    keys = ("platform", "image", "queue", "service_account")
    filled: dict[KeyPath, KeyPath] = {
        (key,): (key,) for key in keys if not getattr(job, key) and key in given.model_fields_set
    }
    return ResolvedJob(
        spec=job,
        labels=given.labels | job.labels,
        annotations=given.annotations | job.annotations,
        network=connected,
        nodes=nodes.resolve(job, given, where, connected.chosen),
        storage=stored,
        security=security.resolve(job, given, pins_memory=connected.pinning is not None),
        code=code.resolve(job, given),
        filled={**filled, **connected.filled, **stored.filled},
    )

"""prepare(file, defaults) → manifests: the one way from a job file to what is written to a cluster.

A job is resolved, judged, bundled and rendered here for every command that needs its manifests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from jaxlaunch.launcher.errors import Fault, JobFaults, KeyPath
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.kubernetes import objects, pod_rules
from jaxlaunch.launcher.manifests import code, jobset, security
from jaxlaunch.launcher.manifests.resolve import ResolvedJob, resolve
from jaxlaunch.launcher.yaml.reader import AFTER_THE_FILE


class Prepared(NamedTuple):
    """A job that this cluster can run, and its manifests: the JobSet first."""

    job: ResolvedJob
    manifests: list[dict[str, Any]]

    def with_secret(self) -> list[dict[str, Any]]:
        """The manifests with the Secret of the job's gang, new each time: to be sent, and never printed."""
        if not self.job.spec.gang_secret:
            return self.manifests
        return [*self.manifests, security.gang_secret(self.manifests[0]["metadata"])]


def prepare(file: JobFile, defaults: ClusterDefaults, namespace: str | None = None) -> Prepared:
    """The manifests of a job file on a cluster with these defaults, in `namespace` where the job names none.

    Raises JobFaults with everything that keeps the job from running there, and UserError for code that cannot be
    packed.
    """
    job = resolve(file.spec, defaults)
    if found := list(job.faults()):
        raise _located(found, job.filled, file, defaults)
    manifests = jobset.render(job, code.bundle(job.code, file.folder))
    if found := list(pod_rules.find_template_faults(objects.pod_template(manifests[0]))):
        raise _located(found, job.filled, file, defaults)
    if namespace is not None:  # after rendering: the same job has one hash, whoever names its namespace
        for manifest in manifests:
            manifest["metadata"] = {**manifest["metadata"], "namespace": namespace}
    return Prepared(job, manifests)


def _located(
    faults: Iterable[Fault], filled: Mapping[KeyPath, KeyPath], file: JobFile, defaults: ClusterDefaults
) -> JobFaults:
    """The faults, each at its line: in the job file, or in the cluster defaults that its value comes from."""
    located = []
    for fault in faults:
        prefixes = (fault.path[:end] for end in range(len(fault.path), 0, -1))
        source = next((filled[path] for path in prefixes if path in filled), None)
        if source is None:
            located.append(file.source.locate(fault))
        else:
            fault = defaults.source.locate(dataclasses.replace(fault, path=source))
            located.append(dataclasses.replace(fault, line=AFTER_THE_FILE + fault.line))
    return JobFaults(located)

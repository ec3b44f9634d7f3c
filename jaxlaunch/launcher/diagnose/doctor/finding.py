"""The form of a finding of a check, and what the checks look at.

A finding says what is wrong, why it matters, how to fix it, and who can. `launcher doctor` shows all findings;
`launcher submit` refuses a job by those that fail.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from jaxlaunch.launcher.diagnose.text import Renderer, Text
from jaxlaunch.launcher.kubernetes import kinds, labels
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import Kind
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import count_pods, pod_requests

Level = Literal["ok", "warn", "fail", "unknown"]
Whose = Literal["yours", "cluster"]
Obj = dict[str, Any]

# Exit codes, as of every command.
USER, ADMIN = 2, 3
# How a fix of the administrator's begins.
ASK_ADMIN = "ask the cluster administrator to"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is as it should be, or is not, or cannot be known from here.

    Attributes:
        summary: Template of what it is.
        reason: Template of why that matters.
        remedy: Template of how to fix it.
        whose: Who can fix it: the user, or the administrator of the cluster.
        check: The check that found it.
        fields: The fields of the templates.
    """

    level: Level
    summary: str
    reason: str = ""
    remedy: str = ""
    whose: Whose = "yours"
    check: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def what(self) -> str:
        """The summary, as text."""
        return self._render(self.summary)

    @property
    def why(self) -> str:
        """The reason, as text."""
        return self._render(self.reason)

    @property
    def fix(self) -> str:
        """The remedy, as text."""
        return self._render(self.remedy)

    def _render(self, template: str) -> str:
        return Renderer(is_whole=True).render(Text(template, **self.fields)) if template else ""

    def to_json(self) -> dict[str, str]:
        """Return the texts; only of what fails it matters who can fix it."""
        texts = {"check": self.check, "level": self.level, "what": self.what, "why": self.why, "fix": self.fix}
        texts |= {"whose": self.whose} if self.level == "fail" else {}
        return {name: text for name, text in texts.items() if text or name == "check"}


Findings = Iterator[Finding]


def ok(what: str, /, **fields: Any) -> Finding:
    """Return that it is as it should be."""
    return Finding("ok", what, fields=fields)


def warn(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return what is not as it should be, with which the job may run all the same."""
    return Finding("warn", what, why, fix, fields=fields)


def fail(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return why the job will not run, where the user can fix it."""
    return Finding("fail", what, why, fix, fields=fields)


def fail_admin(what: str, why: str, fix: str, /, **fields: Any) -> Finding:
    """Return why the job will not run, where the administrator of the cluster can fix it."""
    return Finding("fail", what, why, fix, "cluster", fields=fields)


def unknown(what: str, why: str, fix: str = "", /, **fields: Any) -> Finding:
    """Return what cannot be known from here."""
    return Finding("unknown", what, why, fix, fields=fields)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 when nothing fails, 3 when the administrator must fix something, 2 when the user can fix it all."""
    failing = {finding.whose for finding in findings if finding.level == "fail"}
    return ADMIN if "cluster" in failing else USER if failing else 0


# --- what the checks look at ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """What a job's checkpoints take of a PersistentVolumeClaim: those that are kept, and one that is being written."""

    claim: str
    kept: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A namespace, and the manifests of the job that is to run there, the JobSet first.

    Attributes:
        checkpoints: Traced on demand; None where they are on no claim, or not known.
        is_example: Whether it is the smallest job there is, in place of one of the user's.
    """

    cluster: Cluster
    namespace: str
    manifests: Sequence[Obj]
    checkpoints: Callable[[], Checkpoints | None] = lambda: None
    is_example: bool = False

    @property
    def jobset(self) -> Obj:
        """The job's JobSet."""
        return self.manifests[0]

    @cached_property
    def name(self) -> str:
        """The name of the job."""
        return str(self.jobset["metadata"]["name"])

    @cached_property
    def template(self) -> Mapping[str, Any]:
        """The pod template of the job."""
        return pod_template(self.jobset)

    @cached_property
    def admitted(self) -> Obj:
        """The job's JobSet, its pods with what their RuntimeClass adds: overhead, node labels and tolerations."""
        name = self.template["spec"].get("runtimeClassName")
        runtime_class = self.find(kinds.RUNTIME_CLASSES, name) if name else None
        if runtime_class is None:
            return self.jobset
        jobset = copy.deepcopy(self.jobset)
        spec, scheduling = pod_template(jobset)["spec"], runtime_class.get("scheduling") or {}
        spec["overhead"] = (runtime_class.get("overhead") or {}).get("podFixed") or {}
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **(scheduling.get("nodeSelector") or {})}
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *(scheduling.get("tolerations") or ())]
        return jobset

    @cached_property
    def pods(self) -> int:
        """How many pods the job has."""
        return count_pods(self.jobset)

    @property
    def queue(self) -> str | None:
        """The LocalQueue that the job names."""
        name: str | None = self.jobset["metadata"]["labels"].get(labels.QUEUE)
        return name

    @property
    def unrequested(self) -> list[str]:
        """Of cpu and memory, what neither the pods request nor a LimitRange that may be read gives them."""
        requests = pod_requests(pod_template(self.admitted)["spec"])
        missing = [name for name in ("cpu", "memory") if name not in requests]
        return [name for name in missing if not self.is_example and name not in (self.defaulted or ())]

    @cached_property
    def defaulted(self) -> set[str] | None:
        """What LimitRanges of the namespace set where a container sets nothing; None where they may not be read."""
        with ignore_forbidden():
            ranges = self.cluster.list(kinds.LIMIT_RANGES, self.namespace)
            limits = [limit for limit_range in ranges for limit in limit_range["spec"].get("limits") or ()]
            blocks = [
                limit.get(key) or ()
                for limit in limits
                if limit.get("type") == "Container"
                for key in ("default", "defaultRequest", "max")
            ]
            return {name for block in blocks for name in block}
        return None

    @cached_property
    def labels(self) -> Mapping[str, str] | None:
        """The namespace's labels; None where it does not exist or may not be read."""
        namespace = self.find(kinds.NAMESPACES, self.namespace)
        return None if namespace is None else namespace["metadata"].get("labels") or {}

    def own_names(self, kind: Kind) -> set[str]:
        """Return the names of the objects of a kind that the job brings next to its JobSet."""
        return {manifest["metadata"]["name"] for manifest in self.manifests[1:] if manifest["kind"] == kind.kind}

    def find(self, kind: Kind, name: str, namespace: str | None = None) -> Obj | None:
        """Return an object; None where it does not exist or the user may not read it."""
        with ignore_forbidden():
            return self.cluster.get(kind, name, namespace)
        return None

    def names(self, kind: Kind, namespace: str | None = None) -> list[str]:
        """Return the names of all objects of a kind; none where the user may not list them."""
        with ignore_forbidden():
            return [obj["metadata"]["name"] for obj in self.cluster.list(kind, namespace)]
        return []

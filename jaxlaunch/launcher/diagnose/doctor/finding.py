"""The result of a check, and the namespace and job that are checked.

A finding says what is wrong, why it matters, how to fix it, and who can fix it. `launcher doctor`
shows all findings. `launcher submit` rejects a job if one of its findings is a failure.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NotRequired, cast

from typing_extensions import TypedDict

from jaxlaunch.launcher.diagnose.text import Renderer, Text
from jaxlaunch.launcher.kubernetes import kinds, labels
from jaxlaunch.launcher.kubernetes.client import Cluster, ignore_forbidden
from jaxlaunch.launcher.kubernetes.kinds import Kind
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.kubernetes.resources import count_pods, pod_requests

Level = Literal["ok", "warn", "fail", "unknown"]
Whose = Literal["yours", "cluster"]
Obj = dict[str, Any]

# Exit codes of `launcher doctor` if a check fails.
USER_EXIT_CODE, ADMIN_EXIT_CODE = 2, 3
# Beginning of a remedy that only an administrator can carry out.
ASK_ADMIN = "ask the cluster administrator to"


class FindingTexts(TypedDict):
    """A finding as JSON. Only a failure has the field `whose`."""

    check: str
    level: Level
    what: str
    why: NotRequired[str]
    fix: NotRequired[str]
    whose: NotRequired[Whose]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of a check: something is correct, is not, or cannot be known.

    Attributes:
        level: Severity.
        summary: Template of the sentence that states the finding.
        reason: Template of the reason why it matters.
        remedy: Template of the advice.
        whose: Who can fix it: the user ("yours"), or the administrator ("cluster").
        check: Name of the check.
        fields: Fields of the templates.
    """

    level: Level
    summary: str
    reason: str = ""
    remedy: str = ""
    whose: Whose = "yours"
    check: str = ""
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def summary_text(self) -> str:
        """The rendered summary."""
        return self._render_template(self.summary)

    @property
    def reason_text(self) -> str:
        """The rendered reason."""
        return self._render_template(self.reason)

    @property
    def remedy_text(self) -> str:
        """The rendered remedy."""
        return self._render_template(self.remedy)

    def _render_template(self, template: str) -> str:
        return (
            Renderer(has_full_messages=True).render(Text(template, **self.fields))
            if template
            else ""
        )

    def to_json(self) -> FindingTexts:
        """Return the texts as JSON."""
        texts = {"what": self.summary_text, "why": self.reason_text, "fix": self.remedy_text}
        if self.level == "fail":
            texts["whose"] = self.whose
        texts = {name: text for name, text in texts.items() if text}
        return cast(FindingTexts, {"check": self.check, "level": self.level, **texts})


Findings = Iterator[Finding]


def ok_finding(summary: str, /, **fields: Any) -> Finding:
    """Return the finding that something is correct."""
    return Finding("ok", summary, fields=fields)


def warning_finding(summary: str, reason: str, remedy: str, /, **fields: Any) -> Finding:
    """Return the finding of a problem that does not keep the job from running."""
    return Finding("warn", summary, reason, remedy, fields=fields)


def user_failure(summary: str, reason: str, remedy: str, /, **fields: Any) -> Finding:
    """Return the finding of a problem that keeps the job from running and that the user can fix."""
    return Finding("fail", summary, reason, remedy, fields=fields)


def admin_failure(summary: str, reason: str, remedy: str, /, **fields: Any) -> Finding:
    """Return the finding of a problem that keeps the job from running, for an administrator."""
    return Finding("fail", summary, reason, remedy, "cluster", fields=fields)


def unknown_finding(summary: str, reason: str, remedy: str = "", /, **fields: Any) -> Finding:
    """Return the finding that something cannot be checked."""
    return Finding("unknown", summary, reason, remedy, fields=fields)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 without failures, 3 if an administrator must fix one of them, and else 2."""
    owners = {finding.whose for finding in findings if finding.level == "fail"}
    return ADMIN_EXIT_CODE if "cluster" in owners else USER_EXIT_CODE if owners else 0


# --- the target of the checks ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    """Checkpoints of a job on a PersistentVolumeClaim.

    Attributes:
        claim: Name of the claim.
        kept_count: Number of complete checkpoints that are kept.
        bytes: Size of these and of the one that is being written.
    """

    claim: str
    kept_count: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Target:
    """A job and the namespace in which it is to run.

    Attributes:
        cluster: The cluster.
        namespace: Name of the namespace.
        manifests: Objects of the job, the JobSet first.
        checkpoints: Returns the checkpoints of the job, or None if they are not on a claim or are
            unknown.
        is_example: Whether the job is a minimal example and not one of the user's.
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
    def admitted_jobset(self) -> Obj:
        """The JobSet with the overhead, labels and tolerations that its RuntimeClass adds."""
        name = self.template["spec"].get("runtimeClassName")
        runtime_class = self.find_object(kinds.RUNTIME_CLASSES, name) if name else None
        if runtime_class is None:
            return self.jobset
        jobset = copy.deepcopy(self.jobset)
        spec, scheduling = pod_template(jobset)["spec"], runtime_class.get("scheduling") or {}
        spec["overhead"] = (runtime_class.get("overhead") or {}).get("podFixed") or {}
        selector = scheduling.get("nodeSelector") or {}
        spec["nodeSelector"] = {**(spec.get("nodeSelector") or {}), **selector}
        tolerations = scheduling.get("tolerations") or ()
        spec["tolerations"] = [*(spec.get("tolerations") or ()), *tolerations]
        return jobset

    @cached_property
    def pod_count(self) -> int:
        """Number of pods of the job."""
        return count_pods(self.jobset)

    @property
    def queue(self) -> str | None:
        """The LocalQueue that the job names."""
        name: str | None = self.jobset["metadata"]["labels"].get(labels.QUEUE_LABEL)
        return name

    @property
    def unrequested_resources(self) -> list[str]:
        """Those of cpu and memory that the pods do not request, and for which no default is set."""
        if self.is_example:
            return []
        requested = set(pod_requests(pod_template(self.admitted_jobset)["spec"]))
        if missing := [name for name in ("cpu", "memory") if name not in requested]:
            requested |= self.defaulted_resources or set()
        return [name for name in missing if name not in requested]

    @cached_property
    def defaulted_resources(self) -> set[str] | None:
        """Resources for which LimitRanges set defaults, or None if they may not be read."""
        with ignore_forbidden():
            return {
                name
                for limit_range in self.cluster.list(kinds.LIMIT_RANGES, self.namespace)
                for limit in limit_range["spec"].get("limits") or ()
                if limit.get("type") == "Container"
                for key in ("default", "defaultRequest", "max")
                for name in limit.get(key) or ()
            }
        return None

    @cached_property
    def namespace_labels(self) -> Mapping[str, str] | None:
        """The namespace's labels, or None if it does not exist or may not be read."""
        namespace = self.find_object(kinds.NAMESPACES, self.namespace)
        return None if namespace is None else namespace["metadata"].get("labels") or {}

    def manifest_names(self, kind: Kind) -> set[str]:
        """Return the names of the job's own objects of a kind, other than the JobSet."""
        return {
            manifest["metadata"]["name"]
            for manifest in self.manifests[1:]
            if manifest["kind"] == kind.kind
        }

    def find_object(self, kind: Kind, name: str, namespace: str | None = None) -> Obj | None:
        """Return an object, or None if it does not exist or the user may not read it."""
        with ignore_forbidden():
            return self.cluster.get(kind, name, namespace)
        return None

    def list_names(self, kind: Kind, namespace: str | None = None) -> list[str]:
        """Return the names of all objects of a kind, or nothing if the user may not list them."""
        with ignore_forbidden():
            return [obj["metadata"]["name"] for obj in self.cluster.list(kind, namespace)]
        return []

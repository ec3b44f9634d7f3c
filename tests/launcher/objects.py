"""API objects as the server returns them, in which a test states only what it is about."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes import objects
from jaxlaunch.launcher.kubernetes.labels import SUBMITTED_WORDS
from jaxlaunch.launcher.manifests.jobset import render, resolve
from jaxlaunch.records import log_lines
from jaxlaunch.records.log_lines import BeatLine, PastLine, TerminationMessage, VerdictLine
from jaxlaunch.records.verdict import Failure, verdict_for_code

Object = dict[str, Any]
NOW = datetime(2026, 11, 21, 12, 0, 0, tzinfo=UTC)
BEGUN = "2026-11-21T11:50:00Z"  # when the JobSet was created


def ago(**span: float) -> str:
    """Return a time before NOW, as the API writes it."""
    return (NOW - timedelta(**span)).strftime("%Y-%m-%dT%H:%M:%SZ")


def jobset(
    hosts: int = 2, *, status: Object | None = None, suspend: bool = False, **keys: Any
) -> Object:
    """The JobSet of a job called lm; `keys` are keys of job.yaml."""
    document = {
        "name": "lm",
        "namespace": "team",
        "image": "registry.example/train:1",
        "hosts": hosts,
        "accelerator": {"type": "cpu"},
        "command": ["python", "train.py"],
        "agent": "image",
        **keys,
    }
    manifest = render(resolve(load.parse_job(json.dumps(document)), ClusterDefaults()))[0]
    manifest["metadata"] |= {"uid": "1234", "creationTimestamp": BEGUN}
    manifest["metadata"]["annotations"][SUBMITTED_WORDS] = json.dumps(["lm.yaml", "hosts=2"])
    if suspend:
        manifest["spec"]["suspend"] = True
    return manifest | {"status": status or {}}


def foreign(name: str = "lm") -> Object:
    """A JobSet that another tool made."""
    template = {"spec": {"containers": [{"name": "work", "image": "x"}]}}
    replicated_job = {
        "name": "part",
        "replicas": 2,
        "template": {"spec": {"parallelism": 3, "template": template}},
    }
    metadata = {"name": name, "namespace": "team", "uid": "1234", "creationTimestamp": BEGUN}
    return {"metadata": metadata, "spec": {"replicatedJobs": [replicated_job]}, "status": {}}


def ended(state: str, reason: str = "", message: str = "", **status: Any) -> Object:
    """The status of a JobSet that is over: Completed or Failed."""
    condition = {
        "type": state,
        "status": "True",
        "reason": reason,
        "message": message,
        "lastTransitionTime": ago(minutes=5),
    }
    return {"terminalState": state, "conditions": [condition], **status}


def job_object(
    name: str = "lm-w-0", *conditions: Object, is_seen: bool = True, **spec: Any
) -> Object:
    """A Job; `is_seen`: the Job controller has begun with it."""
    started = {"startTime": BEGUN} if is_seen else {}
    return {
        "metadata": {"name": name, "creationTimestamp": BEGUN},
        "spec": spec,
        "status": {"conditions": list(conditions), **started},
    }


def condition(
    kind: str, status: str = "True", reason: str = "", message: str = "", **more: Any
) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, **more}


def pod(
    host: int = 0,
    *,
    generation: int = 0,
    node: str | None = "node-1",
    part: str = "w",
    **parts: Any,
) -> Object:
    """Return the trimmed pod of a host, running unless `parts` say otherwise."""
    state = parts.pop("state", {"running": {"startedAt": ago(minutes=9)}})
    phase = parts.pop("phase", "Running" if node and "running" in state else "Pending")
    conditions = parts.pop(
        "conditions", [condition("Ready", "True" if "running" in state else "False")]
    )
    containers = [
        {
            "name": parts.pop("container", "main"),
            "image": "registry.example/train:1",
            "state": state,
        }
    ]
    containers += parts.pop("beside", [])
    full_pod = {
        "metadata": {
            "namespace": "team",
            "name": f"lm-{part}-0-{host}-abcd{host % 10}",
            "uid": f"pod-{generation}-{host}",
            "creationTimestamp": BEGUN,
            "labels": {
                "jobset.sigs.k8s.io/jobset-name": "lm",
                "jobset.sigs.k8s.io/replicatedjob-name": part,
                "jobset.sigs.k8s.io/restart-attempt": str(generation),
                "jobset.sigs.k8s.io/job-index": str(parts.pop("slice", 0)),
                "batch.kubernetes.io/job-completion-index": str(host),
            },
            **({"deletionTimestamp": ago(seconds=5)} if parts.pop("is_leaving", False) else {}),
        },
        "spec": ({} if node is None else {"nodeName": node}) | parts.pop("spec", {}),
        "status": {
            "phase": phase,
            "conditions": conditions,
            **({"startTime": BEGUN} if node is not None and parts.pop("is_seen", True) else {}),
            **({"containerStatuses": containers} if node is not None else {}),
            **parts,
        },
    }
    return objects.trim_pod(full_pod)


def pending(host: int = 0, message: str = "", reason: str = "Unschedulable") -> Object:
    """A pod that no node takes."""
    return pod(host, node=None, conditions=[condition("PodScheduled", "False", reason, message)])


def waiting(host: int, reason: str, message: str = "", **parts: Any) -> Object:
    """A pod whose container waits."""
    return pod(host, state={"waiting": {"reason": reason, "message": message}}, **parts)


def over(host: int, code: int, reason: str = "", message: str = "", **parts: Any) -> Object:
    """A pod whose container ended."""
    terminated = {
        "exitCode": code,
        "reason": reason or ("Error" if code else "Completed"),
        "message": message,
    }
    return pod(
        host, state={"terminated": terminated}, phase="Failed" if code else "Succeeded", **parts
    )


def event(
    kind: str, name: str, reason: str, message: str, *, last: str = "", count: int = 1, by: str = ""
) -> Object:
    involved_object = {"kind": kind, "name": name, "namespace": "team"}
    return {
        "metadata": {"name": f"{name}.1"},
        "type": "Warning",
        "reason": reason,
        "message": message,
        "involvedObject": involved_object,
        "lastTimestamp": last or ago(seconds=30),
        "count": count,
        "reportingComponent": by,
    }


def workload(*conditions: Object, active: bool = True, **status: Any) -> Object:
    """Kueue's Workload of the job."""
    metadata = {"name": "jobset-lm-1a2b3", "labels": {"kueue.x-k8s.io/job-uid": "1234"}}
    return {
        "metadata": metadata,
        "spec": {"active": active},
        "status": {"conditions": list(conditions), **status},
    }


def local_queue(active: bool = True, reason: str = "", **spec: Any) -> Object:
    queue = {"clusterQueue": "shared", **spec}
    status = {"conditions": [condition("Active", str(active), reason)]}
    return {"metadata": {"name": "research"}, "spec": queue, "status": status}


def cluster_queue(
    nominal: str = "8", used: str = "6", *, active: bool = True, message: str = "", **spec: Any
) -> Object:
    """A queue with one flavor, `h100`, and a quota of cpu."""
    flavors = [{"name": "h100", "resources": [{"name": "cpu", "nominalQuota": nominal}]}]
    reserved = [{"name": "h100", "resources": [{"name": "cpu", "total": used}]}]
    conditions = [
        condition("Active", str(active), "Ready" if active else "FlavorNotFound", message)
    ]
    return {
        "metadata": {"name": "shared"},
        "spec": {"resourceGroups": [{"coveredResources": ["cpu"], "flavors": flavors}], **spec},
        "status": {"conditions": conditions, "flavorsReservation": reserved, "pendingWorkloads": 3},
    }


def node(
    name: str = "node-1",
    *,
    labels: Mapping[str, str] | None = None,
    taints: tuple[str, ...] = (),
    **offered_amounts: str,
) -> Object:
    """Return a node with taints such as key=value:Effect and amounts such as nvidia_com__gpu."""
    taint_list = []
    for text in taints:
        pair, _, effect = text.rpartition(":")
        key, _, value = pair.partition("=")
        taint_list.append({"key": key, "effect": effect, **({"value": value} if value else {})})
    offered = {"cpu": "8", "memory": "32Gi"} | {
        key.replace("__", "/").replace("_", "."): much for key, much in offered_amounts.items()
    }
    return {
        "metadata": {"name": name, "labels": dict(labels or {})},
        "spec": {"taints": taint_list},
        "status": {"allocatable": offered},
    }


def farewell(
    code: int,
    message: str | Failure = "it ended",
    *,
    attempt: int = 1,
    generation: int = 0,
    **more: Any,
) -> str:
    """The termination message of an agent."""
    return log_lines.format_termination_message(
        TerminationMessage(verdict_for_code(code, message, **more), 0, generation, attempt)
    )


def beat(at: float = -5, **fields: Any) -> BeatLine:
    """How a leader says that its gang stands; `at` is in seconds from NOW."""
    defaults: dict[str, Any] = {
        "attempt": 1,
        "stage": "run",
        "step": 40,
        "phase": "step",
        "since": NOW.timestamp() - 60,
        "phases": {"step": [0, 1]},
        "counts": {"step": 2},
        "seconds": {"init": 10.0, "step": 90.0},
        "restarts": {},
    }
    return BeatLine(at=NOW.timestamp() + at, **{**defaults, **fields})


def past(
    code: int, message: str = "it ended", *, attempt: int = 1, generation: int = 0, **more: Any
) -> PastLine:
    """An earlier attempt, as a leader tells of it."""
    fields = {
        "attempt": attempt,
        "generation": generation,
        "verdict": verdict_for_code(code, message, **more),
    }
    return PastLine(at=NOW.timestamp() - 300, ended=NOW.timestamp() - 320, **fields)  # type: ignore[arg-type]


def judged(
    code: int, message: str = "it ended", *, attempt: int = 1, at: float = -4, **more: Any
) -> VerdictLine:
    verdict = verdict_for_code(code, message, **more)
    return VerdictLine(at=NOW.timestamp() + at, attempt=attempt, verdict=verdict, step=verdict.step)


def snapshot(
    given_jobset: Object | None = None, *pods: Object, events: tuple[Object, ...] = (), **more: Any
) -> Snapshot:
    """Return a snapshot of job lm, by default of one that was just made."""
    jobset_object = jobset(max(1, len(pods))) if given_jobset is None else given_jobset
    folded = objects.fold_events(
        collect.job_events(map(objects.trim_event, events), "lm", jobset_object)
    )
    objects_by_name = {"jobs": (job_object(),), **more}
    return Snapshot(
        "team", "lm", NOW, jobset=jobset_object, pods=pods, events=tuple(folded), **objects_by_name
    )

"""Reading the run folder on the volume of a job whose pods are gone, with a short-lived pod.

The reader's pod belongs to a JobSet, because users who may submit jobs may create one. It has the
job's image, user and security context, and mounts the volume with the folder read-only. It has
neither the job's network settings nor a token, and does not count as one of the job's pods. Its
JobSet is deleted after the answer, and is owned by the job's JobSet in case the command is killed
before. Others may write to the volume, and the program (status/read_run.py) runs in an image of the
user's, so everything in the answer is validated.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import dataclasses
import hashlib
import inspect
import json
import posixpath
import secrets
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.errors import ApiError, ClusterError, UserError, exceeds_quota
from jaxlaunch.launcher.jobs.dependents import owner_reference
from jaxlaunch.launcher.jobs.status import hosts, read_run
from jaxlaunch.launcher.jobs.status.agent_report import AttemptEnd
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import (
    MAIN_CONTAINER,
    MANAGED_LABELS,
    NAME_LABEL,
    READER_LABEL,
    REPLICATED_JOB,
    RESERVED_DOMAINS,
)
from jaxlaunch.launcher.kubernetes.objects import Obj, pod_template
from jaxlaunch.launcher.manifests.security import RESTRICTED
from jaxlaunch.records import codec
from jaxlaunch.records.codec import MalformedError, NonNegativeInt
from jaxlaunch.records.log_lines import ProgressAnnotation, shorten_verdict
from jaxlaunch.records.summary import AttemptRecord, Summary
from jaxlaunch.runs import layout

# Limit for the start of the reader's pod.
START_TIMEOUT_S = 120.0
# Deadline of the reader's Job.
_JOB_DEADLINE_S = 300
# The reader's JobSet is deleted this long after its end if the command was killed before.
_TTL_S = 60
_WATCH_PERIOD_S = 5.0
# The memory is enough for logs of MAX_LOG_BYTES.
_RESOURCES = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
# Of the job's node selector, an image only depends on these labels.
_NODE_SELECTOR_KEYS = ("kubernetes.io/arch", "kubernetes.io/os")
# Annotations of these domains are left out, as they are about the gang: Kueue rejects a slice size
# on a JobSet with one pod, and multi-networking would limit the nodes for the pod.
_GANG_DOMAINS = ("provreq.kueue.x-k8s.io", "networking.gke.io", "devices.gke.io")
_GANG_ANNOTATION_DOMAINS = (*RESERVED_DOMAINS, *_GANG_DOMAINS)
_COPIED_FIELDS = ("imagePullSecrets", "serviceAccountName", "tolerations")
# Limit for all logs together.
MAX_LOG_BYTES = 16 * 1024 * 1024
# Limit for the answer. In JSON a byte of a log may take six.
_MAX_ANSWER_BYTES = 8 * MAX_LOG_BYTES
# Earlier attempts are left out.
_MAX_ATTEMPTS = 20


@dataclasses.dataclass(frozen=True)
class RankText:
    """Last lines of the log of a rank, which has all its attempts.

    `left_out` is the number of bytes before them.
    """

    rank: NonNegativeInt
    text: str
    left_out: NonNegativeInt

    @property
    def lines(self) -> tuple[str, ...]:
        """The text, split into lines."""
        return tuple(self.text.splitlines())


@dataclasses.dataclass(frozen=True)
class RunFiles:
    """Contents of a run folder. A file that is missing or of another job is None or empty.

    Attributes:
        progress: Progress of the run, from its summary.
        attempts: Ends of the newest attempts, oldest first.
        logs: Logs of the requested ranks.
    """

    progress: ProgressAnnotation | None
    attempts: tuple[AttemptEnd, ...]
    logs: tuple[RankText, ...]


def read_run_folder(
    cluster: Cluster,
    jobset: Obj,
    *,
    say: Callable[[str], None],
    explain_wait: Callable[[str], str],
    ranks: Sequence[int] | None = (),
    pattern: str | None = None,
    tail: int | None = None,
) -> RunFiles:
    """Read the summary, the attempts and the logs of some ranks from the run folder.

    Args:
        cluster: The cluster.
        jobset: The job's JobSet.
        say: Called with messages for the user.
        explain_wait: Returns why the JobSet of a name does not start.
        ranks: Ranks whose logs are read, or None for all.
        pattern: Regular expression for the lines to read, or None for all.
        tail: Number of last lines of each rank, or None for all.

    Raises:
        UserError: If the job's run folder is not on a volume.
        ClusterError: If the pod cannot be created or does not start.
    """
    manifest = reader_manifest(
        jobset, {"ranks": ranks, "pattern": pattern, "tail": tail, "bytes": MAX_LOG_BYTES}
    )
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    say(f"a pod of JobSet {name} reads {find_run_folder(jobset)}")
    is_done, may_exist = False, True
    try:
        try:
            cluster.create(JOBSETS, manifest)
        except ApiError as error:
            may_exist = error.status >= 500
            if error.status == 403 and not exceeds_quota(error):
                rights = "permission to create jobsets and to read pods/log."
                error.hint = error.hint or f"reading a volume requires {rights}"
            raise
        pod = _wait_until_started(cluster, namespace, name, explain_wait)
        with contextlib.closing(cluster.log(namespace, pod, follow=True)) as lines:
            files = parse_answer(lines, jobset["metadata"]["uid"])
        is_done = True
        return files
    finally:
        if not is_done:
            cluster.limit_call_time()
        if may_exist:
            _delete_reader(cluster, namespace, name, say)


def _delete_reader(cluster: Cluster, namespace: str, name: str, say: Callable[[str], None]) -> None:
    try:
        cluster.delete(JOBSETS, name, namespace)
    except ClusterError as error:
        reason = error.message
        say(f"JobSet {name} could not be deleted, and is {_TTL_S} s after its end: {reason}")


def find_run_folder(jobset: Obj) -> str:
    """Return the path of the run folder in the pods. Raises UserError if it is not on a volume."""
    environment = hosts.read_environment(jobset)
    if url := environment.get(contract.RUN_URL):
        hint = f"read it with the bucket's own tools: {url}"
        raise UserError(f"The run folder of {jobset['metadata']['name']} is in a bucket.", hint)
    if not environment.get(contract.RUN_DIR):
        hint = (
            "give it checkpoints on a volume: train.checkpoint.path, or checkpoint: in the "
            "cluster defaults."
        )
        raise UserError(f"Job {jobset['metadata']['name']} has no run folder on a volume.", hint)
    return environment[contract.RUN_DIR]


# --- the reader's JobSet --------------------------------------------------------------------------


def reader_manifest(jobset: Obj, request: dict[str, Any]) -> dict[str, Any]:
    """Return the JobSet of the reader's pod. Raises UserError if the folder is not on a volume."""
    metadata = jobset["metadata"]
    labels = {**MANAGED_LABELS, READER_LABEL: metadata["name"]}
    # The volume's driver may need an annotation, for example one that injects a bucket's sidecar.
    annotations = pod_template(jobset).get("metadata", {}).get("annotations") or {}
    pod_metadata: dict[str, Any] = {"labels": labels}
    for key, value in annotations.items():
        if key.partition("/")[0] not in _GANG_ANNOTATION_DOMAINS:
            pod_metadata.setdefault("annotations", {})[key] = value
    job = {
        "completions": 1,
        "parallelism": 1,
        "backoffLimit": 0,
        "activeDeadlineSeconds": _JOB_DEADLINE_S,
        "template": {"metadata": pod_metadata, "spec": _pod_spec(jobset, request)},
    }
    return {
        "apiVersion": JOBSETS.api_version,
        "kind": JOBSETS.kind,
        "metadata": {
            "name": f"read-{metadata['name'][:24].rstrip('-')}-{secrets.token_hex(3)}",
            "namespace": metadata["namespace"],
            "labels": labels,
            "ownerReferences": [owner_reference(jobset)],
        },
        "spec": {
            "network": {"enableDNSHostnames": False},
            "failurePolicy": {"maxRestarts": 0},
            "ttlSecondsAfterFinished": _TTL_S,
            "replicatedJobs": [{"name": REPLICATED_JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod_spec(jobset: Obj, request: dict[str, Any]) -> dict[str, Any]:
    folder, spec = find_run_folder(jobset), pod_template(jobset)["spec"]
    container_template = hosts.main_container(spec)
    mounts_by_path = {}
    for mount in container_template.get("volumeMounts") or ():
        path = posixpath.normpath(mount["mountPath"])
        if posixpath.commonpath([path, posixpath.normpath(folder)]) == path:
            mounts_by_path[path] = mount
    if not mounts_by_path:
        subject = f"The run folder of {jobset['metadata']['name']}, {folder},"
        hint = "mount a volume there: volumes: in job.yaml."
        raise UserError(f"{subject} is on no volume of its pods.", hint)
    innermost_mount = mounts_by_path[max(mounts_by_path, key=len)]
    security, pod_security = (
        container_template.get("securityContext") or {},
        spec.get("securityContext") or {},
    )
    # A job that runs as root needs root only for devices. The reader runs as the user whose number
    # is the group of that job: other jobs have it as their user, and it can read the volume.
    group = pod_security.get("runAsGroup")
    if security.get("runAsUser", pod_security.get("runAsUser")) == 0 and group:
        security = RESTRICTED
        pod_security = {**pod_security, "runAsNonRoot": True, "runAsUser": group}
    labels = spec.get("nodeSelector") or {}
    selector = {key: labels[key] for key in _NODE_SELECTOR_KEYS if key in labels}
    argument = json.dumps({"folder": folder, "names": layout.READ_NAMES, **request})
    program = [container_template["command"][0], "-I", "-c", inspect.getsource(read_run), argument]
    container = {
        "name": MAIN_CONTAINER,
        "image": container_template["image"],
        "command": program,
        "resources": _RESOURCES,
        "securityContext": security,
        "volumeMounts": [{**innermost_mount, "readOnly": True}],
    }
    return {
        **{name: spec[name] for name in _COPIED_FIELDS if name in spec},
        **({"securityContext": pod_security} if pod_security else {}),
        **({"nodeSelector": selector} if selector else {}),
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "containers": [container],
        "volumes": [
            volume for volume in spec["volumes"] if volume["name"] == innermost_mount["name"]
        ],
    }


def _wait_until_started(
    cluster: Cluster, namespace: str, name: str, explain_wait: Callable[[str], str]
) -> str:
    """Wait until the reader's pod has started, and return its name."""
    deadline, labels = time.monotonic() + START_TIMEOUT_S, f"{NAME_LABEL}={name}"
    while (remaining_s := deadline - time.monotonic()) > 0:
        limit_s = min(remaining_s, _WATCH_PERIOD_S)
        events = cluster.watch(PODS, namespace, labels=labels, limit_s=limit_s)
        with contextlib.closing(events):
            for _, pod in events:
                for status in pod.get("status", {}).get("containerStatuses") or ():
                    state_names = (status.get("state") or {}).keys()
                    if status["name"] == MAIN_CONTAINER and state_names & {"running", "terminated"}:
                        return str(pod["metadata"]["name"])
    problem = f"has not started after {START_TIMEOUT_S:.0f} s"
    raise ClusterError(f"The pod that reads the volume {problem}: {explain_wait(name)}")


# --- the reader's answer --------------------------------------------------------------------------


def parse_answer(lines: Iterable[str], uid: str) -> RunFiles:
    """Parse the answer in the log of the reader's pod. Raises UserError if it is invalid."""
    answer = _decode_answer(lines)
    texts = answer.get("logs")
    texts = texts if isinstance(texts, list) else []
    try:
        logs = tuple(codec.read_record(RankText, text) for text in texts)
    except MalformedError as error:
        raise _invalid_answer(f"in a log, {error}") from None
    attempts = tuple(_read_attempts(answer.get("attempts"), uid))[-_MAX_ATTEMPTS:]
    return RunFiles(_read_summary(answer.get("summary"), uid), attempts, logs)


def _decode_answer(lines: Iterable[str]) -> dict[str, Any]:
    """Decode the answer. Other lines, such as a message of the image's entry point, are ignored."""
    parts, size, digest, other_line = list[str](), 0, None, ""
    for line in lines:
        if line.startswith(read_run.PREFIX):
            parts.append(line.removeprefix(read_run.PREFIX))
            size += len(parts[-1])
            if size > _MAX_ANSWER_BYTES:
                raise _invalid_answer(f"it is longer than {_MAX_ANSWER_BYTES} bytes")
        elif line.startswith(read_run.END):
            digest = line.removeprefix(read_run.END)
        else:
            other_line = line
    if digest is None:
        last_line = f"; the last line is {other_line[:200]!r}" if other_line else ""
        raise _invalid_answer(f"it has no end{last_line}")
    try:
        packed = base64.b64decode("".join(parts), validate=True)
        if hashlib.sha256(packed).hexdigest() != digest:
            raise _invalid_answer("lines of it are missing")
        answer = json.loads(zlib.decompressobj().decompress(packed, _MAX_ANSWER_BYTES))
    except (binascii.Error, zlib.error, ValueError, RecursionError) as error:
        raise _invalid_answer(str(error)) from None
    if not isinstance(answer, dict):
        raise _invalid_answer("it is not an object")
    return answer


def _invalid_answer(reason: str) -> UserError:
    message = f"The pod's answer about the run folder cannot be used: {reason}."
    return UserError(message, "try again.")


def _read_summary(text: Any, uid: str) -> ProgressAnnotation | None:
    """Return the progress in summary.json, or None if it is invalid or of another run."""
    try:
        summary = Summary.from_json(codec.parse_json(text.encode()))
    except (ValueError, AttributeError):
        return None
    progress = summary.of
    if progress is None or progress.uid != uid:
        return None
    return ProgressAnnotation(
        uid=uid,
        at=progress.at,
        when="volume",
        attempt=progress.attempt,
        generation=progress.generation,
        verdict=summary.verdict,
        **summary.run_numbers(),
    )


def _read_attempts(text: Any, uid: str) -> Iterable[AttemptEnd]:
    """Yield the ends of this job's attempts in attempts.jsonl, oldest first. Skip invalid lines."""
    for line in text.splitlines() if isinstance(text, str) else ():
        with contextlib.suppress(ValueError):
            record = codec.read_record(AttemptRecord, codec.parse_record(line))
            if record.uid == uid:
                verdict = shorten_verdict(record.verdict)
                yield AttemptEnd(verdict, record.attempt, record.generation, record.ended)

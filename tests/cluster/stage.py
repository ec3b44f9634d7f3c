"""The namespaces of situations, a registry without images, and how each situation settles."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.diagnose.explain import explanation
from jaxlaunch.launcher.errors import UnreachableError
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.jobs.status import collect, job_status
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.jobs.status.snapshot import NoSuchJob, Snapshot
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS
from jaxlaunch.launcher.kubernetes.labels import SUBMITTED_WORDS
from jaxlaunch.launcher.manifests import code
from jaxlaunch.launcher.manifests.jobset import render, resolve
from tests.cluster import preparations, waiting
from tests.cluster.access import Access
from tests.cluster.gangs import wait_for
from tests.cluster.situations import SLEEP, SMALL, Prepare, Situation
from tests.found import ON_CLUSTER, find_entry, split_reasons

# What a job may be in before it has settled.
TRANSIENT_SITUATIONS = {
    "creating",
    "starting",
    "init-runs",
    "sidecar",
    "gathering",
    "rendezvous",
    "running",
    "queued",
    "restarting",
    "unattended",
    "restarted",
    "crash-loop",
    "ephemeral-storage",
    "preempted",
    "stopping",
}
# What `status` and `list` call the situations that are of one state only.
STATES = {
    **dict.fromkeys(("quota", "quota-never", "queue-missing", "queue-stopped"), State.QUEUED),
    **dict.fromkeys(
        ("resource-quota", "limit-range", "pod-security", "admission", "priority"), State.CREATING
    ),
    **dict.fromkeys(("webhook-down", "service-account"), State.CREATING),
    **dict.fromkeys(
        ("resource", "node-selector", "taint", "claim-missing", "claim-unbound"), State.PENDING
    ),
    **dict.fromkeys(("image", "secret-missing", "configmap-missing"), State.STARTING),
    **dict.fromkeys(("failed", "oom", "ephemeral-storage", "deadline"), State.FAILED),
    **dict.fromkeys(("running", "restarted"), State.RUNNING),
    "rendezvous": State.GATHERING,
    "done": State.DONE,
    "stopped": State.STOPPED,
    "deleting": State.DELETING,
}
SETTLE_S = 600.0
CLUSTER_SCOPED = (
    "validatingwebhookconfigurations",
    "validatingadmissionpolicies",
    "validatingadmissionpolicybindings",
)


# Of a job, all but events.
OBJECTS = (
    "/api/v1/namespaces/{}/pods",
    "/apis/batch/v1/namespaces/{}/jobs",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
    f"/apis/{preparations.KUEUE}/namespaces/{{}}/workloads",
)


def find_messages(status: Any) -> Iterator[str]:
    """Yield each reason with its message, and each exit code, at any depth of an object."""
    if isinstance(status, Mapping):
        if words := [str(status[key]) for key in ("reason", "message") if status.get(key)]:
            yield ": ".join(words)
        if "exitCode" in status:
            yield f"exit {status['exitCode']}"
    for value in (
        status.values()
        if isinstance(status, Mapping)
        else status
        if isinstance(status, list)
        else ()
    ):
        yield from find_messages(value)


# An image of another platform.
FOREIGN_IMAGE = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.oci.image.index.v1+json",
    "manifests": [
        {
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "digest": f"sha256:{'0' * 64}",
            "size": 2,
            "platform": {"architecture": "s390x", "os": "linux"},
        }
    ],
}


class Registry(BaseHTTPRequestHandler):
    """A registry without an image for this machine, which requires credentials for some."""

    def do_HEAD(self) -> None:
        if "/foreign/" in self.path:
            self._answer(200, FOREIGN_IMAGE, "application/vnd.oci.image.index.v1+json")
            return
        is_locked = "/locked/" in self.path
        errors = {"errors": [{"code": "UNAUTHORIZED" if is_locked else "MANIFEST_UNKNOWN"}]}
        self._answer(401 if is_locked else 404, errors, "application/json")

    def _answer(self, code: int, body_object: object, kind: str) -> None:
        body = json.dumps(body_object).encode()
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Docker-Content-Digest", f"sha256:{hashlib.sha256(body).hexdigest()}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Write nothing to the test's own output."""


class Stage:
    """The namespaces in which the situations take place."""

    def __init__(self, access: Access, image: str, registry: str, folder: Path) -> None:
        self.access, self.image = access, image
        self.cluster = Cluster.connect()
        self.namespaces: dict[str, str] = {}
        # It has the files of the jobs, which are named as the jobs.
        self.folder = folder
        server = access.api.server.netloc
        self.words = {"{registry}": registry, "{server}": server, "{pool}": secrets.token_hex(4)}

    def prepare(self, prepared: Mapping[str, Prepare]) -> None:
        """Make the namespaces; `{key}` in jobs and first lines stands for one's name."""
        for key, (level, prepare) in prepared.items():
            self.namespaces[key] = preparations.make_namespace(self.access, level)
            self.words[f"{{{key}}}"] = self.namespaces[key]
            prepare(self.access, self.namespaces[key])

    def start(self, name: str, situation: Situation) -> None:
        """Submit the job as the situation changes it."""
        namespace = self.namespaces[situation.namespace]
        defaults = {
            "accelerator": {"type": "cpu"},
            "image": self.image,
            "command": SLEEP,
            "resources": SMALL,
            "grace": "6s",
            "restarts": {"in_place": 0, "crash": 0},
            "network_policy": False,
        }
        document = {"name": name, "namespace": namespace, **defaults, **self._filled(situation.job)}
        (self.folder / f"{name}.json").write_text(json.dumps(document))
        job = JobSpec.model_validate(document)
        resolved = resolve(job, ClusterDefaults())
        objects = render(resolved, code.build_bundle(resolved.code, Path()))
        # What its pods need is there first: a look between the two would see a ConfigMap that is
        # missing.
        for manifest in sorted(objects, key=lambda manifest: manifest["kind"] == "JobSet"):
            if manifest["kind"] == "JobSet":
                words = json.dumps([f"{name}.json"])
                manifest["metadata"]["annotations"][SUBMITTED_WORDS] = words
                situation.change(manifest)
                self._create(manifest)
            elif self.cluster.get(CONFIGMAPS, manifest["metadata"]["name"], namespace) is None:
                self.cluster.create(CONFIGMAPS, manifest)

    def _create(self, jobset: dict[str, Any]) -> None:
        """Create the JobSet, again if the busy server did not answer and did not create it."""
        try:
            self.cluster.create(JOBSETS, jobset)
        except UnreachableError:
            if (
                self.cluster.get(
                    JOBSETS, jobset["metadata"]["name"], jobset["metadata"]["namespace"]
                )
                is None
            ):
                self.cluster.create(JOBSETS, jobset)

    def _filled(self, job: Mapping[str, Any]) -> Any:
        text = json.dumps(job)
        for word, value in self.words.items():
            text = text.replace(word, value)
        return json.loads(text)

    def read_snapshot(self, name: str, namespace: str = "plain") -> Snapshot | NoSuchJob:
        return collect.read_snapshot(self.cluster, self.namespaces[namespace], name)

    def wait_for_explanation(
        self, name: str, first_line: str, namespace: str = "plain", *, changes: bool = False
    ) -> explanation.Explanation:
        """Wait for the explanation with this first line, and check its state.

        Until then none may name another cause, except in a situation that changes.
        """
        expected = re.compile(self._filled({"": first_line})[""])

        def find_explanation() -> explanation.Explanation | None:
            snapshot = self.read_snapshot(name, namespace)
            result = explanation.explain_job(snapshot)
            headlines.append(result.headline)
            if expected.search(result.headline):
                if isinstance(snapshot, Snapshot):
                    state = job_status.derive_status(snapshot).state
                    assert state is STATES.get(result.situation, state)
                return result
            assert changes or result.situation in TRANSIENT_SITUATIONS, (
                f"{result.headline!r} is not {expected.pattern!r}"
            )
            return None

        headlines: list[str] = []
        try:
            result = wait_for(name, find_explanation, SETTLE_S)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; the last first lines: {list(dict.fromkeys(headlines))[-5:]}"
            ) from None
        assert result is not None
        assert result.headline.removeprefix("job ").startswith(f"{name} ")
        return result

    def messages(self, name: str, namespace: str = "plain") -> list[str]:
        """Return what Kubernetes reports of a job: events, and reasons and messages in statuses."""
        namespace_name = self.namespaces[namespace]
        texts: list[str] = []
        for path in (*OBJECTS, "/api/v1/namespaces/{}/events"):
            for item in self.access.api.get(path.format(namespace_name))["items"]:
                name_of_object = item.get("involvedObject", item["metadata"])["name"]
                if name_of_object == name or name_of_object.startswith(
                    (f"{name}-w-", f"jobset-{name}-")
                ):
                    texts += find_messages(
                        item if "involvedObject" in item else item.get("status", {})
                    )
        return list(dict.fromkeys(texts))

    def wait_for_entry(self, name: str, namespace: str) -> None:
        """Wait for a message of Kubernetes that leads to the entry in docs/troubleshooting.md."""
        if words := ON_CLUSTER.get(name, ""):
            waiting.wait_until(
                lambda: self.messages(name, namespace),
                lambda messages: any(
                    words in find_entry(reason)
                    for message in messages
                    for reason in split_reasons(message)
                ),
                f"{words} of {name}",
                SETTLE_S,
            )

    def remove(self) -> None:
        for name in self.namespaces.values():
            preparations.remove_namespace(self.access, name)
            for plural in CLUSTER_SCOPED:
                self.access.api.delete(f"/apis/admissionregistration.k8s.io/v1/{plural}/{name}")
        queues = self.namespaces.get("queues")
        for priority in ("low", "high"):
            self.access.api.delete(
                f"/apis/{preparations.KUEUE}/workloadpriorityclasses/{queues}-{priority}"
            )


@contextmanager
def make_stage(cluster: Access, image: str) -> Iterator[Stage]:
    """Yield a stage on the tests' cluster, which is cleared afterwards."""
    if not cluster.is_ours:
        pytest.skip(
            "the registry is this machine's and some nodes are kwok's: not on a cluster "
            "that you gave"
        )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        with tempfile.TemporaryDirectory() as folder:
            stage = Stage(cluster, image, f"localhost:{server.server_port}", Path(folder))
            try:
                yield stage
            finally:
                stage.remove()
                server.shutdown()
                server.server_close()

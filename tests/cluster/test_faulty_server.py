"""`launcher submit` through a faulty proxy: one JobSet, an end, and a true report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import forked
from tests.cluster.access import Access
from tests.cluster.proxy import Proxy, break_watch, end_watch, expire_watch, silence_watch
from tests.launcher import apiserver
from tests.launcher.apiserver import Fault, Handler, commit_then_drop, drop_connection, refuse_with

PATIENCE_S = 900  # each call is given up after 60 s, and a failing submission makes three at most
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
CONFIGMAPS = "/api/v1/namespaces/{}/configmaps"

JOB = """
name: x
image: {image}
accelerator: {{type: cpu}}
resources: {{cpu: 50m, memory: 64Mi}}
grace: 5s
"""
NOWHERE = 'node_selector: {no-such-node: "here"}\ncommand: ["true"]\n'  # its pods cost nothing
SHORT = 'command: [python3, -c, "import time; time.sleep(2)"]\n'


@dataclass
class ProxiedJob:
    """A folder with a job, its namespace, and the proxy."""

    proxy: Proxy
    cluster: Access
    namespace: str
    folder: Path

    @property
    def env(self) -> dict[str, str]:
        return self.cluster.env | {
            "KUBECONFIG": str(self.proxy.kubeconfig(self.folder, self.namespace))
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `launcher submit job.yaml ARGUMENTS`."""
        return subprocess.Popen(
            [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "submit", "job.yaml", *arguments],
            cwd=self.folder,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def submit(self, *arguments: str) -> tuple[int, str, str]:
        """Return exit code, results and messages. It must end in time without a traceback."""
        done = forked.run_forked(
            ["submit", "job.yaml", *arguments], cwd=self.folder, env=self.env, timeout=PATIENCE_S
        )
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout, done.stderr

    def end_of(self, process: subprocess.Popen[str]) -> tuple[int, str, str]:
        try:
            out, err = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
        assert "Traceback" not in err
        return process.returncode, out, err

    def list_objects(self, path: str) -> list[dict[str, Any]]:
        """Return the objects of the real server."""
        objects = self.cluster.api.get(path.format(self.namespace))["items"]
        return [item for item in objects if item["metadata"]["name"] != "kube-root-ca.crt"]

    def assert_whole(self) -> None:
        """Check that there is one JobSet, which owns its objects."""
        (jobset,) = self.list_objects(JOBSETS)
        for owned in (*self.list_objects(POLICIES), *self.list_objects(CONFIGMAPS)):
            assert [reference["uid"] for reference in owned["metadata"]["ownerReferences"]] == [
                jobset["metadata"]["uid"]
            ]
        assert (len(self.list_objects(POLICIES)), len(self.list_objects(CONFIGMAPS))) == (1, 1)


@pytest.fixture
def proxied_job(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> Iterator[ProxiedJob]:
    (tmp_path / "job.yaml").write_text(JOB.format(image=base_image) + NOWHERE)
    with apiserver.serve_in_thread(Proxy(cluster.api)) as proxy:
        yield ProxiedJob(proxy, cluster, namespace, tmp_path)


# --- writing --------------------------------------------------------------------------------------

FAULTS: dict[str, list[Fault]] = {
    "429 with Retry-After": [refuse_with(429, Retry_After="1"), refuse_with(429, Retry_After="1")],
    "500": [refuse_with(500)],
    "503": [refuse_with(503, Retry_After="1")],
    "504": [refuse_with(504)],
    "dropped": [drop_connection],
    "dropped after the commit": [commit_then_drop],
    "one after the other": [
        refuse_with(429, Retry_After="0"),
        drop_connection,
        refuse_with(500),
        commit_then_drop,
    ],
}


WRITES = [("POST", "jobsets", fault) for fault in FAULTS] + [
    (method, part, fault)
    for method, part in (("POST", "networkpolicies"), ("POST", "configmaps"))
    for fault in ("dropped after the commit", "one after the other")
]


@pytest.mark.parametrize(("method", "part", "fault"), WRITES)
def test_failed_write_leaves_one_jobset(
    proxied_job: ProxiedJob, method: str, part: str, fault: str
) -> None:
    proxied_job.proxy.on(method, part, *FAULTS[fault])
    assert proxied_job.submit()[:2] == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert not proxied_job.proxy.faults[method, part]
    proxied_job.assert_whole()


# --- Ctrl-C ---------------------------------------------------------------------------------------


# --- somebody else's ------------------------------------------------------------------------------


# --- watching -------------------------------------------------------------------------------------

ENDS: dict[str, list[Fault]] = {
    "closed at once": [end_watch] * 3,
    "broken off": [break_watch] * 3,
    "410 in the stream": [expire_watch] * 3,
    "410 at once": [refuse_with(410)] * 3,
    "500": [refuse_with(500)] * 3,
    "silent": [silence_watch],
}


@pytest.mark.parametrize("end", ENDS)
def test_end_of_a_job_is_seen_in_spite_of_failing_watches(
    proxied_job: ProxiedJob, base_image: str, end: str
) -> None:
    (proxied_job.folder / "job.yaml").write_text(JOB.format(image=base_image) + SHORT)
    waiting = iter(ENDS[end])

    def matches(handler: Handler) -> bool:
        fault = next(waiting, None) if handler.query.get("watch") else None
        return fault is not None and fault(handler)

    proxied_job.proxy.on("GET", "jobsets", *[matches] * 50)
    code, out, err = proxied_job.submit("--wait")
    assert (code, out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert "x Done" in err
    assert next(waiting, None) is None
    assert (
        json.dumps(proxied_job.list_objects(JOBSETS)[0]["status"]["terminalState"]) == '"Completed"'
    )

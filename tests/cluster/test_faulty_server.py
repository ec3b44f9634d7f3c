"""`launcher submit` through a proxy that fails it, to a real API server: one JobSet, an end, and the truth about it."""

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
from tests.cluster.proxy import Proxy, break_off, close, fall_silent, forget
from tests.launcher import apiserver
from tests.launcher.apiserver import Fault, Handler, commit_then_drop, drop, refuse

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
class Place:
    """A folder with a job, a namespace, and the proxy between them."""

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
        """`launcher submit job.yaml ARGUMENTS`."""
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
        """Exit code, results and talk. It ends in time, and without a traceback."""
        done = forked.run(
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

    def there(self, path: str) -> list[dict[str, Any]]:
        """What the real server has."""
        found = self.cluster.api.get(path.format(self.namespace))["items"]
        return [one for one in found if one["metadata"]["name"] != "kube-root-ca.crt"]

    def assert_whole(self) -> None:
        """One JobSet, and what it owns is owned by it."""
        (jobset,) = self.there(JOBSETS)
        for owned in (*self.there(POLICIES), *self.there(CONFIGMAPS)):
            assert [one["uid"] for one in owned["metadata"]["ownerReferences"]] == [
                jobset["metadata"]["uid"]
            ]
        assert (len(self.there(POLICIES)), len(self.there(CONFIGMAPS))) == (1, 1)


@pytest.fixture
def place(cluster: Access, namespace: str, base_image: str, tmp_path: Path) -> Iterator[Place]:
    (tmp_path / "job.yaml").write_text(JOB.format(image=base_image) + NOWHERE)
    with apiserver.serving(Proxy(cluster.api)) as proxy:
        yield Place(proxy, cluster, namespace, tmp_path)


# --- writing --------------------------------------------------------------------------------------

FAULTS: dict[str, list[Fault]] = {
    "429 with Retry-After": [refuse(429, Retry_After="1"), refuse(429, Retry_After="1")],
    "500": [refuse(500)],
    "503": [refuse(503, Retry_After="1")],
    "504": [refuse(504)],
    "dropped": [drop],
    "dropped after the commit": [commit_then_drop],
    "one after the other": [refuse(429, Retry_After="0"), drop, refuse(500), commit_then_drop],
}


WRITES = [("POST", "jobsets", fault) for fault in FAULTS] + [
    (method, part, fault)
    for method, part in (("POST", "networkpolicies"), ("POST", "configmaps"))
    for fault in ("dropped after the commit", "one after the other")
]


@pytest.mark.parametrize(("method", "part", "fault"), WRITES)
def test_a_fault_of_a_write_leaves_one_jobset(
    place: Place, method: str, part: str, fault: str
) -> None:
    place.proxy.on(method, part, *FAULTS[fault])
    assert place.submit()[:2] == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert not place.proxy.faults[method, part]
    place.assert_whole()


# --- Ctrl-C ---------------------------------------------------------------------------------------


# --- somebody else's ------------------------------------------------------------------------------


# --- watching -------------------------------------------------------------------------------------

ENDS: dict[str, list[Fault]] = {
    "closed at once": [close] * 3,
    "broken off": [break_off] * 3,
    "410 in the stream": [forget] * 3,
    "410 at once": [refuse(410)] * 3,
    "500": [refuse(500)] * 3,
    "silent": [fall_silent],
}


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_job_is_seen_over_watches_that_fail(
    place: Place, base_image: str, end: str
) -> None:
    (place.folder / "job.yaml").write_text(JOB.format(image=base_image) + SHORT)
    waiting = iter(ENDS[end])

    def meets(handler: Handler) -> bool:
        fault = next(waiting, None) if handler.query.get("watch") else None
        return fault is not None and fault(handler)

    place.proxy.on("GET", "jobsets", *[meets] * 50)
    code, out, err = place.submit("--wait")
    assert (code, out) == (0, "jobset.jobset.x-k8s.io/x created\n")
    assert "x Done" in err
    assert next(waiting, None) is None
    assert json.dumps(place.there(JOBSETS)[0]["status"]["terminalState"]) == '"Completed"'

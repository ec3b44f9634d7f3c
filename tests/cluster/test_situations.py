"""`launcher explain` and `launcher status` on real situations: the first line names each.

Every job is submitted at once; each is then watched until it has settled.
"""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from launcher import bundle, explain, status, world
from launcher.cluster import Cluster
from launcher.jobset import render
from launcher.kinds import CONFIGMAPS, JOBSETS
from launcher.profile import Profile
from launcher.schema import JobSpec
from launcher.seen import World
from launcher.status import State
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import until
from tests.cluster.harness import kwok
from tests.cluster.situations import POOL, PREPARED, SITUATIONS, SLEEP, SMALL, Situation, held
from tests.launcher.cli import launcher

# What a job may be in before it has settled.
ON_ITS_WAY = {
    "creating",
    "starting",
    "gathering",
    "rendezvous",
    "running",
    "queued",
    "restarting",
    "unattended",
    "restarted",
    "crash-loop",
    "preempted",
    "stopping",
}
# What `status` and `list` call the situations that are of one state only.
STATES = {
    **dict.fromkeys(("quota", "quota-never", "queue-missing", "queue-stopped"), State.QUEUED),
    **dict.fromkeys(("resource-quota", "limit-range", "pod-security", "admission", "priority"), State.CREATING),
    **dict.fromkeys(("webhook-down", "service-account"), State.CREATING),
    **dict.fromkeys(("resource", "node-selector", "taint", "claim-missing", "claim-unbound"), State.PENDING),
    **dict.fromkeys(("image", "secret-missing", "configmap-missing"), State.STARTING),
    **dict.fromkeys(("failed", "oom", "deadline"), State.FAILED),
    **dict.fromkeys(("running", "restarted"), State.RUNNING),
    "rendezvous": State.GATHERING,
    "done": State.DONE,
    "stopped": State.STOPPED,
    "deleting": State.DELETING,
}
SETTLE_S = 120.0
OUTSIDE = ("validatingwebhookconfigurations", "validatingadmissionpolicies", "validatingadmissionpolicybindings")


class Registry(BaseHTTPRequestHandler):
    """A registry that has nothing, and does not tell everyone."""

    def do_HEAD(self) -> None:
        is_locked = "/locked/" in self.path
        body = json.dumps({"errors": [{"code": "UNAUTHORIZED" if is_locked else "MANIFEST_UNKNOWN"}]}).encode()
        self.send_response(401 if is_locked else 404)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_GET = do_HEAD

    def log_message(self, *_: object) -> None:
        """Nothing on the test's own output."""


class Stage:
    """Where the situations play."""

    def __init__(self, access: Access, image: str, registry: str) -> None:
        self.access, self.image = access, image
        self.cluster = Cluster.connect()
        self.namespaces: dict[str, str] = {}
        self.words = {"{registry}": registry, "{pool}": secrets.token_hex(4)}

    def prepare(self, key: str) -> None:
        level, prepare = PREPARED[key]
        self.namespaces[key] = preparations.make_namespace(self.access, level)
        prepare(self.access, self.namespaces[key])

    def start(self, name: str, situation: Situation) -> None:
        """Submits the job, as the situation changes it."""
        namespace = self.namespaces[situation.namespace]
        usual = {
            "accelerator": {"type": "cpu"},
            "image": self.image,
            "command": SLEEP,
            "resources": SMALL,
            "grace": "6s",
            "restarts": {"in_place": 0, "crash": 0},
            "network_policy": False,
        }
        document = {"name": name, "namespace": namespace, **usual, **self._filled(situation.job)}
        job = JobSpec.model_validate(document)
        brought = bundle.of(job, Path())
        for made in render(job, Profile(), brought):
            if made["kind"] == "JobSet":
                situation.change(made)
                self.cluster.create(JOBSETS, made)
            elif self.cluster.get(CONFIGMAPS, made["metadata"]["name"], namespace) is None:
                self.cluster.create(CONFIGMAPS, made)

    def _filled(self, job: Mapping[str, Any]) -> Any:
        text = json.dumps(job)
        for word, value in self.words.items():
            text = text.replace(word, value)
        return json.loads(text)

    def looks(self, name: str, namespace: str = "plain") -> World:
        return world.gather(self.cluster, self.namespaces[namespace], name)

    def settles(self, name: str, first_line: str, namespace: str = "plain") -> explain.Explanation:
        """The explanation whose first line reads so; until then none may name another cause. Its state must fit."""
        expected = re.compile(self._filled({"": first_line})[""])

        def look() -> explain.Explanation | None:
            there = self.looks(name, namespace)
            found = explain.explain(there)
            seen.append(found.headline)
            if expected.search(found.headline):
                assert status.fold(there).state is STATES.get(found.situation, status.fold(there).state)
                return found
            assert found.situation in ON_ITS_WAY, f"{found.headline!r} is not {expected.pattern!r}"
            return None

        seen: list[str] = []
        try:
            found = until(name, look, SETTLE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}; the last first lines: {list(dict.fromkeys(seen))[-5:]}") from None
        assert found is not None
        assert found.headline.startswith(f"{name} ")
        return found

    def remove(self) -> None:
        for name in self.namespaces.values():
            preparations.remove_namespace(self.access, name)
            for plural in OUTSIDE:
                self.access.api.delete(f"/apis/admissionregistration.k8s.io/v1/{plural}/{name}")
        queues = self.namespaces.get("queues")
        for priority in ("low", "high"):
            self.access.api.delete(f"/apis/{preparations.KUEUE}/workloadpriorityclasses/{queues}-{priority}")


@pytest.fixture(scope="module")
def stage(cluster: Access, base_image: str) -> Iterator[Stage]:
    """Every situation, begun."""
    if not cluster.is_ours:
        pytest.skip("the registry is this machine's and some nodes are kwok's: not on a cluster that you gave")
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
        server = ThreadingHTTPServer(("127.0.0.1", 0), Registry)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        made = Stage(cluster, base_image, f"localhost:{server.server_port}")
        stack.callback(made.remove)
        pool = {POOL: made.words["{pool}"]}
        stack.enter_context(kwok.fake_nodes(cluster.api, 2, pool, {}))
        for key in PREPARED:
            made.prepare(key)
        made.words["{queues}"] = made.namespaces["queues"]
        for name, situation in SITUATIONS.items():
            made.start(name, situation)
        yield made


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_line_names_the_situation(stage: Stage, name: str) -> None:
    situation = SITUATIONS[name]
    found = stage.settles(name, situation.first_line, situation.namespace)
    assert found.next_move or found.situation in ("running", "restarted")


def test_a_full_queue_is_named_with_its_numbers(stage: Stage) -> None:
    stage.settles("first", "runs", "queues")
    stage.start("second", Situation("", {**SITUATIONS["first"].job}, "queues"))
    line = "queue busy .* is full: 60m more cpu is needed in flavor .*-busy; 80m of 100m is used"
    assert stage.settles("second", line, "queues").situation == "quota"


def test_a_job_that_had_to_make_room_says_so(stage: Stage) -> None:
    job = {"queue": "ranked", "resources": {"cpu": "80m", "memory": "64Mi"}}
    stage.start("low", Situation("", job | {"priority": "{queues}-low"}, "queues"))
    stage.settles("low", "runs", "queues")
    stage.start("high", Situation("", job | {"priority": "{queues}-high"}, "queues"))
    stage.settles("low", "was preempted by another job and waits: queue ranked .* is full", "queues")
    stage.settles("high", "runs", "queues")


def test_a_job_that_was_stopped_says_with_what(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.start("halted", Situation("", {"command": SITUATIONS["runs"].job["command"]}))
    stage.settles("halted", "runs: training at step 3")
    assert launcher(capsys, monkeypatch, "stop", "halted", "-n", stage.namespaces["plain"]).code == 0
    found = stage.settles("halted", "is stopped; stopped from outside: ")
    assert "submit" in (found.next_move or "")


def test_a_job_that_is_being_deleted_says_so(stage: Stage) -> None:
    stage.start("leaving", Situation("", {}, change=held))
    stage.settles("leaving", "runs")
    stage.cluster.delete(JOBSETS, "leaving", stage.namespaces["plain"])
    assert "jaxlaunch.test/hold" in stage.settles("leaving", "is being deleted").evidence[0]
    stage.cluster.merge(JOBSETS, "leaving", stage.namespaces["plain"], {"metadata": {"finalizers": None}})


def test_a_name_that_is_not_there_brings_up_those_that_are_like_it(stage: Stage) -> None:
    found = explain.explain(stage.looks("no-secrets"))
    assert found.headline == f"there is no job no-secrets in namespace {stage.namespaces['plain']}"
    assert "no-secret" in (found.next_move or "")


# What somebody needs who only looks at the jobs of one namespace.
READER = (
    {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["get", "list"]},
    {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods", "events"], "verbs": ["list"]},
    {"apiGroups": [""], "resources": ["pods/log"], "verbs": ["get"]},
)


def test_who_may_not_see_nodes_is_told_what_the_scheduler_says(
    stage: Stage, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settles("too-large", SITUATIONS["too-large"].first_line)
    reader = preparations.make_user(stage.access, stage.namespaces["plain"], READER, tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(reader))
    left = launcher(capsys, monkeypatch, "explain", "too-large")
    assert left.code == 0
    assert re.match("too-large waits: its host unscheduled: 0/.* nodes are available: .*Insufficient cpu", left.out)
    assert "nodes could not be read: nodes is forbidden" in left.out
    assert launcher(capsys, monkeypatch, "list").code == 0
    assert launcher(capsys, monkeypatch, "list", "-A").code == 3


def test_list_shows_every_job_in_its_state(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settles("done", "is done")
    plain = stage.namespaces["plain"]
    table = launcher(capsys, monkeypatch, "list", "-n", plain)
    rows = {row.split()[0]: row.split() for row in table.out.splitlines()}
    assert rows["NAME"] == ["NAME", "STATE", "HOSTS", "STEP", "RESTARTS", "AGE"]
    assert rows["no-image"][1:5] == ["Starting", "0/1", "-", "0"]
    assert rows["done"][1] == "Done"
    assert "another" not in rows, "it was not submitted by the launcher"
    everywhere = launcher(capsys, monkeypatch, "list", "-A", "-o", "json")
    assert {"no-image", "never", "quota"} <= {job["name"] for job in json.loads(everywhere.out)}
    assert plain in launcher(capsys, monkeypatch, "list", "-A", "-o", "wide").out


def test_status_and_explain_write_json_and_yaml(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settles("bad-spec", "failed: bad_spec")
    where = "bad-spec", "-n", stage.namespaces["plain"]
    for command, key in (("status", "state"), ("explain", "situation")):
        as_json = launcher(capsys, monkeypatch, command, *where, "-o", "json")
        as_yaml = launcher(capsys, monkeypatch, command, *where, "-o", "yaml")
        assert json.loads(as_json.out)[key].lower() == yaml.safe_load(as_yaml.out)[key].lower() == "failed"
    screen = launcher(capsys, monkeypatch, "status", *where, "-o", "wide")
    assert screen.out.startswith("bad_spec (64): ")
    assert "POD" in screen.out


def test_a_name_that_is_not_there_is_the_users_to_mend(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("status", "explain"):
        left = launcher(capsys, monkeypatch, command, "no-secrets", "-n", stage.namespaces["plain"])
        assert left.code == 2
        assert "no-secret" in left.out + left.err

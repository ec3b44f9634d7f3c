"""`launcher logs` against real pods: merged, filtered, followed over a restart, and what came before."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from jaxlaunch.contract import ANNOTATION
from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.records.log_lines import ProgressAnnotation
from tests.cluster import forked, preparations
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, ROOT, Gang, Place, place, program, until
from tests.cluster.harness.places import SERVER
from tests.cluster.proxy import Proxy
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler

INSTALL = ROOT / "k8s" / "install.yaml"
SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
TALKS = """
import json, os, time
rank, generation = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAXLAUNCH_GENERATION"])
for number in range(5):
    print(f"generation {generation} line {number}", flush=True)
    time.sleep(0.1)
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
say(phase="step", step=7)
said = "/checkpoints/said-{}-{}".format
open(said(generation, rank), "w").close()
if generation == 0 and rank == 1:
    end = time.monotonic() + 900
    files = ["/checkpoints/read", *(said(0, each) for each in range(4))]
    while not all(map(os.path.exists, files)) and time.monotonic() < end:
        time.sleep(0.05)
    raise ValueError("a bad batch")
time.sleep(3600 if generation == 0 else 0.5)
say(phase="done", step=9)
"""


@pytest.fixture(scope="module")
def here(cluster: Access, base_image: str) -> Iterator[Place]:
    with place(cluster, base_image) as found:
        yield found


@pytest.fixture(scope="module")
def folder(here: Place) -> Path:
    """What the pods know as /checkpoints."""
    return preparations.make_claim(here.access, here.namespace)


@pytest.fixture(scope="module")
def followed(here: Place, folder: Path) -> tuple[Gang, str, str]:
    """A gang that crashed once and is done, and what `logs -f` said on stdout and stderr from its start on.

    It crashes only once its lines are read: a follower may start after a generation that fails at
    once is gone.
    """
    restarts = {
        "restarts": {"in_place": 0, "crash": 1},
        "resources": {"cpu": "10m"},
        "processes_per_host": 2,
    }
    command = ["python", "-c", TALKS]
    accelerator = {"type": "cpu", "per_host": 2}
    gang = here.start("talks", SAVED, hosts=2, command=command, accelerator=accelerator, **restarts)
    argv = [
        sys.executable,
        "-m",
        "jaxlaunch.launcher.cli.main",
        "logs",
        "-f",
        gang.name,
        "-n",
        here.namespace,
    ]
    pipe, lines = subprocess.PIPE, []
    with subprocess.Popen(
        argv, stdout=pipe, stderr=pipe, text=True, env=here.access.env
    ) as follower:
        assert follower.stdout is not None
        while sum("generation 0 line 4" in line for line in lines) < 4 and (
            line := follower.stdout.readline()
        ):
            lines.append(line)
        (folder / "read").touch()
        out, err = follower.communicate(timeout=PATIENCE_S)
    assert follower.returncode == 0, err
    return gang, "".join(lines) + out, err


def test_following_lives_through_a_restart(followed: tuple[Gang, str, str]) -> None:
    gang, out, err = followed
    assert gang.ended() == "Completed"
    lines = out.splitlines()
    for generation in range(2):
        for rank in range(4):
            own = [
                line for line in lines if line.startswith(f"[{rank}] generation {generation} line")
            ]
            assert own == [f"[{rank}] generation {generation} line {number}" for number in range(5)]
    said = [line for line in err.splitlines() if line.startswith("launcher: generation")]
    assert said[:2] == [
        "launcher: generation 0 ended: rank 1 raised at step 7: ValueError: a bad batch",
        "launcher: generation 1 begins",
    ]
    assert "jaxlaunch: " not in out + err


def test_lines_come_by_time_each_after_its_rank(
    here: Place, followed: tuple[Gang, str, str]
) -> None:
    done = here.launcher("logs", followed[0].name)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] generation 1 line {number}" for rank in range(4) for number in range(5)
    )
    assert "every process finished" in done.stderr.splitlines()[0]
    said = [
        json.loads(line)
        for line in here.launcher("logs", followed[0].name, "-o", "json").stdout.splitlines()
    ]
    assert [line["time"] for line in said] == sorted(line["time"] for line in said)
    assert {(line["host"], line["rank"]) for line in said if line["rank"] is not None} == {
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    }
    assert {line["generation"] for line in said} == {1}


@pytest.fixture(scope="module")
def stopped(here: Place, folder: Path) -> tuple[Gang, int]:
    """A job that was stopped and has no pods, and the step that it saved."""
    (folder / "counts").mkdir(mode=0o777)
    (folder / "counts").chmod(0o777)
    counts = program("counts.py", "/checkpoints/counts")
    gang = here.start(
        "counts", SAVED, hosts=2, command=counts, resources={"cpu": "10m"}, grace="20s"
    )
    gang.says("begins at step 0")
    until("both count", lambda: sum("begins at step" in line.text for line in gang.lines()) == 2)
    (pod,) = [one["metadata"]["name"] for one in gang.pods if "-w-0-1-" in one["metadata"]["name"]]
    kept = lines.read_agent_lines(here.cluster, here.namespace, pod, 9400)
    assert list(kept) == [1], "its agent has the lines of its rank"
    assert kept[1][0] == "begins at step 0", "its agent has the lines of its rank"
    done = here.launcher("stop", gang.name)
    saved = re.search(r"saved at step (\d+)", done.stderr)
    assert done.returncode == 0 and saved is not None, done.stderr
    until("no pod is left", lambda: not gang.pods)
    return gang, int(saved[1])


def test_a_job_without_pods_is_read_from_its_volume_with_the_rights_of_a_submitter(
    here: Place, stopped: tuple[Gang, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang, step = stopped
    here.cluster.merge_patch(
        JOBSETS, gang.name, here.namespace, {"metadata": {"annotations": {ANNOTATION: None}}}
    )
    roles = [one for one in yaml.safe_load_all(INSTALL.read_text()) if one["kind"] == "ClusterRole"]
    rules = next(one["rules"] for one in roles if one["metadata"]["name"] == "jaxlaunch-user")
    user = preparations.make_user(here.access, here.namespace, rules, tmp_path)
    monkeypatch.setattr(here, "access", dataclasses.replace(here.access, kubeconfig=user))
    shown = here.launcher("status", gang.name, "--from-volume")
    assert f"saved at step {step}" in shown.stdout.splitlines()[0], shown.stderr
    assert "by the files on its volume" in shown.stdout
    told = here.launcher("logs", gang.name, "--previous", "--from-volume")
    assert {f"[{rank}] begins at step 0" for rank in range(2)} <= set(told.stdout.splitlines()), (
        told.stderr
    )
    assert (
        "attempt 1 of generation 0: preempted (80): stopped from outside: saved at step"
        in told.stderr
    )
    names = [one["metadata"]["name"] for one in here.cluster.list(JOBSETS, here.namespace)]
    assert not [name for name in names if name.startswith("read-")]


def test_a_leader_with_a_service_account_that_may_writes_on_its_jobset_how_far_it_is(
    here: Place,
) -> None:
    about = {"name": "writer", "namespace": here.namespace}
    rule = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["patch"]}
    group = "rbac.authorization.k8s.io"
    roles = f"/apis/{group}/v1/namespaces/{here.namespace}"
    here.access.api.create(
        f"/api/v1/namespaces/{here.namespace}/serviceaccounts", {"metadata": about}
    )
    here.access.api.create(f"{roles}/roles", {"metadata": about, "rules": [rule]})
    of = {"roleRef": {"apiGroup": group, "kind": "Role", "name": "writer"}}
    subject = {"kind": "ServiceAccount", **about}
    here.access.api.create(
        f"{roles}/rolebindings", {"metadata": about, **of, "subjects": [subject]}
    )
    # No kube-proxy is here, which makes the usual address work.
    host, port = SERVER.removeprefix("https://").split(":")
    where = {
        "env": {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
        "resources": {"cpu": "10m"},
    }
    may = here.start("may", Defaults(), command=["true"], service_account="writer", **where)
    may_not = here.start(
        "may-not", Defaults(), command=["true"], service_account="default", **where
    )
    assert (may.ended(), may_not.ended()) == ("Completed", "Completed")
    known = ProgressAnnotation.from_json(
        may.jobset["metadata"]["annotations"][ANNOTATION], may.jobset["metadata"]["uid"]
    )
    assert known is not None and known.verdict is not None
    assert (known.when, known.attempt, known.verdict.code) == ("ended", 1, 0)
    assert ANNOTATION not in may_not.jobset["metadata"]["annotations"]
    assert may_not.says("cannot be written on its JobSet (patch jobsets may-not): HTTP 403")


def broken_off(handler: Handler) -> bool:
    """A log that is followed begins, and its connection breaks."""
    if not handler.query.get("follow"):
        return False
    connection, answer = handler._ask()  # type: ignore[attr-defined]
    handler.begin_stream()
    handler.raw_chunk(answer.read1(65536))
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.close()
    connection.close()
    return True


def test_a_stream_that_breaks_is_taken_up_where_it_broke(here: Place, tmp_path: Path) -> None:
    counts = [
        "python",
        "-u",
        "-c",
        "import time\nfor n in range(60): print('line', n); time.sleep(0.2)",
    ]
    gang = here.start("broken", Defaults(), command=counts, resources={"cpu": "10m"})
    with apiserver.serving(Proxy(here.access.api)) as proxy:
        proxy.on("GET", "/log", *[broken_off] * 6)
        env = here.access.env | {"KUBECONFIG": str(proxy.kubeconfig(tmp_path, here.namespace))}
        done = forked.run(["logs", "-f", gang.name], env=env, cwd=Path.cwd(), timeout=PATIENCE_S)
        asked = [
            query
            for method, path, query in proxy.requests
            if path.endswith("/log") and "follow" in query
        ]
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.splitlines() == [f"[0] line {number}" for number in range(60)]
    assert len(asked) > 2 and "sinceTime" in asked[-1]

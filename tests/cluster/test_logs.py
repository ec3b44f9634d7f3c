"""`launcher logs` with real pods: merged, filtered, followed over a restart, and earlier lines."""

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
from tests.cluster.gangs import (
    PATIENCE_S,
    ROOT,
    Gang,
    Workspace,
    make_workspace,
    program_command,
    wait_for,
)
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
def workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def folder(workspace: Workspace) -> Path:
    """Return the folder that the pods know as /checkpoints."""
    return preparations.make_claim(workspace.access, workspace.namespace)


@pytest.fixture(scope="module")
def followed_gang(workspace: Workspace, folder: Path) -> tuple[Gang, str, str]:
    """Return a gang that crashed once and is done, and the stdout and stderr of `logs -f`.

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
    gang = workspace.start(
        "talks", SAVED, hosts=2, command=command, accelerator=accelerator, **restarts
    )
    argv = [
        sys.executable,
        "-m",
        "jaxlaunch.launcher.cli.main",
        "logs",
        "-f",
        gang.name,
        "-n",
        workspace.namespace,
    ]
    pipe, lines = subprocess.PIPE, []
    with subprocess.Popen(
        argv, stdout=pipe, stderr=pipe, text=True, env=workspace.access.env
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


def test_follower_survives_a_restart(followed_gang: tuple[Gang, str, str]) -> None:
    gang, out, err = followed_gang
    assert gang.wait_for_end() == "Completed"
    lines = out.splitlines()
    for generation in range(2):
        for rank in range(4):
            rank_lines = [
                line for line in lines if line.startswith(f"[{rank}] generation {generation} line")
            ]
            assert rank_lines == [
                f"[{rank}] generation {generation} line {number}" for number in range(5)
            ]
    notes = [line for line in err.splitlines() if line.startswith("launcher: generation")]
    assert notes[:2] == [
        "launcher: generation 0 ended: rank 1 raised at step 7: ValueError: a bad batch",
        "launcher: generation 1 begins",
    ]
    assert "jaxlaunch: " not in out + err


def test_lines_are_sorted_by_time_and_prefixed_with_their_rank(
    workspace: Workspace, followed_gang: tuple[Gang, str, str]
) -> None:
    done = workspace.launcher("logs", followed_gang[0].name)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] generation 1 line {number}" for rank in range(4) for number in range(5)
    )
    assert "every process finished" in done.stderr.splitlines()[0]
    lines_of_program = [
        json.loads(line)
        for line in workspace.launcher(
            "logs", followed_gang[0].name, "-o", "json"
        ).stdout.splitlines()
    ]
    assert [line["time"] for line in lines_of_program] == sorted(
        line["time"] for line in lines_of_program
    )
    assert {
        (line["host"], line["rank"]) for line in lines_of_program if line["rank"] is not None
    } == {(0, 0), (0, 1), (1, 2), (1, 3)}
    assert {line["generation"] for line in lines_of_program} == {1}


@pytest.fixture(scope="module")
def stopped_gang(workspace: Workspace, folder: Path) -> tuple[Gang, int]:
    """Return a stopped job without pods, and its saved step."""
    (folder / "counts").mkdir(mode=0o777)
    (folder / "counts").chmod(0o777)
    counts = program_command("counts.py", "/checkpoints/counts")
    gang = workspace.start(
        "counts", SAVED, hosts=2, command=counts, resources={"cpu": "10m"}, grace="20s"
    )
    gang.wait_for_line("begins at step 0")
    wait_for(
        "both count", lambda: sum("begins at step" in line.text for line in gang.read_lines()) == 2
    )
    (pod,) = [
        item["metadata"]["name"] for item in gang.pods if "-w-0-1-" in item["metadata"]["name"]
    ]
    agent_lines = lines.read_agent_lines(workspace.cluster, workspace.namespace, pod, 9400)
    assert list(agent_lines) == [1], "its agent has the lines of its rank"
    assert agent_lines[1][0] == "begins at step 0", "its agent has the lines of its rank"
    done = workspace.launcher("stop", gang.name)
    saved = re.search(r"saved at step (\d+)", done.stderr)
    assert done.returncode == 0 and saved is not None, done.stderr
    wait_for("no pod is left", lambda: not gang.pods)
    return gang, int(saved[1])


def test_submitter_reads_a_job_without_pods_from_its_volume(
    workspace: Workspace,
    stopped_gang: tuple[Gang, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gang, step = stopped_gang
    workspace.cluster.merge_patch(
        JOBSETS, gang.name, workspace.namespace, {"metadata": {"annotations": {ANNOTATION: None}}}
    )
    roles = [
        role for role in yaml.safe_load_all(INSTALL.read_text()) if role["kind"] == "ClusterRole"
    ]
    rules = next(role["rules"] for role in roles if role["metadata"]["name"] == "jaxlaunch-user")
    user = preparations.make_user(workspace.access, workspace.namespace, rules, tmp_path)
    monkeypatch.setattr(workspace, "access", dataclasses.replace(workspace.access, kubeconfig=user))
    shown = workspace.launcher("status", gang.name, "--from-volume")
    assert f"saved at step {step}" in shown.stdout.splitlines()[0], shown.stderr
    assert "by the files on its volume" in shown.stdout
    result = workspace.launcher("logs", gang.name, "--previous", "--from-volume")
    assert {f"[{rank}] begins at step 0" for rank in range(2)} <= set(result.stdout.splitlines()), (
        result.stderr
    )
    assert (
        "attempt 1 of generation 0: preempted (80): stopped from outside: saved at step"
        in result.stderr
    )
    names = [
        role["metadata"]["name"] for role in workspace.cluster.list(JOBSETS, workspace.namespace)
    ]
    assert not [name for name in names if name.startswith("read-")]


def test_leader_with_the_right_annotates_its_jobset_with_progress(workspace: Workspace) -> None:
    metadata = {"name": "writer", "namespace": workspace.namespace}
    rule = {"apiGroups": ["jobset.x-k8s.io"], "resources": ["jobsets"], "verbs": ["patch"]}
    group = "rbac.authorization.k8s.io"
    roles = f"/apis/{group}/v1/namespaces/{workspace.namespace}"
    workspace.access.api.create(
        f"/api/v1/namespaces/{workspace.namespace}/serviceaccounts", {"metadata": metadata}
    )
    workspace.access.api.create(f"{roles}/roles", {"metadata": metadata, "rules": [rule]})
    role_ref = {"roleRef": {"apiGroup": group, "kind": "Role", "name": "writer"}}
    subject = {"kind": "ServiceAccount", **metadata}
    workspace.access.api.create(
        f"{roles}/rolebindings", {"metadata": metadata, **role_ref, "subjects": [subject]}
    )
    # No kube-proxy is here, which makes the usual address work.
    host, port = SERVER.removeprefix("https://").split(":")
    paths = {
        "env": {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port},
        "resources": {"cpu": "10m"},
    }
    may = workspace.start("may", Defaults(), command=["true"], service_account="writer", **paths)
    may_not = workspace.start(
        "may-not", Defaults(), command=["true"], service_account="default", **paths
    )
    assert (may.wait_for_end(), may_not.wait_for_end()) == ("Completed", "Completed")
    progress = ProgressAnnotation.from_json(
        may.jobset["metadata"]["annotations"][ANNOTATION], may.jobset["metadata"]["uid"]
    )
    assert progress is not None and progress.verdict is not None
    assert (progress.when, progress.attempt, progress.verdict.code) == ("ended", 1, 0)
    assert ANNOTATION not in may_not.jobset["metadata"]["annotations"]
    assert may_not.wait_for_line(
        "cannot be written to its JobSet (patch jobsets may-not): HTTP 403"
    )


def break_followed_log(handler: Handler) -> bool:
    """Begin a followed log and break its connection."""
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


def test_broken_stream_is_resumed_where_it_broke(workspace: Workspace, tmp_path: Path) -> None:
    counts = [
        "python",
        "-u",
        "-c",
        "import time\nfor n in range(60): print('line', n); time.sleep(0.2)",
    ]
    gang = workspace.start("broken", Defaults(), command=counts, resources={"cpu": "10m"})
    with apiserver.serve_in_thread(Proxy(workspace.access.api)) as proxy:
        proxy.on("GET", "/log", *[break_followed_log] * 6)
        env = workspace.access.env | {
            "KUBECONFIG": str(proxy.kubeconfig(tmp_path, workspace.namespace))
        }
        done = forked.run_forked(
            ["logs", "-f", gang.name], env=env, cwd=Path.cwd(), timeout=PATIENCE_S
        )
        requests = [
            query
            for method, path, query in proxy.requests
            if path.endswith("/log") and "follow" in query
        ]
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.splitlines() == [f"[0] line {number}" for number in range(60)]
    assert len(requests) > 2 and "sinceTime" in requests[-1]

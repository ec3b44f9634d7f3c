"""The user's code without a registry: the edited files run, and are deleted with their jobs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.manifests.code import MAX_CONFIG_MAP_BYTES
from tests import collisions
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.gangs import ROOT
from tests.cluster.waiting import wait_until
from tests.compiled import QUICK_COMPILES

TRAIN = """
import os, sys
from mine.model import ANSWER
print("the answer is", ANSWER, "in", os.getcwd(), "as", sys.argv[1:], "before", sys.path[1])
"""


CALLS = """
import json, os, time
import numpy as np
import jaxlaunch
from scale import SCALE

KEYS = {
    "namespace": os.environ.get("NAMESPACE"), "image": os.environ.get("IMAGE"), "cluster": True,
    "hosts": 2, "accelerator": {"type": "cpu", "per_host": 2}, "processes_per_host": 2,
    "grace": "2s", "resources": {"cpu": "50m", "memory": "900Mi"},
}

class RefusedError(ValueError):
    pass

@jaxlaunch.job(**KEYS)
def work(count, refuses):
    rank = int(os.environ["JAX_PROCESS_ID"])
    if refuses and rank == 2:
        raise RefusedError("no", 7)
    if refuses:
        time.sleep(3600)
    processes = int(os.environ["JAX_NUM_PROCESSES"])
    return {"rank": rank, "processes": processes, "array": SCALE * np.arange(count)}

@jaxlaunch.job(**KEYS, timeouts={"first_step": "1s"})
def stall():
    time.sleep(3600)

@jaxlaunch.job(**KEYS)
def doze():
    time.sleep(3600)

def describe(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        code = getattr(error.__cause__ or error, "exit_code", None)
        return [type(error).__name__, list(error.args)[:2], getattr(error, "__notes__", []), code]

if __name__ == "__main__":
    value = work(1_250_000, False)
    is_equal = bool((value.pop("array") == 3.0 * np.arange(1_250_000)).all())
    print(json.dumps([value, is_equal]))
    print(json.dumps(describe(work, 1, True)))
    print(json.dumps(describe(stall)), flush=True)
    print(json.dumps(describe(doze)))
"""


def test_function_returns_and_raises_what_its_ranks_do(
    cluster: Access, namespace: str, image: str, tmp_path: Path
) -> None:
    (tmp_path / "scale.py").write_text("SCALE = 3.0\n")
    (tmp_path / "calls.py").write_text(CALLS)
    variables = {"PYTHONPATH": str(ROOT), "NAMESPACE": namespace, "IMAGE": image}
    process = subprocess.Popen(
        [sys.executable, "calls.py"],
        cwd=tmp_path,
        env={**os.environ, **cluster.env, **variables},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    value, is_equal = json.loads(process.stdout.readline())
    assert (value, is_equal) == ({"rank": 0, "processes": 4}, True)
    kind, arguments, notes, code = json.loads(process.stdout.readline())
    assert (kind, arguments, code) == ("RefusedError", ["no", 7], 83)
    assert notes[0].startswith("rank 2:\nTraceback")
    kind, _, _, code = json.loads(process.stdout.readline())
    assert (kind, code) == ("JobFailedError", 82)
    jobsets = f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets"

    def list_jobs() -> list[str]:
        return [item["metadata"]["name"] for item in cluster.api.get(jobsets)["items"]]

    wait_until(list_jobs, lambda names: "doze" in names, "the last call has a job")
    process.send_signal(signal.SIGINT)
    assert json.loads(process.communicate()[0])[0] == "KeyboardInterrupt"
    assert sorted(list_jobs()) == ["stall", "work"]


def code_configmaps(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    """Return the ConfigMaps that hold the code of jobs."""
    listed = cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]
    return [
        configmap for configmap in listed if configmap["metadata"]["name"].startswith("jaxlaunch-")
    ]


def owner_names(cluster: Access, namespace: str) -> list[list[str]]:
    configmaps = code_configmaps(cluster, namespace)
    return [
        sorted(owner["name"] for owner in configmap["metadata"].get("ownerReferences", []))
        for configmap in configmaps
    ]


@pytest.mark.parametrize("agent", ["inject", "auto"])
def test_edited_file_runs_without_a_new_image(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path, agent: str
) -> None:
    files = {
        "train.py": TRAIN,
        "mine/model.py": "ANSWER = 41",
        ".gitignore": "*.npz",
        "huge.npz": "x" * 5_000_000,
    }
    folder = write_project(tmp_path, namespace, files, image=base_image, code=".", agent=agent)
    first = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert first.returncode == 0, first.stderr
    assert "[0] the answer is 41 in /code as [] before /code\n" in first.stdout
    (folder / "mine" / "model.py").write_text("ANSWER = 42")
    second = run_launcher(cluster, folder, "submit", "job.yaml", "--replace", "--wait", "--follow")
    assert second.returncode == 0, second.stderr
    assert "[0] the answer is 42 in /code" in second.stdout


def test_folder_of_almost_the_maximum_size_arrives(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    text = "import os; print('bytes', os.path.getsize('data.bin'))"
    folder = write_project(tmp_path, namespace, {"train.py": text}, image=base_image, code=".")
    room = MAX_CONFIG_MAP_BYTES - len(pack.pack_agent())
    size = room - 4096  # the archive's own bytes, the job and the program
    assert size > 800 * 1024, "the agent leaves most of it to the user"
    (folder / "data.bin").write_bytes(os.urandom(size))
    result = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert result.returncode == 0 and f"[0] bytes {size}\n" in result.stdout, result.stderr


def test_jobs_of_one_folder_share_their_code_until_the_last_is_deleted(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    folder = write_project(
        tmp_path,
        namespace,
        {"train.py": "import time; time.sleep(600)"},
        image=base_image,
        code=".",
    )
    for name in ("first", "second", "third", "second"):
        submitted = run_launcher(cluster, folder, "submit", "job.yaml", f"name={name}")
        assert submitted.returncode == 0, submitted.stderr
    assert owner_names(cluster, namespace) == [["first", "second", "third"]]
    (configmap,) = code_configmaps(cluster, namespace)
    assert configmap["immutable"] is True
    assert not any(
        owner.get("blockOwnerDeletion") for owner in configmap["metadata"]["ownerReferences"]
    )
    for name in ("first", "second"):
        deleted = run_launcher(cluster, folder, "delete", name, "-n", namespace, "--yes")
        assert deleted.returncode == 0, deleted.stderr
    wait_until(
        lambda: owner_names(cluster, namespace), lambda seen: seen == [["third"]], "two jobs let go"
    )
    (configmap,) = code_configmaps(cluster, namespace)
    managers = {field["manager"] for field in configmap["metadata"]["managedFields"]}
    assert len([name for name in managers if name.startswith("jaxlaunch-")]) == 1, (
        "those of jobs that are gone stay"
    )
    run_launcher(cluster, folder, "delete", "third", "-n", namespace, "--yes")
    wait_until(
        lambda: owner_names(cluster, namespace), lambda seen: seen == [], "what was brought goes"
    )


def test_custom_task_trains_in_a_folder_with_colliding_names(
    cluster: Access, namespace: str, checkpoints: Path, image: str, tmp_path: Path
) -> None:
    """Check with files whose names collide: random.py, types.py, jax.py, trainer/ and more."""
    made = collisions.make_all(tmp_path / "shipped")
    task = (made / "task_of_mine.py").read_text() + "print('mine is', __file__)\n"
    train = {
        "task": "mine.tasks:Mine",
        "data": {"source": "synthetic", "shape": [4, 4]},
        "batch": 16,
        "steps": 3,
        "checkpoint": {"path": "/checkpoints/mine"},
    }
    job = {
        "command": None,
        "train": train,
        "env": QUICK_COMPILES,
        "volumes": [{"claim": "checkpoints", "path": "/checkpoints"}],
    }
    folder = write_project(
        tmp_path, namespace, {"shipped/mine/tasks.py": task}, image=image, code="shipped", **job
    )
    result = run_launcher(
        cluster, folder, "submit", "job.yaml", "resources.memory=1Gi", "--wait", "--follow"
    )
    assert result.returncode == 0, result.stderr
    assert "[0] mine is /code/mine/tasks.py\n" in result.stdout
    names = collisions.users_names({*collisions.MODULES, *collisions.PACKAGES})
    assert collisions.parse_origins(result.stdout) == [f"{name} mine" for name in names]

"""The user's code without a registry: what is edited here runs there, and what was shipped goes when its jobs go."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.manifests.code import MAX_CONFIG_MAP_BYTES
from tests import collisions
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.waiting import until
from tests.compiled import QUICK_COMPILES

TRAIN = """
import os, sys
from mine.model import ANSWER
print("the answer is", ANSWER, "in", os.getcwd(), "as", sys.argv[1:], "before", sys.path[1])
"""


def shipped(cluster: Access, namespace: str) -> list[dict[str, Any]]:
    """The ConfigMaps that hold what jobs brought."""
    listed = cluster.api.get(f"/api/v1/namespaces/{namespace}/configmaps")["items"]
    return [one for one in listed if one["metadata"]["name"].startswith("jaxlaunch-")]


def owners(cluster: Access, namespace: str) -> list[list[str]]:
    found = shipped(cluster, namespace)
    return [
        sorted(owner["name"] for owner in one["metadata"].get("ownerReferences", []))
        for one in found
    ]


@pytest.mark.parametrize("agent", ["inject", "auto"])
def test_an_edited_file_runs_with_no_image_built(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path, agent: str
) -> None:
    files = {
        "train.py": TRAIN,
        "mine/model.py": "ANSWER = 41",
        ".gitignore": "*.npz",
        "huge.npz": "x" * 5_000_000,
    }
    folder = project(tmp_path, namespace, files, image=base_image, code=".", agent=agent)
    first = launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert first.returncode == 0, first.stderr
    assert "[0] the answer is 41 in /code as [] before /code\n" in first.stdout
    (folder / "mine" / "model.py").write_text("ANSWER = 42")
    second = launcher(cluster, folder, "submit", "job.yaml", "--replace", "--wait", "--follow")
    assert second.returncode == 0, second.stderr
    assert "[0] the answer is 42 in /code" in second.stdout


def test_a_folder_that_almost_fills_what_the_agent_leaves_of_1_mib_arrives(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    text = "import os; print('bytes', os.path.getsize('data.bin'))"
    folder = project(tmp_path, namespace, {"train.py": text}, image=base_image, code=".")
    room = MAX_CONFIG_MAP_BYTES - len(pack.pack_agent())
    size = room - 4096  # the archive's own bytes, the job and the program
    assert size > 800 * 1024, "the agent leaves most of it to the user"
    (folder / "data.bin").write_bytes(os.urandom(size))
    ended = launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert ended.returncode == 0 and f"[0] bytes {size}\n" in ended.stdout, ended.stderr


def test_jobs_of_one_folder_share_what_they_brought_until_the_last_is_gone(
    cluster: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    folder = project(
        tmp_path,
        namespace,
        {"train.py": "import time; time.sleep(600)"},
        image=base_image,
        code=".",
    )
    for name in ("first", "second", "third", "second"):
        submitted = launcher(cluster, folder, "submit", "job.yaml", f"name={name}")
        assert submitted.returncode == 0, submitted.stderr
    assert owners(cluster, namespace) == [["first", "second", "third"]]
    (one,) = shipped(cluster, namespace)
    assert one["immutable"] is True
    assert not any(owner.get("blockOwnerDeletion") for owner in one["metadata"]["ownerReferences"])
    for name in ("first", "second"):
        deleted = launcher(cluster, folder, "delete", name, "-n", namespace, "--yes")
        assert deleted.returncode == 0, deleted.stderr
    until(lambda: owners(cluster, namespace), lambda seen: seen == [["third"]], "two jobs let go")
    (one,) = shipped(cluster, namespace)
    managers = {field["manager"] for field in one["metadata"]["managedFields"]}
    assert len([name for name in managers if name.startswith("jaxlaunch-")]) == 1, (
        "those of jobs that are gone stay"
    )
    launcher(cluster, folder, "delete", "third", "-n", namespace, "--yes")
    until(lambda: owners(cluster, namespace), lambda seen: seen == [], "what was brought goes")


def test_a_task_of_ones_own_trains_in_our_image_whatever_else_its_folder_holds(
    cluster: Access, namespace: str, checkpoints: Path, image: str, tmp_path: Path
) -> None:
    """Files whose names something else has too: random.py, types.py, jax.py, trainer/ and forty more."""
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
    folder = project(
        tmp_path, namespace, {"shipped/mine/tasks.py": task}, image=image, code="shipped", **job
    )
    ended = launcher(
        cluster, folder, "submit", "job.yaml", "resources.memory=1Gi", "--wait", "--follow"
    )
    assert ended.returncode == 0, ended.stderr
    assert "[0] mine is /code/mine/tasks.py\n" in ended.stdout
    names = collisions.own({*collisions.MODULES, *collisions.PACKAGES})
    assert collisions.seen(ended.stdout) == [f"{name} mine" for name in names]

"""Profiles of jobs in pods, by agents that listen to their own pod only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.job.defaults import Defaults
from jaxlaunch.launcher.kubernetes.labels import INDEX_LABEL
from tests.cluster import preparations, processes
from tests.cluster.access import Access
from tests.cluster.gangs import ROOT, Workspace, make_workspace
from tests.compiled import QUICK_COMPILES
from tests.gang.runs import digits_block

SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
SMALL: dict[str, Any] = {
    "resources": {"cpu": "50m", "memory": "2Gi"},
    "grace": "20s",
    "env": QUICK_COMPILES,
}
TRAIN = digits_block(steps=1_000_000, log_every=10, optimizer={})


@pytest.fixture(scope="module")
def programs_workspace(cluster: Access, base_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, base_image) as workspace:
        yield workspace


@pytest.fixture(scope="module")
def trainers_workspace(cluster: Access, image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, image) as workspace:
        yield workspace


def act_as_user(workspace: Workspace, folder: Path) -> None:
    """Give the command line only the rights of a submitter."""
    roles = yaml.safe_load_all((ROOT / "k8s" / "install.yaml").read_text())
    rules = next(role["rules"] for role in roles if role["metadata"]["name"] == "jaxlaunch-user")
    file = preparations.make_user(workspace.access, workspace.namespace, rules, folder)
    workspace.access = Access(file, workspace.access.kubectl_path, False)


def test_agent_in_a_pod_answers_a_submitter(programs_workspace: Workspace, tmp_path: Path) -> None:
    workspace = programs_workspace
    gang = workspace.start(
        "own", Defaults(), command=["sh", "-c", "echo begun; exec sleep 600"], **SMALL
    )
    gang.wait_for_line("begun")  # from now on its agent answers
    act_as_user(workspace, tmp_path)
    refused = workspace.launcher("profile", "own")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "only the built-in trainer can be profiled" in refused.stderr
    missing = workspace.launcher("profile", "other")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "has no job other" in missing.stderr


def test_job_is_profiled_in_its_pods_while_it_trains(trainers_workspace: Workspace) -> None:
    workspace = trainers_workspace
    folder = preparations.make_claim(workspace.access, workspace.namespace)
    gang = workspace.start("steps", SAVED, hosts=2, train=TRAIN, restarts={"in_place": 0}, **SMALL)
    gang.wait_for_line("step 20/")
    first = next(pod for pod in gang.pods if pod["metadata"]["labels"][INDEX_LABEL] == "0")
    rank = processes.find_trainer(first)
    environ = dict(
        pair.partition("=")[::2] for pair in Path(f"/proc/{rank}/environ").read_text().split("\0")
    )
    port = int(environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
    assert processes.listening_addresses(rank, port) == [first["status"]["podIP"]]
    done = workspace.launcher("profile", "steps", "--steps", "3", "-o", "json")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["ranks"]
    assert {rank: answer["state"] for rank, answer in answers.items()} == {"0": "done", "1": "done"}
    for answer in answers.values():
        profile_folder = folder / Path(answer["folder"]).relative_to("/checkpoints")
        assert json.loads((profile_folder / "summary.json").read_text()) == answer["summary"]
        assert list(profile_folder.rglob("*.xplane.pb"))
    assert gang.counters == (0, 0)

"""Profiles of jobs in pods: asked through the API server, taken by agents that listen to their own pod alone."""

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
from tests.cluster.gangs import ROOT, Place, place
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
def programs_place(cluster: Access, base_image: str) -> Iterator[Place]:
    with place(cluster, base_image) as here:
        yield here


@pytest.fixture(scope="module")
def trainers_place(cluster: Access, image: str) -> Iterator[Place]:
    with place(cluster, image) as here:
        yield here


def as_a_user(here: Place, folder: Path) -> None:
    """From now on the command line has the rights of whoever runs jobs, and no more."""
    roles = yaml.safe_load_all((ROOT / "k8s" / "install.yaml").read_text())
    rules = next(one["rules"] for one in roles if one["metadata"]["name"] == "jaxlaunch-user")
    file = preparations.make_user(here.access, here.namespace, rules, folder)
    here.access = Access(file, here.access.kubectl_path, False)


def test_an_agent_in_a_pod_answers_whoever_may_run_jobs(
    programs_place: Place, tmp_path: Path
) -> None:
    here = programs_place
    gang = here.start(
        "own", Defaults(), command=["sh", "-c", "echo begun; exec sleep 600"], **SMALL
    )
    gang.says("begun")  # from now on its agent answers
    as_a_user(here, tmp_path)
    refused = here.launcher("profile", "own")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "only the built-in trainer can be profiled" in refused.stderr
    missing = here.launcher("profile", "other")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "has no job other" in missing.stderr


def test_a_job_is_profiled_in_its_pods_while_it_goes_on_and_jaxs_coordinator_listens_at_its_pod_alone(
    trainers_place: Place,
) -> None:
    here = trainers_place
    folder = preparations.make_claim(here.access, here.namespace)
    gang = here.start("steps", SAVED, hosts=2, train=TRAIN, restarts={"in_place": 0}, **SMALL)
    gang.says("step 20/")
    first = next(pod for pod in gang.pods if pod["metadata"]["labels"][INDEX_LABEL] == "0")
    rank = processes.child(first)
    environ = dict(
        pair.partition("=")[::2] for pair in Path(f"/proc/{rank}/environ").read_text().split("\0")
    )
    port = int(environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2])
    assert processes.listens(rank, port) == [first["status"]["podIP"]]
    done = here.launcher("profile", "steps", "--steps", "3", "-o", "json")
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["ranks"]
    assert {rank: one["state"] for rank, one in answers.items()} == {"0": "done", "1": "done"}
    for one in answers.values():
        kept = folder / Path(one["folder"]).relative_to("/checkpoints")
        assert json.loads((kept / "summary.json").read_text()) == one["summary"]
        assert list(kept.rglob("*.xplane.pb"))
    assert gang.counters == (0, 0)

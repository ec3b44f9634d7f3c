"""k8s/install.yaml on a real cluster: a user with its roles can run every command."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.preparations import make_user

pytestmark = pytest.mark.extended

INSTALL = Path(__file__).parents[2] / "k8s" / "install.yaml"
PROGRAM = "import time; print('running', flush=True); time.sleep(600)"


@pytest.fixture
def user(cluster: Access, namespace: str, tmp_path: Path) -> Iterator[Access]:
    """Make a user of a team as install.yaml describes."""
    cluster.kubectl("apply", "--server-side", "--filename", str(INSTALL))
    kubeconfig = make_user(cluster, namespace, [], tmp_path)
    who = f"--serviceaccount={namespace}:{kubeconfig.stem}"
    cluster.kubectl(
        "create",
        "rolebinding",
        "jaxlaunch",
        "-n",
        namespace,
        "--clusterrole",
        "jaxlaunch-user",
        who,
    )
    reader = f"jaxlaunch-{namespace}"
    cluster.kubectl(
        "create", "clusterrolebinding", reader, "--clusterrole", "jaxlaunch-cluster-reader", who
    )
    yield dataclasses.replace(cluster, kubeconfig=kubeconfig)
    cluster.kubectl("delete", "clusterrolebinding", reader)
    cluster.kubectl("delete", "--filename", str(INSTALL))


@pytest.mark.usefixtures("steady_nodes")
def test_user_of_a_team_can_run_every_command(
    cluster: Access, user: Access, namespace: str, base_image: str, tmp_path: Path
) -> None:
    folder = write_project(
        tmp_path, namespace, {}, image=base_image, command=["python", "-c", PROGRAM]
    )

    def run(*arguments: str, code: int = 0) -> str:
        done = run_launcher(user, folder, *arguments)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    run("submit", "job.yaml", "--dry-run=server")
    assert re.search(
        r"ok +rights +all \d+ RBAC permissions", output := run("doctor", "job.yaml")
    ), output
    run("submit", "job.yaml")
    cluster.kubectl(
        "wait",
        "jobset/mine",
        "-n",
        namespace,
        "--for=jsonpath={.status.replicatedJobsStatus[0].ready}=1",
    )
    for command in ("list", "status mine", "explain mine", "logs mine"):
        run(*command.split())
    run("stop", "mine")
    run("submit", "job.yaml", "--replace")
    run("delete", "mine", "--yes")

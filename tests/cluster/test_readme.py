"""The README's commands for a cluster, as they stand there, by a submitter of the chart and with no other right."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.releases import Release, values
from tests.compiled import QUICK_COMPILES
from tests.helm.charts import Helm

ROOT = Path(__file__).parents[2]


@pytest.fixture
def submitter(helm: Helm, cluster: Access, namespace: str, image: str, tmp_path: Path) -> Iterator[Access]:
    """Who may do what the chart allows, admission policy included; its cluster defaults say what the job leaves out."""
    user, release = f"alice-{namespace}", Release(helm, cluster, namespace)
    storage = {"checkpoints": {"size": "1Gi", "storageClass": ""}}
    people = {"submitters": [{"kind": "User", "name": user}]}
    plain: dict[str, Any] = {"kueue": {"enabled": False}, "resourceDefaults": {}, "storage": storage}
    release.install(values(cluster, image, rbac=people, **plain))
    yield preparations.impersonating(cluster, user, namespace, tmp_path)
    release.uninstall()


@pytest.mark.usefixtures("steady_nodes")
def test_the_readme_s_commands_for_a_cluster_do_what_it_says(
    cluster: Access, namespace: str, submitter: Access, tmp_path: Path
) -> None:
    checkpoints = preparations.make_volume(cluster, namespace, "team-checkpoints")
    block = re.search(r"^```sh cluster\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    path = f"{sys.prefix}/bin{os.pathsep}{submitter.env['PATH']}"
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with (tmp_path / "examples" / "digits.yaml").open("a") as job:
        job.write(yaml.safe_dump({"env": QUICK_COMPILES}))
    done = subprocess.run(
        ["bash", "-c", "set -ex\n" + block[1]],
        cwd=tmp_path,
        env=submitter.env | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"^\[0\] step \d+/\d+  eval .* accuracy 0\.9[7-9]\d*  examples 360$", done.stdout, re.MULTILINE)
    assert "done (0): every process finished" in done.stdout
    assert "digits is done: all of 2 hosts" in done.stdout
    assert "jobset.jobset.x-k8s.io/digits deleted" in done.stdout
    assert list((checkpoints / "digits").iterdir())

"""The README's commands for a cluster, as they stand there, with a profile that says what its job leaves unsaid."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import yaml

from tests.cluster.access import Access

ROOT = Path(__file__).parents[2]


def test_the_readme_s_commands_for_a_cluster_do_what_it_says(
    cluster: Access, namespace: str, checkpoints: Path, image: str, tmp_path: Path
) -> None:
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    for context in config["contexts"]:
        context["context"]["namespace"] = namespace
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    said = {"image": image, "checkpoint": {"claim": "checkpoints"}}
    profile = {"metadata": {"name": "jaxlaunch"}, "data": {"profile.yaml": yaml.safe_dump(said)}}
    cluster.api.create(
        f"/api/v1/namespaces/{namespace}/configmaps", {"apiVersion": "v1", "kind": "ConfigMap"} | profile
    )
    block = re.search(r"^```sh cluster\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    path = f"{sys.prefix}/bin{os.pathsep}{cluster.env['PATH']}"
    done = subprocess.run(
        ["bash", "-c", "set -ex\n" + block[1]],
        cwd=ROOT,
        env=cluster.env | {"KUBECONFIG": str(tmp_path / "config"), "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"^\[0\] step \d+/\d+  eval .* accuracy 0\.9\d+  examples 360$", done.stdout, re.MULTILINE)
    assert "done (0): every process finished" in done.stdout
    assert "digits is done: all of 2 hosts" in done.stdout
    assert "jobset.jobset.x-k8s.io/digits deleted" in done.stdout
    assert list((checkpoints / "digits").iterdir())

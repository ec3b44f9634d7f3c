"""The digits of `make run` in pods at the restricted level, from submit to delete.

They train for fewer epochs than in tests/cluster/test_readme.py, which checks their accuracy.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.access import Access
from tests.compiled import QUICK_COMPILES

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]


def test_smoke_script_trains_the_digits_on_two_pods(
    cluster: Access, namespace: str, checkpoints: Path, image: str
) -> None:
    path = f"{sys.prefix}/bin{os.pathsep}{cluster.env['PATH']}"
    quick = [f"env.{name}={value}" for name, value in QUICK_COMPILES.items()]
    done = subprocess.run(
        [ROOT / "k8s" / "smoke.sh", f"image={image}", "train.epochs=4", *quick],
        env=cluster.env | {"NAMESPACE": namespace, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stderr.rstrip().endswith("smoke: passed")
    assert "attempt 1: 2 processes on 2 hosts" in done.stderr
    assert (evaluated := re.search(r"eval .* accuracy ([\d.]+)  examples 360", done.stdout))
    assert float(evaluated[1]) >= 0.9
    assert re.search(r"^digits +Done ", done.stdout, re.MULTILINE)  # list
    assert "digits: Done (generation 0, attempt 1)" in done.stdout  # status
    assert "jobset.jobset.x-k8s.io/digits deleted" in done.stdout
    assert not cluster.api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets")[
        "items"
    ]
    assert (checkpoints / "digits" / "45").is_dir()
    summary = json.loads((checkpoints / "digits" / ".jaxlaunch" / "summary.json").read_text())
    assert summary["verdict"]["code"] == 0
    assert round(summary["metrics"]["eval_accuracy"], 4) == float(evaluated[1])

"""The image of the Dockerfile in a pod at the restricted level."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.manifests.jobset import AGENT
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project

PROGRAM = """
import importlib.util, json, os, pathlib, shutil, sys
site = pathlib.Path(importlib.util.find_spec("jaxlaunch").origin).parents[1]
ours = [path for package in ("jaxlaunch", "jax") for path in (site / package).rglob("*.py")]
def writes(path):
    try:
        pathlib.Path(path, "probe").touch()
    except OSError:
        return False
    return True
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "first": pathlib.Path("/proc/1/cmdline").read_text().split("\\0"),
    "tools": [name for name in ("gcc", "cc", "make", "git", "pip") if shutil.which(name)],
    "modules": [name for name in ("pip", "setuptools", "wheel") if (site / name).exists()],
    "writable": [path for path in ("/", sys.prefix, str(site), "/tmp") if writes(path)],
    "uncompiled": [
        str(path)
        for path in ours
        if not pathlib.Path(importlib.util.cache_from_source(path)).exists()
    ],
}))
"""


def test_image_runs_the_agent_as_pid_1_of_any_user_and_writes_nothing(
    cluster: Access, namespace: str, image: str, tmp_path: Path
) -> None:
    folder = write_project(
        tmp_path, namespace, {}, image=image, agent="image", command=["python", "-c", PROGRAM]
    )
    done = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert done.returncode == 0, done.stdout + done.stderr
    match = re.search(r"^\[0\] (\{.*\})$", done.stdout, re.MULTILINE)
    assert match is not None, done.stdout
    report: dict[str, Any] = json.loads(match[1])
    assert report["user"] == [1000, 1000]
    assert report["first"][1:4] == AGENT[1:]
    assert (report["tools"], report["modules"], report["uncompiled"]) == ([], [], [])
    assert report["writable"] == ["/tmp"]

"""The `launcher` command as a person runs it, in a folder of their own, against the test's cluster."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from tests.cluster import forked
from tests.cluster.access import Access

PATIENCE_S = 600


COMMAND = (sys.executable, "-m", "jaxlaunch.launcher.cli.main")


def launcher(cluster: Access, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs `launcher ARGUMENTS` to its end."""
    return forked.run(arguments, cwd=folder, env=cluster.env, timeout=PATIENCE_S)


def started(cluster: Access, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Begins `launcher ARGUMENTS`; its messages are in its output."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=cluster.env, stdout=pipe, stderr=both, text=True
    )


def project(folder: Path, namespace: str, files: Mapping[str, str], **job: object) -> Path:
    """A folder with a small job of one CPU host and its files."""
    small = {
        "accelerator": {"type": "cpu"},
        "resources": {"cpu": "50m", "memory": "400Mi"},
        "grace": "10s",
    }
    document = {
        "name": "mine",
        "namespace": namespace,
        **small,
        "command": ["python", "train.py"],
        **job,
    }
    for name, text in {"job.yaml": yaml.safe_dump(document, sort_keys=False), **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder

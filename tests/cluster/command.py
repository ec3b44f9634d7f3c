"""The `launcher` command as a user runs it in a folder against the tests' cluster."""

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


def run_launcher(
    cluster: Access, folder: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Run `launcher ARGUMENTS` to its end."""
    return forked.run_forked(arguments, cwd=folder, env=cluster.env, timeout=PATIENCE_S)


def start_launcher(cluster: Access, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start `launcher ARGUMENTS`, with its messages in its output."""
    pipe, stdout = subprocess.PIPE, subprocess.STDOUT
    return subprocess.Popen(
        [*COMMAND, *arguments], cwd=folder, env=cluster.env, stdout=pipe, stderr=stdout, text=True
    )


def write_project(folder: Path, namespace: str, files: Mapping[str, str], **job: object) -> Path:
    """Write a folder with a small job of one CPU host and its files."""
    defaults = {
        "accelerator": {"type": "cpu"},
        "resources": {"cpu": "50m", "memory": "400Mi"},
        "grace": "10s",
    }
    document = {
        "name": "mine",
        "namespace": namespace,
        **defaults,
        "command": ["python", "train.py"],
        **job,
    }
    for name, text in {"job.yaml": yaml.safe_dump(document, sort_keys=False), **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder

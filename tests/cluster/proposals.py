"""Run what `explain` proposes on a real cluster, as printed, and without a lasting effect."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from jaxlaunch.launcher.diagnose.explain.explanation import Explanation
from tests.cluster.access import Access
from tests.cluster.command import run_launcher
from tests.launcher.commands import parse_command

# Commands that change something run as a dry run on the server.
_DRY_RUN = ("create", "delete", "uncordon")


def check_proposals(access: Access, explanation: Explanation, folder: Path) -> None:
    """Run each command of an explanation; `folder` has the file of the job."""
    for words in explanation.commands:
        parse_command(words)
        run = _run_kubectl if words[0] == "kubectl" else _run_launcher
        fault = run(access, words, folder, explanation)
        assert not fault, f"{explanation.headline}: {' '.join(words)}: {fault}"


def _run_kubectl(
    access: Access, words: Sequence[str], folder: Path, explanation: Explanation
) -> str:
    is_dry_run = any(word in _DRY_RUN for word in words)
    options = ["--dry-run=server"] if is_dry_run else []
    command = [str(access.kubectl_path), *words[1:], *options]
    done = subprocess.run(command, capture_output=True, text=True, env=access.env, cwd=folder)
    # The object of a command that creates something may exist in the meantime.
    return "" if done.returncode == 0 or "AlreadyExists" in done.stderr else done.stderr


def _run_launcher(
    access: Access, words: Sequence[str], folder: Path, explanation: Explanation
) -> str:
    match words[1]:
        case "delete" | "stop":
            command = ["status", *(word for word in words[2:] if word != "--yes")]
        case "submit":
            command = [*words[1:], "--dry-run=server"]
        case "prepare":
            # It would tokenize the data.
            command = ["validate", *words[2:]]
        case _:
            command = list(words[1:])
    done = run_launcher(access, folder, *command)
    said = done.stdout + done.stderr
    if words[1] == "doctor":
        # It may find the very fault.
        return "" if done.returncode in (0, 2, 3) and "server" in done.stdout else said
    if words[1] == "logs" and "there is no earlier attempt" in said:
        return said
    return "" if done.returncode == 0 and said else f"exit {done.returncode}: {said}"

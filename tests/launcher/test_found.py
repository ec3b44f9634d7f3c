"""Errors made for real are found in docs/troubleshooting.md from their message alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.errors import UserError
from launcher.job import load
from tests.launcher.test_troubleshooting import ROWS
from trainer import contract

ROOT = Path(__file__).parents[2]


def phrases(row: list[str]) -> list[str]:
    return re.findall(r"`([^`]+)`", row[0])


def pattern(phrase: str) -> str:
    """The phrase with any numbers in the place of its own but of an exit code, and anything for `…`."""
    if phrase.startswith("exit "):
        return rf"{phrase}(?!\d)"
    parts = (re.sub(r"\d+", r"\\d+", re.escape(part)) for part in phrase.split("…"))
    return ".*?".join(parts)


def entry(message: str) -> str:
    """The words on the screen of the entry whose longest phrase is in the message; "" where none is."""
    found = [
        (len(phrase), row[0])
        for row in ROWS
        for phrase in phrases(row)
        if re.search(rf"(?<!\w){pattern(phrase)}", message, re.DOTALL)
    ]
    return max(found, default=(0, ""))[1]


OF_JAX = {
    "module": "ModuleNotFoundError: No module named",
    "memory of the host": "MemoryError",
    "backend": "Unknown backend: 'gpu' requested",
    "memory of a device": "RESOURCE_EXHAUSTED: Out of memory",
    "contraction": "dot_general requires contracting dimensions",
    "broadcast": "got incompatible shapes for broadcasting",
    "split": "implies that array axis 0 is partitioned",
    "mesh": "must equal the product of mesh_shape",
    "devices": "Received incompatible devices for jitted computation",
    "axis": "Resource axis",
    "leak": "UnexpectedTracerError",
    "bool": "TracerBoolConversionError",
    "concrete": "ConcretizationTypeError",
    "deleted": "Array has been deleted",
    "late": "must be called before any JAX calls",
    "tree": "metadata tree structures do not match",
    "absent": "Requested directory for restore does not exist",
}


@pytest.fixture(scope="module")
def made() -> dict[str, str]:
    program = [sys.executable, str(ROOT / "tests/trainer/make_errors.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", OF_JAX)
def test_an_error_of_a_program_is_found(name: str, made: dict[str, str]) -> None:
    assert OF_JAX[name] in entry(made[name]), made[name]


@pytest.mark.parametrize("number", ["SIGABRT", "SIGBUS", "SIGKILL", "SIGSEGV", "SIGTERM"])
def test_what_a_signal_leaves_is_found(number: str) -> None:
    kill = f"import os; os.kill(os.getpid(), {getattr(signal, number).value})"
    done = subprocess.run([sys.executable, "-X", "faulthandler", "-c", kill], capture_output=True, text=True)
    message = f"{done.stderr}exit {128 - done.returncode}"
    assert f"`{number}`" in entry(message), message


def test_an_error_of_a_job_is_found() -> None:
    with pytest.raises(UserError) as raised:
        load.parse("name: a\naccelerator: {type: cpu, per_host: 8}\ntrain: {task: 'a:B', batch: 100}\n")
    assert "does not divide by" in entry(str(raised.value)), str(raised.value)


@pytest.mark.parametrize("code", [code for code in contract.OUTCOMES if code != contract.DONE])
def test_the_last_line_of_a_run_is_found(code: int) -> None:
    said = f"launcher: failed at step 40: rank 1 said something new (exit {code}); see runs/lm/summary.json"
    assert f"`exit {code}`" in entry(said)


def test_an_unknown_message_is_not_found() -> None:
    assert entry("all went well") == ""

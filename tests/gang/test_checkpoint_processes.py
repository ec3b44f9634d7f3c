"""Checkpoints of several processes: saved by two, damaged, then restored by four and by one."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from jaxlaunch.trainer.checkpoint import manifest
from tests.compiled import QUICK_COMPILES
from tests.gang.runs import PATIENCE_S

pytestmark = pytest.mark.computes

SCRIPT = Path(__file__).parent / "checkpoint_rank.py"


def run_ranks(count: int, folder: Path, uid: str, *steps: int) -> list[dict[str, Any]]:
    """Run checkpoint_rank.py in `count` processes; return what each rank printed."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, SCRIPT, *map(str, (port, count, rank, folder, uid, *steps))],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **QUICK_COMPILES, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for rank in range(count)
    ]
    try:
        lines = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0] * count, lines
    return [json.loads(line.splitlines()[-1]) for line in lines]


def test_state_of_two_processes_is_restored_by_four_and_by_one(tmp_path):
    for answer in run_ranks(2, tmp_path, "run-a", 10, 20):
        assert answer == {"notes": [], "restored": None, "steps": [10, 20]}
    saved_manifest = manifest.read_manifest(epath.Path(tmp_path) / "20")
    assert {f"state/ocdbt.process_{n}/manifest.ocdbt" for n in (0, 1)} <= set(saved_manifest.files)
    assert manifest.list_files(epath.Path(tmp_path) / "20") == sorted(saved_manifest.files)
    (tmp_path / "20" / "state" / "ocdbt.process_1" / "manifest.ocdbt").unlink()
    (tmp_path / "10" / manifest.MANIFEST_FILE).unlink()

    first, *other_ranks = run_ranks(4, tmp_path, "run-b", 20)
    assert first["restored"] == [10, {"at": 10}] and first["steps"] == [10, 20]
    assert len(first["notes"]) == 2 and "step 10 has no manifest" in first["notes"][0]
    assert "ocdbt.process_1/manifest.ocdbt is missing; using step 10" in first["notes"][1]
    for answer in other_ranks:
        assert answer == {**first, "notes": []}, "only process 0 speaks"

    assert run_ranks(1, tmp_path, "run-c") == [
        {"notes": [], "restored": [20, {"at": 20}], "steps": [10, 20]}
    ]

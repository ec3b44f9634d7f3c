"""What the verdict says when a rank of the trainer fails."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from jaxlaunch.launcher.cli.status import status_command
from tests.found import shows
from tests.gang.run_files import read_json_lines
from tests.gang.runs import Running, digits_block, fault_env, make_job, run_job, wait_until_gone

NO_RESTARTS = {"crash": 0, "in_place": 0}
SLACK = 3  # times an issue's bounds: the machine may be slow


def faulty_train(**keys: Any) -> dict[str, Any]:
    return digits_block(task="faulty:Faulty", steps=200, **keys)


def faulty_job(**keys: Any) -> dict[str, Any]:
    return make_job(faulty_train(), hosts=2, **({"restarts": NO_RESTARTS} | keys))


def test_rank_that_raises_is_named_with_its_step_and_exception(tmp_path: Path) -> None:
    with Running(
        tmp_path, faulty_job(), env=fault_env(tmp_path / "marks", "raise", "step", rank=1, step=21)
    ) as running:
        running.wait_for_file(tmp_path / "marks" / "raise-1")
        raised, pids = time.monotonic(), list(running.rank_pids().values())
        wait_until_gone(pids)
        gone_s = time.monotonic() - raised
        result = running.wait()
    assert gone_s <= 3 * SLACK
    assert result.code == 83
    verdict = result.verdict
    assert (verdict["cause"], verdict["rank"], verdict["step"]) == ("crash", 1, 20)
    assert "ValueError" in verdict["message"] and "a bad batch" in verdict["message"]
    assert "faulty.py" in verdict["traceback"]
    assert (result.stdout + result.stderr).count("Traceback (most recent call last)") == 1


def test_lost_agent_is_named(tmp_path: Path) -> None:
    with Running(
        tmp_path, make_job(faulty_train() | {"steps": 100_000}, hosts=2, restarts=NO_RESTARTS)
    ) as running:
        running.wait_for_step(5)
        pids = running.pids()[1:]
        os.kill(running.agent_pids()[1], signal.SIGKILL)
        killed = time.monotonic()
        wait_until_gone(pids)
        assert time.monotonic() - killed <= 12 * SLACK
        result = running.wait()
    assert result.code == 81
    assert "host 1" in result.verdict["message"]
    shows("host 3 (ranks 24 to 31) was lost:", result.verdict["message"])


def test_hang_is_reported_with_the_stack_of_every_rank(tmp_path: Path) -> None:
    slow = faulty_job(timeouts={"step": "15s"})
    result = run_job(
        tmp_path, slow, env=fault_env(tmp_path / "marks", "hang", "step", rank=1, step=21)
    )
    assert result.code == 82
    assert result.verdict["rank"] == 1
    shows("the step timeout of", result.verdict["message"])
    stacks = json.dumps(result.summary)
    assert "fail" in stacks and "faulty.py" in stacks and "train.py" in stacks


def test_rank_that_crashes_once_is_restarted_in_place(tmp_path: Path) -> None:
    keys = {"checkpoint": {"every": 10}, "steps": 40}
    document = make_job(faulty_train() | keys, hosts=2, restarts={"in_place": 1})
    with Running(
        tmp_path, document, env=fault_env(tmp_path / "marks", "exit", "step", rank=1, step=21)
    ) as running:
        running.wait_for_file(tmp_path / "marks" / "exit-1")
        agents = running.agent_pids()
        result = running.wait()
    assert result.code == 0, result.stderr[-3000:]
    assert result.summary["restarts"] and sorted(result.losses) == list(range(1, 41))
    first, *restarts = rows = result.summary["restart_seconds"]
    assert [row["attempt"] for row in rows] == list(range(1, len(rows) + 1))
    assert first["after"] is None
    assert {"start", "import", "rendezvous", "first_step"} <= first["seconds"].keys()
    parts = {"detect", "decide", "end", "start", "rendezvous", "first_step"}
    assert all(row["after"] and parts <= row["seconds"].keys() for row in restarts), rows
    records = read_json_lines(result.folder / "attempts.jsonl")
    assert [record["restart"] for record in records] == [row["seconds"] for row in rows]
    shown = CliRunner().invoke(status_command, [str(result.folder), "-o", "wide"]).output
    assert " s until its first step: " in shown and "RENDEZVOUS" in shown, shown
    assert len(agents) == 2

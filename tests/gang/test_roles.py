"""A job with roles on this machine: what ends one role, and what ends all."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.client.job_view import RunView
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.local import run_folders
from tests.gang.run_files import read_json_lines
from tests.gang.runs import Running, living_pids, run_launcher

EXAMPLES = Path(__file__).parents[2] / "examples"

# Writes its pid into ROLE-RANK-ATTEMPT, and ends once there is a file with the name of its role,
# with the code in it.
PROGRAM = """
import os, sys, time
role = os.environ["JAXLAUNCH_ROLE"]
name = "-".join([role, os.environ["JAX_PROCESS_ID"], os.environ["JAXLAUNCH_ATTEMPT"]])
with open(name + ".draft", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".draft", name)
print("up at", os.environ["JAXLAUNCH_ROLE_TRAINER_ADDRESSES"], flush=True)
while not os.path.exists(role):
    time.sleep(0.02)
with open(role) as file:
    sys.exit(int(file.read()))
"""
DOCUMENT: dict[str, Any] = {
    "name": "t",
    "accelerator": {"type": "cpu", "per_host": 1},
    "workdir": ".",
    "command": ["python", "program.py"],
    "jobs": {
        "trainer": {"ends": True, "hosts": 2, "needs": {"sampler": "started"}},
        "sampler": {},
        "evaluator": {"may_fail": True, "restarts": {"crash": 0, "in_place": 0}},
    },
}


class Roles(Running):
    """A running job whose roles run PROGRAM in `home`."""

    def __init__(self, home: Path, document: Mapping[str, Any] = DOCUMENT) -> None:
        self.home = home
        (home / "program.py").write_text(PROGRAM)
        super().__init__(home, document)

    def __enter__(self) -> Roles:
        return self

    def wait_for_rank(self, name: str) -> int:
        """Return the pid of a rank once it runs, given as ROLE-RANK-ATTEMPT."""
        self.wait_for_file(self.home / name)
        return int((self.home / name).read_text())

    def end_role(self, role: str, code: int) -> None:
        """Make the ranks of a role end with a code."""
        draft = self.home / f"{role}.draft"
        draft.write_text(str(code))
        draft.rename(self.home / role)

    def names(self) -> set[str]:
        """Return the ranks that have run, as ROLE-RANK-ATTEMPT."""
        return {path.name for path in self.home.glob("*-[0-9]-[0-9]")}

    def read_states(self) -> dict[str, State]:
        """Return the state of each role, as `launcher status` shows it."""
        status = RunView(run_folders.open_run(self.folder)).status
        return {name: role.state for name, role in status.roles.items()}


def test_each_role_restarts_alone_and_the_end_of_the_lead_ends_all(tmp_path: Path) -> None:
    with Roles(tmp_path) as running:
        first = {"trainer-0-1", "trainer-1-1", "sampler-0-1", "evaluator-0-1"}
        pids = {name: running.wait_for_rank(name) for name in first}
        os.kill(pids["sampler-0-1"], signal.SIGKILL)
        pids["sampler-0-2"] = running.wait_for_rank("sampler-0-2")
        os.kill(pids["trainer-1-1"], signal.SIGKILL)
        for name in ("trainer-0-2", "trainer-1-2"):
            pids[name] = running.wait_for_rank(name)
        running.end_role("evaluator", 3)
        states = {
            "trainer": State.RUNNING,
            "sampler": State.RUNNING,
            "evaluator": State.FAILED,
        }
        running.wait_until("the evaluator's end", lambda: running.read_states() == states)
        running.end_role("trainer", 0)
        result = running.wait()
        names = running.names()
    assert names == first | {"sampler-0-2", "trainer-0-2", "trainer-1-2"}
    assert result.code == contract.DONE, result.stderr
    assert not living_pids(list(pids.values()))
    assert "[trainer 1] up at 127.0.0.1,127.0.0.1\n" in result.stdout
    assert "launcher: evaluator: failed: rank 0's program ended with exit code 3" in result.stderr
    assert "launcher: done, by role trainer: every process finished" in result.stderr
    view = RunView(run_folders.open_run(result.folder))
    codes = {name: json.loads(_read(result.folder, name))["verdict"]["code"] for name in states}
    assert codes == {"trainer": 0, "sampler": contract.PREEMPTED, "evaluator": contract.CRASH}
    status = view.status
    assert (status.role, status.state, status.hosts) == ("trainer", State.DONE, 4)
    assert status.restart_counts.total == 2
    facts = view.explanation.facts
    assert any(fact.startswith("role evaluator failed") for fact in facts)


def _read(folder: Path, role: str) -> str:
    return (folder / role / "summary.json").read_text()


def test_interrupt_ends_all_roles_and_a_failure_ends_the_next_start(tmp_path: Path) -> None:
    ranks = ("trainer-0-1", "trainer-1-1", "sampler-0-1", "evaluator-0-1")
    with Roles(tmp_path) as running:
        pids = [running.wait_for_rank(name) for name in ranks]
        running.signal(signal.SIGINT)
        result = running.wait()
    assert result.code == contract.PREEMPTED and not living_pids(pids)
    assert result.verdict["cause"] == contract.INTERRUPTED
    assert "launcher: interrupted, by role trainer: " in result.stderr
    assert result.stderr.count("saving and stopping; a second signal kills") == 1
    for name in ranks:
        (tmp_path / name).unlink()
    jobs = DOCUMENT["jobs"] | {"sampler": {"restarts": {"crash": 0, "in_place": 0}}}
    with Roles(tmp_path, DOCUMENT | {"jobs": jobs}) as running:
        for name in ranks:
            running.wait_for_rank(name)
        running.end_role("sampler", 3)
        result = running.wait()
    assert result.code == contract.CRASH and not (tmp_path / "trainer").exists()
    assert "launcher: failed, by role sampler: rank 0's program ended" in result.stderr
    status = RunView(run_folders.open_run(result.folder)).status
    assert (status.role, status.state) == ("sampler", State.FAILED)
    assert [start["code"] for start in result.summary["starts"]] == [80, contract.CRASH]


@pytest.mark.computes
@pytest.mark.extended
def test_reward_rises_with_a_sampler_that_reloads_the_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = run_launcher("run", EXAMPLES / "grpo.yaml", "--run-dir", run)
    assert result.returncode == contract.DONE, result.stderr[-3000:]
    rows = read_json_lines(run / "trainer" / "metrics.jsonl")
    rewards = [row["reward"] for row in rows if "reward" in row]
    # A guess is right half of the time.
    assert rewards[0] < 0.65 and rewards[-1] > 0.9


@pytest.mark.computes
@pytest.mark.extended
def test_evaluator_follows_the_checkpoints_to_the_last(tmp_path: Path) -> None:
    run = tmp_path / "run"
    waits = ("jobs.evaluator.may_fail=false", "jobs.evaluator.ends=true")
    result = run_launcher("run", EXAMPLES / "follow.yaml", *waits, "--run-dir", run)
    assert result.returncode == contract.DONE, result.stderr[-3000:]
    assert "[evaluator 0] step 200: accuracy 0.9" in result.stdout
    status = RunView(run_folders.open_run(run)).status
    assert status.roles["evaluator"].step == 200

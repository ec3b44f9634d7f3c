"""Whom `launcher profile` asks, and what it makes of the answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

import pytest
from click.testing import CliRunner

from jaxlaunch.launcher.cli import profile
from jaxlaunch.launcher.cli.profile import Agent, AgentUnreachableError, Answer, profile_command
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import run_folders

DONE = {
    "state": "done",
    "folder": "there",
    "summary": {"first_step": 4, "steps": 5, "devices": 1, "device": "cpu"},
}


def agent(number: int, posted: Answer | int, *looks: Answer | None) -> Agent:
    """One of rank `number`, which answers with these states in turn, and is gone at None."""
    left = iter(looks)

    def request(method: str, target: str) -> tuple[int, Answer]:
        if method == "POST":
            asked.append((number, target))
            return (
                (202, {"id": 1, "ranks": {str(number): posted}})
                if not isinstance(posted, int)
                else (posted, {"error": "no"})
            )
        found = next(left)
        if found is None:
            raise AgentUnreachableError("it left")
        return 200, {"id": found.get("id", 1), "ranks": {str(number): found}}

    return Agent(f"host {number}", request)


asked: list[tuple[int, str]] = []


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.0)
    asked.clear()


def states(agents: Iterable[Agent], said: list[str]) -> dict[int, str]:
    answers = profile.profile_agents(list(agents), 3, said.append)
    return {rank: one["state"] for rank, one in answers.items()}


def test_every_host_is_asked_and_waited_for() -> None:
    said: list[str] = []
    tracing = {"state": "tracing", "step": 7, "steps": 3}
    one = agent(1, {"state": "asked"}, {"state": "asked"}, tracing, tracing, DONE)
    assert states([agent(0, {"state": "asked"}, DONE), one], said) == {0: "done", 1: "done"}
    assert asked == [(0, "/profile?steps=3"), (1, "/profile?steps=3")]
    assert said == ["rank 1 traces 3 steps from step 7"]


def test_of_a_large_gang_host_0_alone_is_asked() -> None:
    said: list[str] = []
    gang = [agent(number, {"state": "asked"}, DONE) for number in range(profile.MAX_HOSTS + 1)]
    assert states(gang, said) == {0: "done"}
    assert said == ["only host 0 of 9 hosts is profiled"]


def test_the_first_host_s_refusal_is_everyone_s_and_a_later_one_is_said() -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="host 0 refused the profile: no"):
        states([agent(0, 409), agent(1, {"state": "asked"}, DONE)], said)
    assert asked == [(0, "/profile?steps=3")]
    assert states([agent(0, {"state": "asked"}, DONE), agent(1, 409)], said) == {0: "done"}
    assert said == ["host 1 refused the profile: no."]


def test_another_s_profile_is_not_taken_for_the_one_that_was_asked_for() -> None:
    assert states([agent(0, {"state": "asked"}, DONE | {"id": 2})], []) == {0: "gone"}


def test_what_an_agent_that_left_had_not_said_is_gone() -> None:
    assert states([agent(0, {"state": "asked"}, None), agent(1, {"state": "asked"}, DONE)], []) == {
        0: "gone",
        1: "done",
    }


def test_a_folder_of_a_job_on_a_cluster_is_not_running_here(tmp_path: Path) -> None:
    (tmp_path / "agents.json").write_text(
        json.dumps([{"host": 0, "address": "10.0.0.7:9400", "pid": os.getpid(), "ranks": [0]}])
    )
    with pytest.raises(UserError, match="is not running"):
        profile.local_agents(tmp_path)


def test_a_run_is_found_by_its_folder_or_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "lm"
    folder.mkdir(parents=True)
    assert run_folders.find_run("lm") is None
    (folder / ".lock").touch()
    assert run_folders.find_run("lm") == run_folders.find_run("runs/lm") == folder


def test_the_command_prints_the_first_rank_s_table_and_what_became_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = DONE | {"table": ["  matmul …"], "summary": DONE["summary"] | {"step_s": 0.25}}
    failed = {"state": "failed", "fault": "a full disk"}
    answers = {0: failed, 1: done, 2: done, 3: {"state": "gone"}}
    monkeypatch.setattr(run_folders, "find_run", lambda run: tmp_path)
    monkeypatch.setattr(profile, "local_agents", lambda folder: [])
    monkeypatch.setattr(profile, "profile_agents", lambda agents, steps, say: answers)
    found = CliRunner().invoke(profile_command, ["lm"])
    assert found.output.splitlines() == [
        "steps 4-8 on 1 devices of rank 1 (cpu)",
        "  matmul …",
        "rank 1: 250.000 ms a step, in there",
        "rank 2: 250.000 ms a step, in there",
        "rank 0: a full disk",
        "rank 3: its process ended first",
    ]
    answers = {0: failed}
    found = CliRunner().invoke(profile_command, ["lm"])
    assert isinstance(found.exception, UserError)
    assert str(found.exception) == "No rank was profiled.\nrank 0: a full disk"

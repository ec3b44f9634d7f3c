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


def make_agent(number: int, posted: Answer | int, *looks: Answer | None) -> Agent:
    """One of rank `number`, which answers with these states in turn, and is gone at None."""
    left = iter(looks)

    def request(method: str, target: str) -> tuple[int, Answer]:
        if method == "POST":
            asked.append((number, target))
            if not isinstance(posted, int):
                return (202, {"id": 1, "ranks": {str(number): posted}})
            return (posted, {"error": "no"})
        result = next(left)
        if result is None:
            raise AgentUnreachableError("it left")
        return 200, {"id": result.get("id", 1), "ranks": {str(number): result}}

    return Agent(f"host {number}", request)


asked: list[tuple[int, str]] = []


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "_POLL_S", 0.0)
    asked.clear()


def profile_states(agents: Iterable[Agent], messages: list[str]) -> dict[int, str]:
    answers = profile.profile_agents(list(agents), 3, messages.append)
    return {rank: item["state"] for rank, item in answers.items()}


def test_profile_is_requested_from_every_host() -> None:
    messages: list[str] = []
    tracing = {"state": "tracing", "step": 7, "steps": 3}
    first = make_agent(1, {"state": "asked"}, {"state": "asked"}, tracing, tracing, DONE)
    assert profile_states([make_agent(0, {"state": "asked"}, DONE), first], messages) == {
        0: "done",
        1: "done",
    }
    assert asked == [(0, "/profile?steps=3"), (1, "/profile?steps=3")]
    assert messages == ["rank 1 traces 3 steps from step 7"]


def test_profile_of_a_large_gang_is_requested_from_host_0() -> None:
    messages: list[str] = []
    gang = [make_agent(number, {"state": "asked"}, DONE) for number in range(profile.MAX_HOSTS + 1)]
    assert profile_states(gang, messages) == {0: "done"}
    assert messages == ["only host 0 of 9 hosts is profiled"]


def test_refusal_of_the_first_host_ends_the_request() -> None:
    messages: list[str] = []
    with pytest.raises(UserError, match="host 0 refused the profile: no"):
        profile_states([make_agent(0, 409), make_agent(1, {"state": "asked"}, DONE)], messages)
    assert asked == [(0, "/profile?steps=3")]
    assert profile_states(
        [make_agent(0, {"state": "asked"}, DONE), make_agent(1, 409)], messages
    ) == {0: "done"}
    assert messages == ["host 1 refused the profile: no."]


def test_profile_with_another_id_is_ignored() -> None:
    assert profile_states([make_agent(0, {"state": "asked"}, DONE | {"id": 2})], []) == {0: "gone"}


def test_ranks_of_a_lost_agent_are_gone() -> None:
    assert profile_states(
        [make_agent(0, {"state": "asked"}, None), make_agent(1, {"state": "asked"}, DONE)], []
    ) == {0: "gone", 1: "done"}


def test_run_folder_of_a_cluster_job_is_not_running_here(tmp_path: Path) -> None:
    (tmp_path / "agents.json").write_text(
        json.dumps([{"host": 0, "address": "10.0.0.7:9400", "pid": os.getpid(), "ranks": [0]}])
    )
    with pytest.raises(UserError, match="is not running"):
        profile.local_agents(tmp_path)


def test_run_is_found_by_folder_or_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "lm"
    folder.mkdir(parents=True)
    assert run_folders.find_run("lm") is None
    (folder / ".lock").touch()
    assert run_folders.find_run("lm") == run_folders.find_run("runs/lm") == folder


def test_profile_command_prints_table_and_states(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = DONE | {"table": ["  matmul …"], "summary": DONE["summary"] | {"step_s": 0.25}}
    failed = {"state": "failed", "fault": "a full disk"}
    answers = {0: failed, 1: done, 2: done, 3: {"state": "gone"}}
    monkeypatch.setattr(run_folders, "find_run", lambda run: tmp_path)
    monkeypatch.setattr(profile, "local_agents", lambda folder: [])
    monkeypatch.setattr(profile, "profile_agents", lambda agents, steps, say: answers)
    result = CliRunner().invoke(profile_command, ["lm"])
    assert result.output.splitlines() == [
        "steps 4-8 on 1 devices of rank 1 (cpu)",
        "  matmul …",
        "rank 1: 250.000 ms a step, in there",
        "rank 2: 250.000 ms a step, in there",
        "rank 0: a full disk",
        "rank 3: its process ended first",
    ]
    answers = {0: failed}
    result = CliRunner().invoke(profile_command, ["lm"])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == "No rank was profiled.\nrank 0: a full disk"

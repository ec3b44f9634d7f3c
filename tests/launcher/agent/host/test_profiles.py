"""Requests for a profile, and the answers of the processes."""

from __future__ import annotations

import json
from http import HTTPStatus
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxlaunch.launcher.agent.host.rank_reports import Profiles


def child(folder: Path, rank: int) -> Any:
    status = SimpleNamespace(exit=None, trainer=False)
    return SimpleNamespace(
        rank=rank, profile_path=str(folder / f"{rank}"), progress=SimpleNamespace(status=status)
    )


def states(profiles: Profiles) -> dict[str, str]:
    return {rank: one["state"] for rank, one in profiles.reply("GET", "", True)[1]["ranks"].items()}


def test_every_process_gets_a_request_file_and_its_answer_is_kept(tmp_path: Path) -> None:
    children = [child(tmp_path, rank) for rank in (2, 3)]
    profiles = Profiles(True, lambda: children)
    assert states(profiles) == {}
    status, found = profiles.reply("POST", "steps=7", True)
    assert (status, found["id"]) == (HTTPStatus.ACCEPTED, 1)
    assert [json.loads((tmp_path / name).read_text()) for name in ("2", "3")] == [
        {"id": 1, "steps": 7}
    ] * 2
    profiles.update(children[0], {"id": 1, "state": "tracing", "step": 40})
    profiles.update(children[1], {"id": 0, "state": "done"})  # of an older one
    assert states(profiles) == {"2": "tracing", "3": "asked"}
    profiles.update(children[0], {"id": 1, "state": "done", "folder": "there"})
    children[1].progress.status.exit = 1
    assert states(profiles) == {"2": "done", "3": "gone"}
    assert profiles.reply("GET", "", True)[1]["ranks"]["2"] == {"state": "done", "folder": "there"}


def test_one_profile_is_taken_at_a_time(tmp_path: Path) -> None:
    one = child(tmp_path, 0)
    profiles = Profiles(True, lambda: [one])
    profiles.reply("POST", "", True)
    status, found = profiles.reply("POST", "", True)
    assert (status, found["error"]) == (
        HTTPStatus.CONFLICT,
        "a profile is already being taken, on rank 0",
    )
    profiles.update(one, {"id": 1, "state": "failed", "fault": "a full disk"})
    assert profiles.reply("POST", "", True)[1]["id"] == 2
    assert states(profiles) == {"0": "asked"}


@pytest.mark.parametrize(
    ("method", "query", "is_local", "status", "words"),
    [
        ("POST", "", False, 403, "loopback only"),
        ("GET", "", False, 403, "loopback only"),
        ("DELETE", "", True, 405, "use POST to request a profile"),
        ("POST", "steps=0", True, 400, "steps = 0 is not a number from 1 to 100"),
        ("POST", "steps=1e9", True, 400, "steps = 1e9 is not"),
        ("POST", "", True, 409, "no process is running"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(
    method: str, query: str, is_local: bool, status: int, words: str
) -> None:
    refused, found = Profiles(True, list).reply(method, query, is_local)
    assert refused == status
    assert words in found["error"]


def test_a_request_that_cannot_be_written_is_an_answer(tmp_path: Path) -> None:
    refused, found = Profiles(True, lambda: [child(tmp_path / "gone", 0)]).reply("POST", "", True)
    assert refused == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "No such file" in found["error"]


def test_a_program_is_profiled_where_it_trains_as_the_trainer_does(tmp_path: Path) -> None:
    one = child(tmp_path, 0)
    profiles = Profiles(False, lambda: [one])
    refused, found = profiles.reply("POST", "", True)
    assert refused == HTTPStatus.CONFLICT
    assert (
        "only the built-in trainer can be profiled, and programs that train by jaxlaunch.run"
        in found["error"]
    )
    one.progress.status.trainer = True
    assert profiles.reply("POST", "", True)[0] == HTTPStatus.ACCEPTED

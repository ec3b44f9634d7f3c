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
    ranks = profiles.reply("GET", "", True)[1]["ranks"]
    return {rank: answer["state"] for rank, answer in ranks.items()}


def test_profile_request_reaches_every_process(tmp_path: Path) -> None:
    children = [child(tmp_path, rank) for rank in (2, 3)]
    profiles = Profiles(True, lambda: children)
    assert states(profiles) == {}
    status, result = profiles.reply("POST", "steps=7", True)
    assert (status, result["id"]) == (HTTPStatus.ACCEPTED, 1)
    for name in ("2", "3"):
        assert json.loads((tmp_path / name).read_text()) == {"id": 1, "steps": 7}
    profiles.update(children[0], {"id": 1, "state": "tracing", "step": 40})
    profiles.update(children[1], {"id": 0, "state": "done"})  # of an older one
    assert states(profiles) == {"2": "tracing", "3": "asked"}
    profiles.update(children[0], {"id": 1, "state": "done", "folder": "there"})
    children[1].progress.status.exit = 1
    assert states(profiles) == {"2": "done", "3": "gone"}
    assert profiles.reply("GET", "", True)[1]["ranks"]["2"] == {"state": "done", "folder": "there"}


def test_second_profile_request_is_refused(tmp_path: Path) -> None:
    first = child(tmp_path, 0)
    profiles = Profiles(True, lambda: [first])
    profiles.reply("POST", "", True)
    status, result = profiles.reply("POST", "", True)
    assert status == HTTPStatus.CONFLICT
    assert result["error"] == "a profile is already being taken, on rank 0"
    profiles.update(first, {"id": 1, "state": "failed", "fault": "a full disk"})
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
def test_impossible_profile_request_is_refused(
    method: str, query: str, is_local: bool, status: int, words: str
) -> None:
    refused, result = Profiles(True, list).reply(method, query, is_local)
    assert refused == status
    assert words in result["error"]


def test_unwritable_profile_request_is_reported(tmp_path: Path) -> None:
    refused, result = Profiles(True, lambda: [child(tmp_path / "gone", 0)]).reply("POST", "", True)
    assert refused == HTTPStatus.INTERNAL_SERVER_ERROR
    assert "No such file" in result["error"]


def test_command_that_trains_can_be_profiled(tmp_path: Path) -> None:
    first = child(tmp_path, 0)
    profiles = Profiles(False, lambda: [first])
    refused, result = profiles.reply("POST", "", True)
    assert refused == HTTPStatus.CONFLICT
    assert (
        "only the built-in trainer can be profiled, and programs that train by jaxlaunch.run"
        in result["error"]
    )
    first.progress.status.trainer = True
    assert profiles.reply("POST", "", True)[0] == HTTPStatus.ACCEPTED

"""What a program writes on the progress pipe, whatever it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang import progress
from jaxlaunch.launcher.agent.gang.progress import RankProgress, Status
from jaxlaunch.launcher.agent.gang.root_cause import (
    Event,
    EventKind,
    find_root_cause,
    verdict_for_event,
)
from jaxlaunch.records import codec

VALUES: list[Any] = [
    None,
    True,
    0,
    -1,
    2**70,
    1.5,
    "boom",
    "\udce9",
    [],
    ["x"],
    {},
    {"step": "x"},
    {"type": [{}]},
]
KEYS = [
    *(
        "hello",
        "python",
        "jax",
        "pid",
        "phase",
        "step",
        "committed",
        "metrics",
        "stopped",
        "profile",
        "note",
        "error",
    ),
    *("atexit", "waits", progress.UNSTARTABLE),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_of_any_form_reaches_a_verdict_or_a_note(key: str, value: Any) -> None:
    for line in ({key: value}, {"phase": "step", "step": 3, key: value}):
        message = progress.read_line(json.dumps(line).encode(), 4)
        process = RankProgress(0.0)
        process.take_message(message, 1.0)
        assert Status.from_wire(json.loads(json.dumps(process.status.to_wire()))) == process.status
        assert key in message or "rank 4 wrote `" in message["note"]
        assert isinstance(message.get("note", ""), str)
        if "error" in message:
            found = find_root_cause(
                [Event(EventKind.ERROR, 0, 4, process.status, error=message["error"])]
            )
            assert found is not None and verdict_for_event(found[0]).message.startswith(
                "rank 4 raised"
            )
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "line", [b"boom", b"[1]", b'"boom"', b"null", b"3", b"[" * 60_000, b"\x00\xff"]
)
def test_a_line_that_is_no_object_becomes_a_note(line: bytes) -> None:
    message = progress.read_line(line, 4)
    assert list(message) == ["note"] and message["note"].startswith("rank 4 wrote ")


def test_a_wrong_value_is_shown_with_what_it_must_be() -> None:
    note = progress.read_line(b'{"error": "boom"}', 1)["note"]
    assert note == "rank 1 wrote `error`: 'boom' to the progress pipe; it must be an object"


def test_what_the_contract_writes_is_read_as_it_is() -> None:
    try:
        raise FileNotFoundError(2, "No such file", "caf\udce9")
    except FileNotFoundError as error:
        line = contract.error_line(error, 65)
    found = progress.read_line(json.dumps(line).encode(), 0)["error"]
    assert found["message"] == "[Errno 2] No such file: 'caf\\udce9'" and found["code"] == 65
    assert "test_reports.py" in found["traceback"]
    for said in (
        {"stopped": {"step": 37, "saved": True, "note": "n"}},
        {"hello": "site", "jax": None, "pid": 4},
    ):
        assert progress.read_line(json.dumps(said).encode(), 0) == said


def test_an_exception_whose_text_cannot_be_made_is_reported_all_the_same() -> None:
    class Broken(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    assert (
        contract.error_line(Broken(), None)["error"]["message"]
        == "<its message cannot be read: KeyError>"
    )


def test_a_line_of_many_begins_is_tried_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    decoded = codec.parse_json

    def counted(line: bytes) -> Any:
        tried.append(len(line))
        return decoded(line)

    monkeypatch.setattr(codec, "parse_json", counted)
    for line in (b'{"note":' * 8000, b'{"note":""' * 6000, b'{"phase":["' * 6000):
        tried.clear()
        progress.read_line(line, 0)
        assert len(tried) <= 9


def test_the_message_after_many_torn_ones_is_read() -> None:
    assert progress.read_line(b'{"phase": "st' * 20 + b'{"committed": 7}', 0) == {"committed": 7}


@pytest.mark.parametrize("size", [14, 30, 47, 60])
def test_a_message_that_a_full_pipe_cut_is_not_blamed_on_the_program(size: int) -> None:
    line = json.dumps(
        {"metrics": {"loss": 1.5, "of": ['a "b" {', 3]}, "step": 120, "note": "cut \\"}
    ).encode()
    found = progress.read_line(line[:size], 0)
    assert found == {}
    assert "note" in progress.read_line(b'{"note": oops}', 0)


def test_metrics_that_no_message_between_agents_could_hold_are_a_note() -> None:
    for text in ("x" * 60_000, "\udce9" * 60_000):
        line = b'{"metrics": {"text": "' + text.encode(errors="surrogateescape") + b'"}}'
        message = progress.read_line(line, 4)
        assert (
            list(message) == ["note"]
            and "must be an object of at most 32768 bytes" in message["note"]
        )

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

SCALARS: list[Any] = [None, True, 0, -1, 2**70, 1.5, "boom", "\udce9"]
VALUES: list[Any] = [*SCALARS, [], ["x"], {}, {"step": "x"}, {"type": [{}]}]
KEYS = [
    *("hello", "python", "jax", "pid", "phase", "step", "committed", "metrics", "stopped"),
    *("profile", "note", "error", "atexit", "waits", progress.UNSTARTABLE),
]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_report_value_of_any_form_becomes_event_or_note(key: str, value: Any) -> None:
    for line in ({key: value}, {"phase": "step", "step": 3, key: value}):
        message = progress.read_line(json.dumps(line).encode(), 4)
        process = RankProgress(0.0)
        process.take_message(message, 1.0)
        assert Status.from_wire(json.loads(json.dumps(process.status.to_wire()))) == process.status
        assert key in message or "rank 4 wrote `" in message["note"]
        assert isinstance(message.get("note", ""), str)
        if "error" in message:
            event = Event(EventKind.ERROR, 0, 4, process.status, error=message["error"])
            result = find_root_cause([event])
            assert result is not None
            assert verdict_for_event(result[0]).message.startswith("rank 4 raised")
        json.dumps(message, ensure_ascii=False, allow_nan=False).encode()


@pytest.mark.parametrize(
    "line", [b"boom", b"[1]", b'"boom"', b"null", b"3", b"[" * 60_000, b"\x00\xff"]
)
def test_line_without_json_object_becomes_a_note(line: bytes) -> None:
    message = progress.read_line(line, 4)
    assert list(message) == ["note"] and message["note"].startswith("rank 4 wrote ")


def test_note_shows_wrong_value_and_required_form() -> None:
    note = progress.read_line(b'{"error": "boom"}', 1)["note"]
    assert note == "rank 1 wrote `error`: 'boom' to the progress pipe; it must be an object"


def test_lines_of_the_contract_are_read_unchanged() -> None:
    try:
        raise FileNotFoundError(2, "No such file", "caf\udce9")
    except FileNotFoundError as error:
        line = contract.error_line(error, 65)
    result = progress.read_line(json.dumps(line).encode(), 0)["error"]
    assert result["message"] == "[Errno 2] No such file: 'caf\\udce9'" and result["code"] == 65
    assert "test_reports.py" in result["traceback"]
    stopped = {"stopped": {"step": 37, "saved": True, "note": "n"}}
    for message in (stopped, {"hello": "site", "jax": None, "pid": 4}):
        assert progress.read_line(json.dumps(message).encode(), 0) == message


def test_exception_with_failing_str_is_reported() -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise KeyError("no text")

    message = contract.error_line(BrokenError(), None)["error"]["message"]
    assert message == "<its message cannot be read: KeyError>"


def test_decoding_tries_few_starts_of_a_torn_line(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    decoded = codec.parse_json

    def counted(line: bytes, **options: Any) -> Any:
        tried.append(len(line))
        return decoded(line, **options)

    monkeypatch.setattr(codec, "parse_json", counted)
    for line in (b'{"note":' * 8000, b'{"note":""' * 6000, b'{"phase":["' * 6000):
        tried.clear()
        progress.read_line(line, 0)
        assert len(tried) <= 9


def test_message_after_many_torn_lines_is_read() -> None:
    assert progress.read_line(b'{"phase": "st' * 20 + b'{"committed": 7}', 0) == {"committed": 7}


@pytest.mark.parametrize("size", [14, 30, 47, 60])
def test_message_cut_by_a_full_pipe_causes_no_note(size: int) -> None:
    metrics = {"loss": 1.5, "of": ['a "b" {', 3]}
    line = json.dumps({"metrics": metrics, "step": 120, "note": "cut \\"}).encode()
    assert progress.read_line(line[:size], 0) == {}
    assert "note" in progress.read_line(b'{"note": oops}', 0)


def test_oversized_metrics_become_a_note() -> None:
    for text in ("x" * 60_000, "\udce9" * 60_000):
        line = b'{"metrics": {"text": "' + text.encode(errors="surrogateescape") + b'"}}'
        message = progress.read_line(line, 4)
        assert list(message) == ["note"]
        assert "must be an object of at most 32768 bytes" in message["note"]

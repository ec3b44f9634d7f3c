"""Watches over connections that end early. The connections are plain generators."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import pytest

from jaxlaunch.launcher.errors import ApiError, UnreachableError
from jaxlaunch.launcher.kubernetes import watch
from jaxlaunch.launcher.kubernetes.watch import Watch


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_PAUSES_S", (0,))


def make_object(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "uid": f"uid-{name}", "resourceVersion": str(version)}}


def make_line(event: str, obj: Mapping[str, Any]) -> bytes:
    return json.dumps({"type": event, "object": obj}).encode() + b"\n"


class Server:
    """Answers each list and each watch request with the next of what a test wrote down."""

    def __init__(
        self, lists: Iterable[tuple[list[dict[str, Any]], str]], streams: Iterable[Iterable[Any]]
    ) -> None:
        self._lists, self._streams = iter(lists), iter(streams)
        self.since: list[str] = []

    def listed(self) -> tuple[list[dict[str, Any]], str]:
        return next(self._lists)

    def streamed(self, query: Mapping[str, str], silence_s: float) -> Iterator[bytes]:
        self.since.append(query["resourceVersion"])
        for part in next(self._streams):
            if isinstance(part, Exception):
                raise part
            yield part

    def told(
        self, number: int, since: str = "", objects: Iterable[dict[str, Any]] = ()
    ) -> list[tuple[str, str, str]]:
        """The first events of a watch: what happened to whom, and the version it then had."""
        watch = Watch(self.listed, self.streamed, since, objects)
        events = itertools.islice(watch.iter_events(), number)
        return [
            (kind, item["metadata"]["name"], item["metadata"]["resourceVersion"])
            for kind, item in events
        ]


@pytest.mark.parametrize(
    "end",
    [
        [],
        [UnreachableError("silent", sent=True)],
        [ApiError("", None, 500)],
        [b'{"type": "MODIFIED", "obj'],
    ],
)
def test_ended_watch_continues_from_last_version(end: list[Any]) -> None:
    server = Server(
        [([make_object("a", 1)], "5")],
        [
            [make_line("MODIFIED", make_object("a", 6)), *end],
            end,
            [make_line("BOOKMARK", make_object("", 9)), *end],
            [make_line("ADDED", make_object("b", 11))],
        ],
    )
    assert server.told(3) == [("ADDED", "a", "1"), ("MODIFIED", "a", "6"), ("ADDED", "b", "11")]
    assert server.since == ["5", "6", "6", "9"]


@pytest.mark.parametrize(
    "expiry",
    [
        make_line("ERROR", {"code": 410, "reason": "Expired"}),
        ApiError("too old", None, 410, "Expired"),
    ],
)
def test_expired_version_yields_only_changes(expiry: Any) -> None:
    server = Server(
        [
            ([make_object("a", 1), make_object("b", 2), make_object("c", 3)], "5"),
            ([make_object("a", 1), make_object("b", 7), make_object("d", 8)], "9"),
        ],
        [
            [make_line("MODIFIED", make_object("c", 6)), expiry],
            [make_line("ADDED", make_object("e", 10))],
        ],
    )
    assert server.told(8)[3:] == [
        ("MODIFIED", "c", "6"),
        ("MODIFIED", "b", "7"),
        ("ADDED", "d", "8"),
        ("DELETED", "c", "6"),
        ("ADDED", "e", "10"),
    ]
    assert server.since == ["5", "9"]


def test_watch_from_a_version_lists_nothing() -> None:
    server = Server([], [[make_line("DELETED", make_object("a", 6))]])
    assert server.told(1, since="5") == [("DELETED", "a", "6")]


def test_expired_version_of_a_listing_yields_only_changes() -> None:
    listed = [make_object("a", 1), make_object("b", 2), make_object("c", 3)]
    server = Server(
        [([make_object("a", 1), make_object("b", 7), make_object("d", 8)], "9")],
        [[ApiError("too old", None, 410, "Expired")], [make_line("ADDED", make_object("e", 10))]],
    )
    assert server.told(4, since="5", objects=listed) == [
        ("MODIFIED", "b", "7"),
        ("ADDED", "d", "8"),
        ("DELETED", "c", "3"),
        ("ADDED", "e", "10"),
    ]
    assert server.since == ["5", "9"]


def test_events_in_pieces_are_joined() -> None:
    data = make_line("ADDED", make_object("a", 1)) + make_line("ADDED", make_object("b", 2))
    server = Server([([], "0")], [[data[:10], data[10:60], data[60:]]])
    assert server.told(2) == [("ADDED", "a", "1"), ("ADDED", "b", "2")]


def test_forbidden_watch_is_not_retried() -> None:
    with pytest.raises(ApiError, match="forbidden"):
        Server([([], "1")], [[ApiError("forbidden", None, 403)]]).told(1)


def test_unreachable_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "ERROR_TIMEOUT_S", 0.0)
    with pytest.raises(UnreachableError, match="gone"):
        Server([([], "1")], itertools.repeat([UnreachableError("gone")])).told(1)

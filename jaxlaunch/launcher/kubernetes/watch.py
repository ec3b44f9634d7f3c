"""A watch that survives closed and silent connections, errors of the server, and expired resource versions."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxlaunch.launcher.errors import ApiError, Unreachable
from jaxlaunch.records.lines import Lines

LASTS_S = 20  # the server ends a watch after this; one that is silent for longer is dead
SILENCE_S = LASTS_S + 5.0
PATIENCE_S = 900.0  # of errors in a row: a control plane that is upgraded is away for five minutes and more
_jitter = random.Random()  # not the global generator: a user's program may have seeded that
_PAUSES_S = (0.5, 1, 2, 4, 8, 15, 30)
_GONE = 410
_LONGEST_EVENT = 64 * 1024 * 1024

Event = tuple[str, dict[str, Any]]


def may_pass(error: ApiError | Unreachable) -> bool:
    """Whether the same request may succeed later: no answer, or one of a server that is unwell or busy."""
    return isinstance(error, Unreachable) or error.status >= 500 or error.status == 429


class Watch:
    """Events of objects.

    `listed()` returns the objects and their resource version, `streamed(query, silence_s)` the bytes of one watch
    request.
    """

    def __init__(
        self,
        listed: Callable[[], tuple[list[dict[str, Any]], str]],
        streamed: Callable[[Mapping[str, str], float], Iterator[bytes]],
        since: str = "",
        limit_s: float | None = None,
    ) -> None:
        self._listed, self._streamed = listed, streamed
        self._version = since
        self._end = None if limit_s is None else time.monotonic() + limit_s
        self._seen: dict[str, dict[str, Any]] = {}  # uid -> its metadata in the last event

    def events(self) -> Iterator[Event]:
        """ADDED, MODIFIED and DELETED, each change once, until `limit_s` is over.

        Raises ApiError when the server refuses, and the last error when all requests failed for PATIENCE_S.
        """
        failures, well = 0, time.monotonic()
        while not self._is_over():
            began = time.monotonic()
            try:
                if not self._version:
                    yield from self._relist()
                for event in self._stream():
                    failures, well = 0, time.monotonic()
                    yield event
                if time.monotonic() - began > 1:  # a watch that the server ends after a while is not a failure
                    failures, well = 0, time.monotonic()
                    continue
            except (ApiError, Unreachable) as error:
                if not may_pass(error) or time.monotonic() - well > PATIENCE_S:
                    error.hint = None if isinstance(error, Unreachable) else error.hint  # the network was fine before
                    raise
            failures += 1
            self._pause(_PAUSES_S[min(failures, len(_PAUSES_S)) - 1] * _jitter.uniform(0.5, 1))

    def _is_over(self) -> bool:
        return self._end is not None and time.monotonic() >= self._end

    def _pause(self, seconds: float) -> None:
        time.sleep(seconds if self._end is None else max(0.0, min(seconds, self._end - time.monotonic())))

    def _relist(self) -> Iterator[Event]:
        """What was added, changed and deleted since the last event."""
        objects, self._version = self._listed()
        gone = self._seen
        self._seen = {}
        for one in objects:
            known = gone.pop(one["metadata"]["uid"], None)
            self._seen[one["metadata"]["uid"]] = one["metadata"]
            if known is None:
                yield "ADDED", one
            elif known["resourceVersion"] != one["metadata"]["resourceVersion"]:
                yield "MODIFIED", one
        for metadata in gone.values():
            yield "DELETED", {"metadata": metadata}

    def _stream(self) -> Iterator[Event]:
        """The events of one request, up to its end."""
        lasts = LASTS_S if self._end is None else max(1, min(LASTS_S, round(self._end - time.monotonic())))
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(lasts),
        }
        lines = Lines(_LONGEST_EVENT)
        try:
            for data in self._streamed(query, lasts + SILENCE_S - LASTS_S):
                for line in lines.feed(data):
                    yield from self._event(json.loads(line))
        except (ApiError, _Expired) as error:
            if isinstance(error, ApiError) and error.status != _GONE:
                raise
            self._version = ""

    def _event(self, event: Mapping[str, Any]) -> Iterator[Event]:
        kind, one = event["type"], event["object"]
        if kind == "ERROR":
            if one.get("code") == _GONE:
                raise _Expired
            raise ApiError(one.get("message", "the watch failed"), None, one.get("code", 500), one.get("reason", ""))
        metadata = one["metadata"]
        self._version = metadata["resourceVersion"]
        if kind == "BOOKMARK":
            return
        metadata.pop("managedFields", None)
        if kind == "DELETED":
            self._seen.pop(metadata["uid"], None)
        else:
            self._seen[metadata["uid"]] = metadata
        yield kind, one


class _Expired(Exception):
    """The server no longer has the resource version to continue from."""

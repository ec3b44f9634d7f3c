"""Watches and calls that continue after lost connections, server errors and expired versions.

A watch request ends after 20 seconds and is continued from the last resource version. If the server
no longer has that version, the objects are listed again and the difference to the last known
objects is yielded as events.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from jaxlaunch.launcher.errors import ApiError, UnreachableError
from jaxlaunch.records.log_lines import LineSplitter

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.client import Cluster

# Duration after which the server ends a watch request. A connection that is silent for longer is
# dead.
WATCH_DURATION_S = 20
SILENCE_TIMEOUT_S = WATCH_DURATION_S + 5.0
# Consecutive errors are tolerated for this long. An upgrade of a control plane takes at least five
# minutes.
ERROR_TIMEOUT_S = 900.0
# Not the global generator: a user's program may have seeded that.
_jitter = random.Random()
_PAUSES_S = (0.5, 1, 2, 4, 8, 15, 30)
_GONE_STATUS = 410
_MAX_EVENT_BYTES = 64 * 1024 * 1024

Event = tuple[str, dict[str, Any]]
T = TypeVar("T")


def is_transient(error: ApiError | UnreachableError) -> bool:
    """Return whether a later request may succeed: the server did not answer, failed or was busy."""
    return isinstance(error, UnreachableError) or error.status >= 500 or error.status == 429


class Watch:
    """Events of objects across reconnects."""

    def __init__(
        self,
        list_objects: Callable[[], tuple[list[dict[str, Any]], str]],
        stream_bytes: Callable[[Mapping[str, str], float], Iterator[bytes]],
        since: str = "",
        objects: Iterable[dict[str, Any]] = (),
        limit_s: float | None = None,
    ) -> None:
        """Prepare a watch, without sending a request.

        Args:
            list_objects: Returns all objects and their resource version.
            stream_bytes: Yields the bytes of one watch request for a query and a read timeout.
            since: Resource version to start from. By default all objects are listed first.
            objects: Objects that existed at `since`.
            limit_s: Duration of the watch. By default it does not end.
        """
        self._list_objects, self._stream_bytes = list_objects, stream_bytes
        self._version = since
        self._end = None if limit_s is None else time.monotonic() + limit_s
        # The metadata of each object in its last event.
        self._metadata_by_uid: dict[str, dict[str, Any]] = {
            obj["metadata"]["uid"]: obj["metadata"] for obj in objects
        }

    def iter_events(self) -> Generator[Event, None, None]:
        """Yield ADDED, MODIFIED and DELETED, each change once, for `limit_s` seconds.

        Raises:
            ApiError: If the server rejects the request, or after 15 minutes of errors.
            UnreachableError: After 15 minutes without an answer.
        """
        failures, last_success_at = 0, time.monotonic()
        while self._remaining_s > 0:
            started_at = time.monotonic()
            try:
                if not self._version:
                    yield from self._relist_objects()
                for event in self._stream_events():
                    failures, last_success_at = 0, time.monotonic()
                    yield event
                # A watch that the server ends after a while is not a failure.
                if time.monotonic() - started_at > 1:
                    failures, last_success_at = 0, time.monotonic()
                    continue
            except (ApiError, UnreachableError) as error:
                if not is_transient(error) or time.monotonic() - last_success_at > ERROR_TIMEOUT_S:
                    raise without_network_hint(error) from None
            failures += 1
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1] * _jitter.uniform(0.5, 1)
            time.sleep(max(0.0, min(pause_s, self._remaining_s)))

    @property
    def _remaining_s(self) -> float:
        return math.inf if self._end is None else self._end - time.monotonic()

    def _relist_objects(self) -> Iterator[Event]:
        """List all objects and yield what has changed since the last event."""
        objects, self._version = self._list_objects()
        remaining, self._metadata_by_uid = self._metadata_by_uid, {}
        for obj in objects:
            metadata = obj["metadata"]
            last_metadata = remaining.pop(metadata["uid"], None)
            self._metadata_by_uid[metadata["uid"]] = metadata
            if last_metadata is None:
                yield "ADDED", obj
            elif last_metadata["resourceVersion"] != metadata["resourceVersion"]:
                yield "MODIFIED", obj
        for metadata in remaining.values():
            yield "DELETED", {"metadata": metadata}

    def _stream_events(self) -> Iterator[Event]:
        """Yield the events of one watch request."""
        duration_s = max(1, round(min(WATCH_DURATION_S, self._remaining_s)))
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(duration_s),
        }
        lines = LineSplitter(_MAX_EVENT_BYTES)
        silence_s = duration_s + SILENCE_TIMEOUT_S - WATCH_DURATION_S
        try:
            for data in self._stream_bytes(query, silence_s):
                for line in lines.feed(data):
                    yield from self._parse_event(json.loads(line))
        except ApiError as error:
            if error.status != _GONE_STATUS:
                raise
            # The server no longer has the version to continue from.
            self._version = ""

    def _parse_event(self, event: Mapping[str, Any]) -> Iterator[Event]:
        kind, obj = event["type"], event["object"]
        if kind == "ERROR":
            message, reason = obj.get("message", "the watch failed"), obj.get("reason", "")
            raise ApiError(message, None, obj.get("code", 500), reason)
        metadata = obj["metadata"]
        self._version = metadata["resourceVersion"]
        if kind == "BOOKMARK":
            return
        metadata.pop("managedFields", None)
        if kind == "DELETED":
            self._metadata_by_uid.pop(metadata["uid"], None)
        else:
            self._metadata_by_uid[metadata["uid"]] = metadata
        yield kind, obj


def without_network_hint(error: ApiError | UnreachableError) -> ApiError | UnreachableError:
    """Remove the hint to check the network, which worked before, from an error and return it."""
    error.hint = None if isinstance(error, UnreachableError) else error.hint
    return error


# --- outages of minutes, such as an upgrade of the server or a broken network ---------------------

# A quiet watch is renewed every 20 s, so a healthy server is never silent for longer.
REPORT_AFTER_S = 40.0
_REPORT_PERIOD_S = 60.0
_PAUSE_S = 2.0


class Outage:
    """Retries calls until the server answers, and reports how long it has not answered."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._reported_at: float | None = None

    def report_outage(self) -> None:
        """Report once a minute that the server does not answer, and then that it answers again."""
        silent_s, now = self._cluster.silent_s, time.monotonic()
        if silent_s < REPORT_AFTER_S:
            if self._reported_at is not None:
                self._say("the server answers again")
            self._reported_at = None
        elif self._reported_at is None or now - self._reported_at >= _REPORT_PERIOD_S:
            self._say(f"the server has not answered for {silent_s:.0f} s; trying again")
            self._reported_at = now

    def call_with_retries(self, call: Callable[[], T], deadline: float | None = None) -> T:
        """Call `call` until the server answers, and return its result.

        Raises:
            ApiError: If the server rejects the request, or after 15 minutes of errors.
            UnreachableError: After 15 minutes without an answer.
            TimeoutError: After `deadline`, a time of time.monotonic().
        """
        started_at, end = time.monotonic(), math.inf if deadline is None else deadline
        while True:
            try:
                answer = call()
            except (ApiError, UnreachableError) as error:
                now = time.monotonic()
                if now >= end and is_transient(error):
                    raise TimeoutError from None
                if not is_transient(error) or now - started_at > ERROR_TIMEOUT_S:
                    raise without_network_hint(error) from None
                self.report_outage()
                time.sleep(max(0.0, min(_PAUSE_S, end - now)))
            else:
                self.report_outage()
                return answer

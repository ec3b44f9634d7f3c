"""Watches and calls that survive closed and silent connections, server errors and expired versions.

A watch request ends after 20 seconds and is continued from the last resource version. If the server no longer has that
version, the objects are listed again and the difference to the last known objects is yielded as events.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from jaxlaunch.launcher.errors import ApiError, Unreachable
from jaxlaunch.records.log_lines import Lines

if TYPE_CHECKING:
    from jaxlaunch.launcher.kubernetes.client import Cluster

# The server ends a watch after this long. A connection that is silent for longer is dead.
LASTS_S = 20
SILENCE_S = LASTS_S + 5.0
# Consecutive errors are tolerated for this long: an upgrade of a control plane takes five minutes and more.
PATIENCE_S = 900.0
# Not the global generator: a user's program may have seeded that.
_jitter = random.Random()
_PAUSES_S = (0.5, 1, 2, 4, 8, 15, 30)
_GONE = 410
_LONGEST_EVENT = 64 * 1024 * 1024

Event = tuple[str, dict[str, Any]]
T = TypeVar("T")


def may_pass(error: ApiError | Unreachable) -> bool:
    """Return whether a later request may succeed: the server did not answer, failed or was busy."""
    return isinstance(error, Unreachable) or error.status >= 500 or error.status == 429


class Watch:
    """Events of objects across reconnects.

    The constructor's first callback returns the objects and their resource version, the second one the bytes of one
    watch request for a query and a read timeout.
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
        # Maps a uid to the metadata in the last event.
        self._seen: dict[str, dict[str, Any]] = {}

    def events(self) -> Iterator[Event]:
        """Yield ADDED, MODIFIED and DELETED, each change once, for `limit_s` seconds.

        Raises:
            ApiError: If the server rejects the request, or after 15 minutes of errors.
            Unreachable: After 15 minutes without an answer.
        """
        failures, well_at = 0, time.monotonic()
        while self._end is None or time.monotonic() < self._end:
            began = time.monotonic()
            try:
                if not self._version:
                    yield from self._relist()
                for event in self._stream():
                    failures, well_at = 0, time.monotonic()
                    yield event
                # A watch that the server ends after a while is not a failure.
                if time.monotonic() - began > 1:
                    failures, well_at = 0, time.monotonic()
                    continue
            except (ApiError, Unreachable) as error:
                if not may_pass(error) or time.monotonic() - well_at > PATIENCE_S:
                    raise without_network_hint(error) from None
            failures += 1
            pause_s = _PAUSES_S[min(failures, len(_PAUSES_S)) - 1] * _jitter.uniform(0.5, 1)
            time.sleep(pause_s if self._end is None else max(0.0, min(pause_s, self._end - time.monotonic())))

    def _relist(self) -> Iterator[Event]:
        """Yield the changes since the last event by listing all objects."""
        objects, self._version = self._listed()
        gone, self._seen = self._seen, {}
        for obj in objects:
            metadata = obj["metadata"]
            earlier = gone.pop(metadata["uid"], None)
            self._seen[metadata["uid"]] = metadata
            if earlier is None:
                yield "ADDED", obj
            elif earlier["resourceVersion"] != metadata["resourceVersion"]:
                yield "MODIFIED", obj
        for metadata in gone.values():
            yield "DELETED", {"metadata": metadata}

    def _stream(self) -> Iterator[Event]:
        """Yield the events of one watch request."""
        lasts_s = LASTS_S if self._end is None else max(1, min(LASTS_S, round(self._end - time.monotonic())))
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._version,
            "timeoutSeconds": str(lasts_s),
        }
        lines = Lines(_LONGEST_EVENT)
        try:
            for data in self._streamed(query, lasts_s + SILENCE_S - LASTS_S):
                for line in lines.feed(data):
                    yield from self._take(json.loads(line))
        except ApiError as error:
            if error.status != _GONE:
                raise
            # The server no longer has the version to continue from.
            self._version = ""

    def _take(self, event: Mapping[str, Any]) -> Iterator[Event]:
        kind, obj = event["type"], event["object"]
        if kind == "ERROR":
            raise ApiError(obj.get("message", "the watch failed"), None, obj.get("code", 500), obj.get("reason", ""))
        metadata = obj["metadata"]
        self._version = metadata["resourceVersion"]
        if kind == "BOOKMARK":
            return
        metadata.pop("managedFields", None)
        if kind == "DELETED":
            self._seen.pop(metadata["uid"], None)
        else:
            self._seen[metadata["uid"]] = metadata
        yield kind, obj


def without_network_hint(error: ApiError | Unreachable) -> ApiError | Unreachable:
    """Remove the hint to check the network, which worked before, from the error and return it."""
    error.hint = None if isinstance(error, Unreachable) else error.hint
    return error


# --- outages of minutes, such as an upgrade of the server or a broken network -----------------------------------------

# A quiet watch is renewed every 20 s, so a healthy server is never silent for longer.
TELL_AFTER_S = 40.0
_TELL_AGAIN_S = 60.0
_PAUSE_S = 2.0


class Outage:
    """Retries calls until the server answers, and reports the duration of the outage."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None]) -> None:
        self._cluster, self._say = cluster, say
        self._told_at: float | None = None

    def tell(self) -> None:
        """Report once a minute that the server does not answer, and then that it answers again."""
        silent_s, now = self._cluster.silent_s, time.monotonic()
        if silent_s < TELL_AFTER_S:
            if self._told_at is not None:
                self._say("the server answers again")
            self._told_at = None
        elif self._told_at is None or now - self._told_at >= _TELL_AGAIN_S:
            self._say(f"the server has not answered for {silent_s:.0f} s; trying again")
            self._told_at = now

    def ride(self, call: Callable[[], T], end: float | None = None) -> T:
        """Call `call` until the server answers, and return its result.

        Raises:
            ApiError: If the server rejects the request, or after 15 minutes of errors.
            Unreachable: After 15 minutes without an answer.
            TimeoutError: At `end`, in the time of time.monotonic().
        """
        began = time.monotonic()
        while True:
            try:
                answer = call()
            except (ApiError, Unreachable) as error:
                now = time.monotonic()
                if end is not None and now >= end and may_pass(error):
                    raise TimeoutError from None
                if not may_pass(error) or now - began > PATIENCE_S:
                    raise without_network_hint(error) from None
                self.tell()
                time.sleep(_PAUSE_S if end is None else max(0.0, min(_PAUSE_S, end - now)))
            else:
                self.tell()
                return answer

"""Profiles of this host's processes on demand: each is requested through a file, and its answers are kept.

Only this machine may request one: `launcher profile` connects by loopback, in a pod through a port-forward.
"""

from __future__ import annotations

import http
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from jaxlaunch import atomic_file, contract
from jaxlaunch.launcher.agent.host.child import Child

STEPS = 5  # the default
MAX_SHOWN = 60  # characters of a wrong value
_STEPS = re.compile(r"[0-9]{1,9}")  # int() raises for thousands of digits

Reply = tuple[http.HTTPStatus, Mapping[str, Any]]


class Profiles:
    """The newest request for a profile, and the answers of the processes that were alive then."""

    def __init__(self, is_trainer: bool, alive: Callable[[], Iterable[Child]]) -> None:
        """`is_trainer`: the processes run the built-in trainer; others can be profiled where they train as it does."""
        self._is_trainer, self._alive = is_trainer, alive
        self._numbers = itertools.count(1)
        self._number: int | None = None
        self._requested: dict[int, Child] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def reply(self, method: str, query: str, is_local: bool) -> Reply:
        """The answer to an HTTP request: POST requests a profile, GET reads the state of the newest."""
        if not is_local:
            return _refusal(
                http.HTTPStatus.FORBIDDEN,
                "profiles are served on loopback only: connect from this host, or through kubectl port-forward",
            )
        if method == "GET":
            return http.HTTPStatus.OK, self._state()
        if method != "POST":
            return _refusal(http.HTTPStatus.METHOD_NOT_ALLOWED, "use POST to request a profile, GET to read its state")
        text = parse_qs(query).get("steps", [str(STEPS)])[-1]
        if not _STEPS.fullmatch(text) or not 1 <= int(text) <= contract.PROFILE_STEPS:
            why = f"steps = {text[:MAX_SHOWN]} is not a number from 1 to {contract.PROFILE_STEPS}"
            return _refusal(http.HTTPStatus.BAD_REQUEST, why)
        if (against := self._reason_against()) is not None:
            return _refusal(http.HTTPStatus.CONFLICT, against)
        return self._request(int(text))

    def update(self, child: Child, message: Mapping[str, Any]) -> None:
        """Takes in what a process reports of its profile."""
        if self._requested.get(child.rank) is child and message.get("id") == self._number:
            self._answers[child.rank] = {key: value for key, value in message.items() if key != "id"}

    def _reason_against(self) -> str | None:
        if not self._is_trainer and not any(child.progress.status.trainer for child in self._alive()):
            trains = "and programs that train by jaxlaunch.run"
            return f"this job runs its own command; only the built-in trainer can be profiled, {trains}"
        if not any(True for _ in self._alive()):
            return "no process is running"
        busy = [rank for rank, one in self._state()["ranks"].items() if one["state"] not in contract.PROFILED]
        return f"a profile is already being taken, on rank {', '.join(busy)}" if busy else None

    def _request(self, steps: int) -> Reply:
        self._number, self._answers = next(self._numbers), {}
        self._requested = {child.rank: child for child in self._alive()}
        try:
            for child in self._requested.values():
                request = {"id": self._number, "steps": steps}
                atomic_file.write(Path(child.profile_path), json.dumps(request).encode())
        except OSError as error:
            self._requested = {}
            return _refusal(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"cannot write the request: {error}")
        return http.HTTPStatus.ACCEPTED, self._state()

    def _state(self) -> dict[str, Any]:
        return {"id": self._number, "ranks": {str(rank): self._of(child) for rank, child in self._requested.items()}}

    def _of(self, child: Child) -> Mapping[str, Any]:
        answer = self._answers.get(child.rank, {"state": "asked"})
        is_gone = child.progress.status.exit is not None and answer["state"] not in contract.PROFILED
        return {"state": "gone"} if is_gone else answer


def _refusal(status: http.HTTPStatus, why: str) -> Reply:
    return status, {"error": why}

"""Profiles of this host's processes on demand: asks each through a file, keeps what it answered, tells who comes back.

Only this machine may ask: `launcher profile` comes by loopback, for a pod through the API server's port-forward.
"""

from __future__ import annotations

import http
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import parse_qs

from launcher.agent.child import Child
from trainer import contract

ENDED = ("done", "failed", "gone")  # states of a rank that change no more; the others are asked and tracing
STEPS = 5  # where nobody says how many

Reply = tuple[http.HTTPStatus, Mapping[str, Any]]


class Profiles:
    """The newest profile that was asked for, and the answers of the processes that were alive then."""

    def __init__(self, is_trainer: bool, alive: Callable[[], Iterable[Child]]) -> None:
        """`is_trainer`: the processes are the built-in trainer's, which alone knows how."""
        self._is_trainer, self._alive = is_trainer, alive
        self._numbers = itertools.count(1)
        self._number: int | None = None
        self._asked: dict[int, Child] = {}
        self._answers: dict[int, Mapping[str, Any]] = {}

    def reply(self, method: str, query: str, is_here: bool) -> Reply:
        """The answer to a request over HTTP: POST asks for a profile, GET for how the newest stands."""
        if not is_here:
            return _refusal(http.HTTPStatus.FORBIDDEN, "only loopback may ask for profiles")
        if method == "GET":
            return http.HTTPStatus.OK, self._standing()
        if method != "POST":
            return _refusal(http.HTTPStatus.METHOD_NOT_ALLOWED, "POST asks for a profile, GET for how it stands")
        text = parse_qs(query).get("steps", [str(STEPS)])[-1]
        if not text.isdecimal() or not 1 <= int(text) <= contract.PROFILE_STEPS:
            return _refusal(http.HTTPStatus.BAD_REQUEST, f"steps = {text} is not 1 to {contract.PROFILE_STEPS}")
        if (why := self._obstacle()) is not None:
            return _refusal(http.HTTPStatus.CONFLICT, why)
        return self._ask(int(text))

    def heard(self, child: Child, message: Mapping[str, Any]) -> None:
        """A process said how its profile stands."""
        if self._asked.get(child.rank) is child and message.get("id") == self._number:
            self._answers[child.rank] = {key: value for key, value in message.items() if key != "id"}

    def _obstacle(self) -> str | None:
        if not self._is_trainer:
            return "this job runs a command of its own; only the built-in trainer can be profiled"
        if not any(True for _ in self._alive()):
            return "no process runs at this moment"
        busy = [rank for rank, one in self._standing()["ranks"].items() if one["state"] not in ENDED]
        return f"a profile is under way already, on rank {', '.join(busy)}" if busy else None

    def _ask(self, steps: int) -> Reply:
        self._number, self._answers = next(self._numbers), {}
        self._asked = {child.rank: child for child in self._alive()}
        try:
            for child in self._asked.values():
                with open(f"{child.profile_path}.draft", "w") as file:
                    json.dump({"id": self._number, "steps": steps}, file)
                os.replace(file.name, child.profile_path)  # a process finds all of it, or nothing
        except OSError as error:
            self._asked = {}
            return _refusal(http.HTTPStatus.INTERNAL_SERVER_ERROR, f"the processes cannot be asked: {error}")
        return http.HTTPStatus.ACCEPTED, self._standing()

    def _standing(self) -> dict[str, Any]:
        return {"id": self._number, "ranks": {str(rank): self._of(child) for rank, child in self._asked.items()}}

    def _of(self, child: Child) -> Mapping[str, Any]:
        answer = self._answers.get(child.rank, {"state": "asked"})
        is_gone = child.progress.status.exit is not None and answer["state"] not in ENDED
        return {"state": "gone"} if is_gone else answer


def _refusal(status: http.HTTPStatus, why: str) -> Reply:
    return status, {"error": why}

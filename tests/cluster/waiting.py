"""Waiting for what a cluster does, with a deadline that tells what was seen last."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

Seen = TypeVar("Seen")
# Many tests wait at once: each look takes time from the server that all of them wait for.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 1.0


def until(
    read: Callable[[], Seen], accept: Callable[[Seen], object], what: str, within: float = 600
) -> Seen:
    """The first thing `read` gives that `accept` takes. AssertionError, with the last of them, after `within` s."""
    deadline, pause_s = time.monotonic() + within, FIRST_PAUSE_S
    while True:
        seen = read()
        if accept(seen):
            return seen
        assert time.monotonic() < deadline, (
            f"{what}: not after {within:.0f} s. The last that was seen:\n{shown(seen)}"
        )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


def shown(seen: object, limit: int = 4000) -> str:
    """As text; of an API object what became of it, which its spec would crowd out."""
    if isinstance(seen, dict) and "status" in seen:
        seen = seen["status"]
    text = seen if isinstance(seen, str) else json.dumps(seen, indent=1, default=repr)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text)} characters)"


def has(kind: str, status: str = "True") -> Callable[[dict[str, object]], bool]:
    """Accepts an object that has this condition."""

    def accepts(object_: dict[str, object]) -> bool:
        conditions = object_.get("status", {}).get("conditions", [])  # type: ignore[attr-defined]
        return any(
            condition["type"] == kind and condition["status"] == status for condition in conditions
        )

    return accepts

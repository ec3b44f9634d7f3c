"""Wait for a cluster with a deadline that reports the last state."""

import json
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
# Many tests wait at once: each look takes time from the server that all of them wait for.
FIRST_PAUSE_S, MAX_PAUSE_S = 0.1, 1.0


def wait_until(
    read: Callable[[], Result],
    accept: Callable[[Result], object],
    description: str,
    timeout_s: float = 600,
) -> Result:
    """Return the first result of `read` that `accept` takes. Fail after `timeout_s`."""
    deadline, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
    while True:
        result = read()
        if accept(result):
            return result
        assert time.monotonic() < deadline, (
            f"{description}: not after {timeout_s:.0f} s. The last result:\n{format_result(result)}"
        )
        time.sleep(pause_s)
        pause_s = min(pause_s * 1.5, MAX_PAUSE_S)


def format_result(result: object, limit: int = 4000) -> str:
    """Return a result as text; of an API object only its status."""
    if isinstance(result, dict) and "status" in result:
        result = result["status"]
    text = result if isinstance(result, str) else json.dumps(result, indent=1, default=repr)
    return text if len(text) <= limit else f"{text[:limit]} … ({len(text)} characters)"


def has_condition(kind: str, status: str = "True") -> Callable[[dict[str, object]], bool]:
    """Return a check that an object has this condition."""

    def accepts(object_: dict[str, object]) -> bool:
        conditions = object_.get("status", {}).get("conditions", [])  # type: ignore[attr-defined]
        return any(
            condition["type"] == kind and condition["status"] == status for condition in conditions
        )

    return accepts

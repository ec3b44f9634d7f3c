"""A script that calls a function on four processes, and says what the calls return and raise."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import jaxlaunch


class RefusedError(ValueError):
    """An exception of this script."""


@jaxlaunch.job(hosts=4, accelerator="cpu", grace="5s")
def work(kind: str, weights: Any) -> dict[str, Any]:
    rank = int(os.environ["JAX_PROCESS_ID"])
    if kind == "raise" and rank == 2:
        raise RefusedError("no", 7)
    if kind == "exit" and rank == 1:
        os._exit(9)
    if kind == "sleep":
        Path(f"asleep-{rank}").touch()
        time.sleep(3600)
    return {"rank": rank, "count": int(os.environ["JAX_NUM_PROCESSES"]), "doubled": 2 * weights}


def describe_call(kind: str) -> dict[str, Any]:
    try:
        work(kind, np.zeros(1))
    except BaseException as error:
        return {
            "type": type(error).__qualname__,
            "args": error.args,
            "notes": getattr(error, "__notes__", []),
            "code": getattr(error.__cause__ or error, "exit_code", None),
        }
    return {}


if __name__ == "__main__":
    weights = np.arange(1_250_000, dtype=np.float64)
    value = work("return", weights)
    answers = {
        "value": {
            "rank": value["rank"],
            "count": value["count"],
            "bytes": value["doubled"].nbytes,
            "is_equal": bool((value["doubled"] == 2 * weights).all()),
        },
        **{kind: describe_call(kind) for kind in ("raise", "exit", "sleep")},
    }
    json.dump(answers, sys.stdout)

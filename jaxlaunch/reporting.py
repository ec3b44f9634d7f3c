"""`report`: a program of your own tells its agent how far it is. Standard library only, Python >= 3.10.

The agent brings this file into images that hold nothing else of ours. Outside a job, and in processes that the program
itself starts, a call checks its arguments and does nothing.
"""

from __future__ import annotations

import atexit
import math
import operator
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxlaunch import shown

PERIOD_S = 0.1  # between two messages: a loop may report each of a thousand steps a second
PHASES = (
    "restore",
    "compile",
    "step",
    "data",
    "eval",
    "save",
    "done",
)  # those of jaxlaunch/contract that a program names

_CONTRACT = "_jaxlaunch_contract"  # the module of the site hook, which the agent has every Python load


class Reports:
    """What was reported last, by kind: sent at once, or as soon as PERIOD_S has passed since what was sent before.

    `send` returns False for a line that it could not write now. Safe to call from any thread.
    """

    def __init__(self, send: Callable[[Mapping[str, Any]], bool]) -> None:
        self._send = send
        self._newest: dict[str, Mapping[str, Any]] = {}  # not sent yet, by the one key of its message or by "phase"
        self._step: int | None = None  # the newest that was sent
        self._sent_at = -math.inf
        self._is_timed = False
        self._lock = threading.RLock()  # a signal's handler may report while this thread is in a report

    def put(self, lines: Mapping[str, Mapping[str, Any]]) -> None:
        """Adds `lines`, kind -> message, to what waits: of two values of a key the later one is sent."""
        with self._lock:
            for kind, line in lines.items():
                self._newest[kind] = _merged(self._newest.get(kind, {}), line)
            self._send_or_wait()

    def flush(self) -> None:
        """Sends what waits, as far as it is taken now."""
        with self._lock:
            self._flush()

    def _send_or_wait(self) -> None:
        if self._is_timed:
            return
        wait_s = self._sent_at + PERIOD_S - time.monotonic()
        if wait_s <= 0:
            self._flush()
        if self._newest:
            timer = threading.Timer(wait_s if wait_s > 0 else PERIOD_S, self._late)
            timer.daemon = True
            timer.start()
            self._is_timed = True

    def _late(self) -> None:
        with self._lock:
            self._is_timed = False
            self._send_or_wait()

    def _flush(self) -> None:
        self._sent_at = time.monotonic()
        pending, self._newest = self._newest, {}
        for kind, line in sorted(pending.items(), key=lambda one: one[0] == "metrics"):  # after their step
            if not self._send(self._named(line)):
                self._newest[kind] = _merged(line, self._newest.get(kind, {}))

    def _named(self, line: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message as the agent reads it: metrics say which step they are of where it is not the newest."""
        self._step = line.get("step", self._step)
        if "of" in line and line["of"] in (None, self._step):
            return {name: value for name, value in line.items() if name != "of"}
        return line


def _merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Both messages in one, metrics one by one."""
    merged = {**before, **{key: value for key, value in after.items() if key != "of" or value is not None}}
    if "metrics" in merged:
        merged["metrics"] = {**before.get("metrics", {}), **after.get("metrics", {})}
    return merged


_of_process: tuple[int, Reports | None] | None = None  # pid, and its reports


def report(
    *,
    step: int | None = None,
    phase: str = "step",
    committed: int | None = None,
    image: Any = None,
    text: str | Mapping[str, str] | None = None,
    **metrics: float | None,
) -> None:
    """Tells the agent how far your program is. Call it after every step: at most ten messages a second are sent, and
    always the newest. Outside a job it only checks its arguments.

    From the first call on, the job's [timeouts](job-yaml.md#timeouts) apply to the program: a phase or a step that
    lasts longer counts as a hang, and the job ends with the step and the stacks of every rank. A call counts as
    progress if its phase or its step differs from the last one. `launcher status` and `summary.json` show the step and
    the metrics.

    **Arguments:**

    - `step`: how many steps are complete. Pictures and texts that are reported without it belong to the newest step.
    - `phase`: what the program does now: `restore`, `compile`, `step`, `data`, `eval`, `save`, or `done`, which has no
        time limit.
    - `committed`: the step of the newest checkpoint that is complete on storage; lost work is counted from it.
    - `image`: a picture, or up to 8 by name, which the [page of the run](seeing-runs.md) shows with the step: arrays
        `[H, W]` or `[H, W, C]` with 1, 3 or 4 channels, uint8 from 0 to 255 or floats from 0 to 1. The call copies it,
        after waiting for a device that is still computing it; a background thread writes it. Only the pictures of rank
        0 and of the 100 newest steps are kept. A picture that is larger than 1,024 pixels on a side, or than 256 KiB as
        PNG, is reduced by keeping every second pixel, or fewer.
    - `text`: a text, or up to 8 by name, for the same page: at most 10,000 characters each.
    - `metrics`: numbers by name, or arrays of one number. Those that rank 0 reports with a step are written to
        `metrics.jsonl` and to the TensorBoard events of the run folder, as for `train:`; the newest are shown.

    **Raises:**

    `TypeError` or `ValueError` if an argument has the wrong type or value.

    **Example:**

    ```python
    import jaxlaunch

    for step in range(1, 101):
        loss = 1 / step
        jaxlaunch.report(step=step, loss=loss)
        if step % 50 == 0:
            jaxlaunch.report(step=step, image=[[0.0, loss], [loss, 1.0]], text={"so far": f"the loss is {loss}"})
    jaxlaunch.report(phase="done")
    ```
    """
    if phase not in PHASES:
        raise ValueError(f"report(phase={phase!r}): a phase is one of {', '.join(PHASES)}")
    reports = _reports()
    found = shown.items(image, text, shown.is_kept())
    has_more = step is not None or phase != "step" or committed is not None or bool(metrics)
    lines: dict[str, Mapping[str, Any]] = {"phase": {"phase": phase}} if has_more or not found else {}
    if step is not None:
        lines["phase"] = {"phase": phase, "step": _count("step", step)}
    if committed is not None:
        lines["committed"] = {"committed": _count("committed", committed)}
    if metrics:
        lines["metrics"] = {"metrics": {name: _number(name, value) for name, value in metrics.items()}, "of": step}
    if reports is not None:
        reports.put(lines)
        shown.put(step, found)


def _count(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"report({name}={value!r}): a whole number, not {type(value).__name__}") from None
    if number < 0:
        raise ValueError(f"report({name}={value!r}): a number of steps, at least 0")
    return number


def _number(name: str, value: Any) -> float | None:
    """A finite number; None for others, which JSON has not."""
    if value is None:
        return None
    try:
        number = float(value.item() if hasattr(value, "item") else value)
    except (TypeError, ValueError):
        raise TypeError(f"report({name}=…): a number, not {type(value).__name__}") from None
    return number if math.isfinite(number) else None


def _reports() -> Reports | None:
    """Those of this process; None outside a job, and in a process that the program started."""
    global _of_process
    if _of_process is None or _of_process[0] != os.getpid():
        _of_process = os.getpid(), _opened()
    return _of_process[1]


def _opened() -> Reports | None:
    contract: Any = sys.modules.get(_CONTRACT)
    if contract is None or os.environ.get(contract.REPORTER) != str(os.getpid()):
        return None
    fd = int(os.environ[contract.PROGRESS_FD])
    reports = Reports(lambda line: contract.send(fd, line))
    if os.environ.get(contract.PROCESS_ID, "0") == "0" and (folder := os.environ.get(contract.RUN_DIR)):
        shown.keep(os.path.join(folder, shown.FOLDER), lambda text: contract.send(fd, {"note": text}))
    atexit.register(_leave, os.getpid())
    return reports


def _leave(pid: int) -> None:
    """Sends what waits, at the end of the process that reported it: by atexit, or by the site hook before os._exit."""
    if _of_process is not None and _of_process[0] == pid == os.getpid() and _of_process[1] is not None:
        _of_process[1].flush()
        shown.flush()

"""Start and stop of the process that sends the metrics of a run to its tracker.

The process runs `jaxlaunch.trainer.tracking`, which follows the journals in the run folder. It is
separate so that no step waits for a tracker that blocks, fails or needs much memory. Rank 0 starts
it: the built-in training loop, or a program of the user with its first reported metrics.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path

from jaxlaunch import contract, isolated
from jaxlaunch.runs import layout

# The trackers that need a package of the same name. Others are classes of the user.
PACKAGES = ("wandb", "mlflow", "trackio")
# The file with the output of the process, in the run folder.
LOG_FILE = "tracker.log"
# Exit codes of the process: the tracker did not open in time (EX_UNAVAILABLE), or it did not take
# the remaining lines in time (EX_TEMPFAIL).
NOT_OPENED_CODE, LATE_CODE = 69, 75
# Time after the training in which the tracker must open. Importing it may take minutes on a busy
# machine.
OPEN_TIMEOUT_S = 120.0
# Time for the remaining lines, after the training has ended and the tracker has opened.
SEND_TIMEOUT_S = 30.0
# Additional time in which a tracker that does not have every line must close.
CLOSE_TIMEOUT_S = 10.0
# A stop waits only for this time, because the hosts have to be released.
STOP_WAIT_S = 5.0
# After a wait of this time, the training prints why it does not exit yet.
NOTICE_AFTER_S = 3.0

# Prefixes of the rank's variables that the process does not inherit. A tracker that imports JAX
# must neither use a device nor join the other ranks. The agent recognizes the leftovers of a killed
# rank by the run's uid and the file of its stacks, but must not kill this process, which sends the
# last lines.
_RANK_VARIABLES = (
    "JAX_COORDINATOR",
    "JAX_NUM_PROCESSES",
    "JAX_PROCESS_ID",
    "JAX_LOCAL_DEVICE_IDS",
    contract.PROGRESS_FD,
    contract.PROGRESS,
    contract.STACKS,
    contract.UID,
)


class TrackerFeed:
    """The process that sends the metrics of a run. The constructor starts it.

    Args:
        folder: The run folder.
        tracker_json: The value of contract.TRACKER.
        is_reported: Whether the agent writes the journals, from the reports of a program.

    Raises:
        OSError: The process cannot be started.
    """

    def __init__(self, folder: str, tracker_json: str, *, is_reported: bool) -> None:
        self._is_reported, self._tracker_json = is_reported, tracker_json
        self._folder, self._log_path = folder, os.path.join(folder, LOG_FILE)
        with open(self._log_path, "wb"):
            pass
        # Distinguishes the place of this tracker from that of an earlier start.
        self._feed_id = uuid.uuid4().hex
        self._is_place_announced = False
        # The last step that a program has reported. The agent may not have written its line yet.
        self.last_step = -1
        self.is_closed = False
        self._process = self._start_process()

    def announce_place(self) -> str | None:
        """Return a line that says where the tracker shows the run, once the tracker is open.

        Later calls return None.
        """
        if self._is_place_announced:
            return None
        place = layout.read_tracker_place(Path(self._folder), self._feed_id)
        self._is_place_announced = place is not None
        return None if place is None else f"tracker: {place[1]}"

    def _start_process(self) -> subprocess.Popen[bytes]:
        settings = {
            "folder": self._folder,
            "feed_id": self._feed_id,
            "is_reported": self._is_reported,
            "uid": os.environ.get(contract.UID, self._folder),
            "opens_s": OPEN_TIMEOUT_S,
            "ends_s": SEND_TIMEOUT_S,
            "closes_s": CLOSE_TIMEOUT_S,
            **json.loads(self._tracker_json),
        }
        inherited = isolated.inherited_environ(os.environ).items()
        environ = {key: value for key, value in inherited if not key.startswith(_RANK_VARIABLES)}
        with open(self._log_path, "ab") as log:
            return subprocess.Popen(
                isolated.build_command("jaxlaunch.trainer.tracking", json.dumps(settings)),
                env=environ | {"JAX_PLATFORMS": "cpu"},
                # The end of this process closes the pipe, even if it is killed.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only the training.
                start_new_session=True,
            )

    def close(self) -> str | None:
        """Wait until the remaining lines are sent.

        A process that failed or was killed during the training is started again, since the cause
        may have passed.

        Returns:
            None, or a sentence about lines that the tracker does not have.
        """
        if self._process.poll() is not None:
            self._wait_for_exit(0.0)
            # If the new process does not start, the exit of the first one is reported.
            with contextlib.suppress(OSError):
                self._process = self._start_process()
        code = self._wait_for_exit(NOTICE_AFTER_S)
        if code is None:
            limits = f"{OPEN_TIMEOUT_S:g} s to open and {SEND_TIMEOUT_S:g} s more"
            print(f"the training has ended; its tracker has {limits}", flush=True)
            limit_s = OPEN_TIMEOUT_S + SEND_TIMEOUT_S + CLOSE_TIMEOUT_S + STOP_WAIT_S
            code = self._wait_for_exit(limit_s - NOTICE_AFTER_S)
        if code is None:
            # The tracker blocks the whole interpreter, with the thread that watches its time.
            self._process.kill()
            self._process.wait()
        busy = f"was still busy {SEND_TIMEOUT_S:g} s after the training"
        not_opened = f"was not open {OPEN_TIMEOUT_S:g} s after the training"
        reasons = {None: busy, LATE_CODE: busy, NOT_OPENED_CODE: not_opened}
        return self._explain_exit(code, reasons)

    def close_at_stop(self) -> str | None:
        """Wait like `close`, but only briefly, after a stop.

        The process then sends the remaining lines on its own, if the machine keeps running.
        """
        code = self._wait_for_exit(STOP_WAIT_S)
        return self._explain_exit(code, {None: f"was still busy {STOP_WAIT_S:g} s after the stop"})

    def _wait_for_exit(self, timeout_s: float) -> int | None:
        """Tell the process that the training has ended, and return its exit code.

        Returns:
            The exit code, or None if the process still runs after `timeout_s`.
        """
        assert self._process.stdin is not None
        self.is_closed = True
        with contextlib.suppress(OSError):
            if not self._process.stdin.closed:
                self._process.stdin.write(f"{self.last_step}\n".encode())
            self._process.stdin.close()
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def _explain_exit(self, code: int | None, reasons: Mapping[int | None, str]) -> str | None:
        """Return a sentence about an exit code, or None if the tracker has every line."""
        if code == 0:
            return None
        reason = reasons.get(code, f"failed (exit {code})")
        hint = "the next `launcher run` of the job hands over the rest"
        detail = f"{self._log_path} has its words; the run folder has every point, and {hint}"
        return f"the tracker {reason}: {detail}"


def has_tracker() -> bool:
    """Return whether the job names a tracker."""
    return contract.TRACKER in os.environ


def writes_events() -> bool:
    """Return whether the tracker writes TensorBoard's event files, so that nothing else must."""
    return has_tracker() and json.loads(os.environ[contract.TRACKER])["tracker"] == "tensorboard"


# The feed of this process. Both `jaxlaunch.run` and calls of `report` in the same program use it.
_feed: TrackerFeed | None = None


def start_feed(folder: str, *, is_reported: bool = False) -> TrackerFeed | None:
    """Return the feed of the job's tracker, started if none is running, or None without a tracker.

    Raises:
        OSError: The process cannot be started.
        ModuleNotFoundError: The package of the tracker is not installed.
    """
    global _feed
    if not has_tracker():
        return None
    if _feed is None or _feed.is_closed:
        tracker_json = os.environ[contract.TRACKER]
        _check_package(json.loads(tracker_json)["tracker"])
        _feed = TrackerFeed(folder, tracker_json, is_reported=is_reported)
    return _feed


def _check_package(name: str) -> None:
    if name not in PACKAGES:
        return
    spec = importlib.util.find_spec(name)
    # W&B writes its runs to a folder `wandb`, which Python treats as a package without an origin.
    if spec is None or spec.origin is None:
        hint = f"install it next to jaxlaunch, such as with `pip install {name}`"
        raise ModuleNotFoundError(f"the package {name} is not installed here: {hint}", name=name)

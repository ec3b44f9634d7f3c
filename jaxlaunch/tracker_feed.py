"""Start and end of the program that sends a run's metrics to a tracker during the training.

The program, `jaxlaunch.trainer.tracking`, is a separate process that follows the journals of the
run folder, so that no step waits for a tracker that blocks, fails or needs much memory. Rank 0
starts it: the training loop, or a program of the user with its first report.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from jaxlaunch import contract, isolated
from jaxlaunch.runs import layout

# The trackers that are packages of their own. A class of the user is imported by the program.
PACKAGES = ("wandb", "mlflow", "trackio")
# Output of the tracker's program, in the run folder.
LOG_FILE = "tracker.log"
# Exit codes of the program (EX_UNAVAILABLE, EX_TEMPFAIL): the tracker does not open, or does not
# return.
NOT_OPENED_CODE, LATE_CODE = 69, 75
# Time after the training for a tracker to open. Importing it takes minutes on a busy machine.
OPENS_S = 120.0
# Time after the training, and after the tracker has opened, to send the remaining lines.
ENDS_S = 30.0
# Additional time for a tracker that is told to close before it has every line.
CLOSES_S = 10.0
# A stop waits only briefly, because the hosts are to be released.
STOP_WAIT_S = 5.0
# After this time, the end of a training prints what it waits for.
NOTICE_AFTER_S = 3.0

# Variables of a rank that the program does not inherit. A tracker that imports JAX must neither
# take a device nor join the other processes. Without the run's uid and the file of its stacks, the
# program is not killed with the leftovers of a killed rank, whose last lines it has to send.
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
    """The running program. Raises OSError if it cannot be started.

    `is_reported` is whether the agent writes the journals, from the reports of a program.
    """

    def __init__(self, folder: str, job: str, *, is_reported: bool) -> None:
        self._is_reported = is_reported
        self._folder, self._job, self._log = folder, job, os.path.join(folder, LOG_FILE)
        with open(self._log, "wb"):
            pass
        self._is_place_announced = False
        # The last step of a program that reports to an agent, which writes the journals.
        self.last_step = -1
        self.is_closed = False
        self._process = self._start_process()

    def announce_place(self) -> str | None:
        """Return a line with the place of the run at its tracker, once, when it is open."""
        if self._is_place_announced:
            return None
        place = layout.read_tracker_place(Path(self._folder))
        self._is_place_announced = place is not None
        return None if place is None else f"tracker: {place[1]}"

    def _start_process(self) -> subprocess.Popen[bytes]:
        settings = {
            "folder": self._folder,
            "is_reported": self._is_reported,
            "uid": os.environ.get(contract.UID, self._folder),
            "opens_s": OPENS_S,
            "ends_s": ENDS_S,
            "closes_s": CLOSES_S,
            **json.loads(self._job),
        }
        inherited = isolated.inherited_environ(os.environ).items()
        environ = {key: value for key, value in inherited if not key.startswith(_RANK_VARIABLES)}
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                isolated.build_command("jaxlaunch.trainer.tracking", json.dumps(settings)),
                env=environ | {"JAX_PLATFORMS": "cpu"},
                # The pipe closes with this process, however it ends.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                # Ctrl-C must only reach the training.
                start_new_session=True,
            )

    def close(self) -> str | None:
        """Wait until the remaining lines are sent; return a sentence if that exceeds the limits.

        If it failed or was killed during the training, it is started again, since the cause may be
        gone.
        """
        if self._process.poll() is not None:
            self._end_process(0.0)
            # If it does not start, the end of the first process is reported.
            with contextlib.suppress(OSError):
                self._process = self._start_process()
        code = self._end_process(NOTICE_AFTER_S)
        if code is None:
            limits = f"{OPENS_S:g} s to open and {ENDS_S:g} s more"
            print(f"the training has ended; its tracker has {limits}", flush=True)
            most_s = OPENS_S + ENDS_S + CLOSES_S + STOP_WAIT_S
            code = self._end_process(most_s - NOTICE_AFTER_S)
        if code is None:
            # Such a tracker even keeps its own deadline from running.
            self._process.kill()
            self._process.wait()
        busy = f"was still busy {ENDS_S:g} s after the training"
        not_opened = f"was not open {OPENS_S:g} s after the training"
        reasons = {None: busy, LATE_CODE: busy, NOT_OPENED_CODE: not_opened}
        return self._explain_exit(code, reasons)

    def close_at_stop(self) -> str | None:
        """Do the same at a stop, but wait only briefly.

        After that the program sends the remaining lines on its own, if the machine keeps running.
        """
        code = self._end_process(STOP_WAIT_S)
        return self._explain_exit(code, {None: f"was still busy {STOP_WAIT_S:g} s after the stop"})

    def _end_process(self, timeout_s: float) -> int | None:
        """Announce the training's end; return the program's exit code, or None at the timeout."""
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
        """Return a sentence about an exit code; None if the tracker has every point."""
        if code == 0:
            return None
        reason = reasons.get(code, f"failed (exit {code})")
        hint = "the next `launcher run` of the job hands over the rest"
        detail = f"{self._log} has its words; the run folder has every point, and {hint}"
        return f"the tracker {reason}: {detail}"


def has_tracker() -> bool:
    """Return whether the job names a tracker."""
    return contract.TRACKER in os.environ


def writes_events() -> bool:
    """Return whether the tracker writes event files, which nothing else must write then."""
    return has_tracker() and json.loads(os.environ[contract.TRACKER])["tracker"] == "tensorboard"


# The feed of this process: a program that calls `jaxlaunch.run` may report by itself, too.
_feed: TrackerFeed | None = None


def start_feed(folder: str, *, is_reported: bool = False) -> TrackerFeed | None:
    """Start the feed of the job's tracker, if it has one, or return the one that is running.

    Raises:
        OSError: It cannot be started.
        ModuleNotFoundError: The package of the tracker is not installed.
    """
    global _feed
    if not has_tracker():
        return None
    if _feed is None or _feed.is_closed:
        job = os.environ[contract.TRACKER]
        _check_package(json.loads(job)["tracker"])
        _feed = TrackerFeed(folder, job, is_reported=is_reported)
    return _feed


def _check_package(name: str) -> None:
    spec = importlib.util.find_spec(name) if name in PACKAGES else None
    # W&B names its folder of runs `wandb`, which Python takes for a package without an origin.
    if name in PACKAGES and (spec is None or spec.origin is None):
        hint = f"install it next to jaxlaunch, such as with `pip install {name}`"
        raise ModuleNotFoundError(f"the package {name} is not installed here: {hint}", name=name)

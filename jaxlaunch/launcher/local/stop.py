"""Stops a run on this machine from another terminal, as Ctrl-C in its own does: it saves, then ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.runs import catalog
from jaxlaunch.runs.layout import LOCK
from jaxlaunch.runs.lock import Holder, find_holder

POLL_S = 0.1


def stop(run: Run, file: str = LOCK) -> None:
    """Has the run save and end, and returns when it knows. A run that already stops is not asked again: a second
    signal would kill it. `file` is the lock that it holds in its folder.

    Raises UserError where nobody runs in the folder, or it is not for this user or this machine to stop.
    """
    with _alone(run):
        holder = find_holder(run.folder, file)
        if holder is None:
            raise UserError(f"Run {run.name} is not running: there is nothing to stop.", f"see {run.folder}.")
        if not holder.is_here:
            raise UserError(
                f"Run {run.name} runs on another machine, or in a container whose processes cannot be seen from here.",
                "stop it there.",
            )
        if not holder.is_stopping:
            _ask(run, holder, file)


def until_ended(run: Run, limit_s: float, file: str = LOCK) -> bool:
    """Waits until nobody runs in the folder any more; False where somebody still does after `limit_s`."""
    until = time.monotonic() + limit_s
    while (goes_on := find_holder(run.folder, file) is not None) and time.monotonic() < until:
        time.sleep(POLL_S)
    return not goes_on


def _ask(run: Run, holder: Holder, file: str) -> None:
    """Sends the launcher SIGTERM, and waits until it has said in the lock that it stops."""
    if holder.pid is None:
        raise UserError(f"Run {run.name} is just starting, and does not say who it is.", "try again.")
    try:
        process = os.pidfd_open(holder.pid)
    except OSError:
        return  # it has ended
    try:
        if find_holder(run.folder, file) != holder:
            return  # it ended before the descriptor was of it, and its number may be another's
        signal.pidfd_send_signal(process, signal.SIGTERM)
    except PermissionError:
        owner = catalog.user_name(os.stat(f"/proc/{holder.pid}").st_uid)
        raise UserError(f"Run {run.name} is {owner}'s: you may not stop it.", f"ask {owner}.") from None
    except ProcessLookupError:
        return
    finally:
        os.close(process)
    while find_holder(run.folder, file) == holder:
        time.sleep(POLL_S)


@contextlib.contextmanager
def _alone(run: Run) -> Iterator[None]:
    """Held while a run is asked to stop: two who ask at once would be two signals, and the second one kills."""
    descriptor = os.open(run.folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)

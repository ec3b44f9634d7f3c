"""Sends the metrics of a run to its tracker: `python -m jaxlaunch.trainer.tracking JSON`.

It follows metrics.jsonl and eval.jsonl in the run folder, and sends each line once across restarts:
`tracker.json` stores the id of the run and the last step of each file. If a step is trained again
after a restart, its first line counts.

A tracker only has to resume a run by its id and to accept numbers by step. Its own environment
variables, such as WANDB_PROJECT, MLFLOW_TRACKING_URI and TRACKIO_DIR, configure everything else.
Without a network or a key it stores the run in the run folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import netrc
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

from jaxlaunch import atomic_file
from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import STEP, TensorBoard
from jaxlaunch.trainer.tracking.tracker_feed import LATE_CODE, NOT_OPENED_CODE

STATE_FILE, LOCK_FILE = "tracker.json", ".tracker.lock"
POLL_S = 0.5
# The training has priority.
NICENESS = 10


def main() -> None:
    """Send lines until the training ends, and then the remaining ones."""
    settings = json.loads(sys.argv[1])
    for number in (signal.SIGINT, signal.SIGTERM):
        # This program ends when the training does, not on a signal.
        signal.signal(number, signal.SIG_IGN)
    os.nice(NICENESS)
    course = _Lifecycle()
    threading.Thread(target=_watch_training, args=(course, settings), daemon=True).start()
    with open(os.path.join(settings["folder"], LOCK_FILE), "w") as lock:
        # The program of an earlier attempt may still be sending its last lines.
        fcntl.flock(lock, fcntl.LOCK_EX)
        _hand_over(settings, course)
    if course.is_late.is_set():
        sys.exit(LATE_CODE)


class _Lifecycle:
    """Events: the training has ended, the tracker is open, no time is left for more lines."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.is_open = threading.Event()
        self.is_late = threading.Event()


def _watch_training(course: _Lifecycle, limits: Mapping[str, Any]) -> None:
    """Wait for the end of the training, and end a tracker that does not open or does not return."""
    # The loop does not use stdin's buffer: Python aborts if a thread holds it at exit.
    while os.read(sys.stdin.fileno(), 1 << 16):
        pass
    course.is_over.set()
    if not course.is_open.wait(limits["opens_s"]):
        os._exit(NOT_OPENED_CODE)
    time.sleep(limits["ends_s"])
    # Read between two lines: a line that was sent but not recorded would be sent again.
    course.is_late.set()
    time.sleep(limits["closes_s"])
    os._exit(LATE_CODE)


def _hand_over(settings: Mapping[str, Any], course: _Lifecycle) -> None:
    """Send each line as it appears, until the training has ended or the time is up."""
    folder = settings["folder"]
    state = _TrackerState(folder, settings["tracker"], settings["uid"])
    run = Run(state.id, settings["name"], folder, max(state.sent.values(), default=0))
    tracker = open_tracker(settings["tracker"], run)
    course.is_open.set()
    journals = layout.JOURNALS.items()
    readers = {name: _JournalReader(os.path.join(folder, file)) for name, file in journals}
    is_last = False
    while True:
        rows = [
            (row.pop(STEP), journal, row)
            for journal, reader in readers.items()
            for row in reader.read_rows()
        ]
        for step, journal, row in sorted(rows, key=lambda item: (item[0], item[1] == "eval")):
            if step > state.sent.get(journal, -1) and not course.is_late.is_set():
                row.pop("time", None)
                # The names are those of the TensorBoard events.
                values = {
                    f"{layout.JOURNAL_PREFIXES[journal]}/{name}": float(value)
                    for name, value in row.items()
                    if isinstance(value, int | float)
                }
                tracker.log(step, values)
                state.record_step(journal, step)
        state.sync_file()
        if is_last:
            return tracker.close()
        # One more round sends the lines that were written before the training ended.
        is_last = course.is_over.wait(POLL_S)


class _TrackerState:
    """State that survives restarts: the run's id at its tracker, and the last step sent."""

    def __init__(self, folder: str, tracker: str, uid: str) -> None:
        self._path = Path(folder, STATE_FILE)
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads(self._path.read_text())
        # Another tracker has received nothing.
        state = state if state.get("tracker") == tracker else {}
        # The uid is the same in all pods of a job, for the case that its run folder does not
        # survive them.
        self._tracker = tracker
        self.id = str(state.get("id") or uuid.uuid5(uuid.NAMESPACE_OID, uid).hex)
        self.sent: dict[str, int] = dict(state.get("sent") or {})
        self._write_file(is_synced=True)

    def record_step(self, journal: str, step: int) -> None:
        """Record that the tracker has the line of this step, even if this process is killed now."""
        self.sent[journal] = step
        # A sync for each line would take longer than many trackers do, and there are only 30 s for
        # the last lines.
        self._write_file(is_synced=False)

    def sync_file(self) -> None:
        """Sync the file if it has changed."""
        if self._has_news:
            self._write_file(is_synced=True)

    def _write_file(self, *, is_synced: bool) -> None:
        state = {"tracker": self._tracker, "id": self.id, "sent": self.sent}
        atomic_file.write_file(self._path, json.dumps(state).encode(), is_synced=is_synced)
        self._has_news = not is_synced


class _JournalReader:
    """A reader that follows a growing journal and returns its new complete lines."""

    def __init__(self, path: str) -> None:
        self._path, self._rest = path, b""
        self._file: BinaryIO | None = None

    def read_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the objects in the new lines, without invalid ones."""
        if self._file is None:
            try:
                # It stays open until the program ends.
                self._file = open(self._path, "rb")  # noqa: SIM115
            except OSError:
                return
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict) and isinstance(row.get(STEP), int):
                yield row


# --- trackers -------------------------------------------------------------------------------------


class Run(NamedTuple):
    """The run: its id across restarts, the job's name, its folder, and the last step sent."""

    id: str
    name: str
    folder: str
    step: int


class Tracker(Protocol):
    """Interface of a tracker, a class that is called with a Run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step; steps come once, in order, `train/…` before `eval/…`."""

    def close(self) -> None:
        """End the run. It may be resumed later."""


class Wandb:
    """Weights & Biases, offline if no key is set."""

    def __init__(self, run: Run) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY"))
        # `wandb login` stores a key here.
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            has_key |= any("wandb" in host for host in netrc.netrc().hosts)
        if not has_key:
            os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_PROJECT", run.name)
        self._run: Any = wandb.init(id=run.id, name=run.name, resume="allow", dir=run.folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers to those of the same step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Upload the remaining numbers."""
        self._run.finish()


class Mlflow:
    """MLflow at MLFLOW_TRACKING_URI, or a file store in the run folder."""

    def __init__(self, run: Run) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{os.path.join(run.folder, 'mlruns')}"
        self._client: Any = MlflowClient(uri)
        self._metric: Any = Metric
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            experiment_id = self._client.create_experiment(name)
        else:
            experiment_id = experiment.experiment_id
        runs = self._client.search_runs([experiment_id], f"tags.`jaxlaunch.id` = '{run.id}'")
        tags = {"jaxlaunch.id": run.id}
        runs = runs or [self._client.create_run(experiment_id, tags=tags, run_name=run.name)]
        self._id = runs[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one request for all numbers of the step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        """End the run; a later start sets it to RUNNING again."""
        self._client.set_terminated(self._id)


class Trackio:
    """trackio, with a SQLite file in TRACKIO_DIR or in the run folder."""

    def __init__(self, run: Run) -> None:
        os.environ.setdefault("TRACKIO_DIR", os.path.join(run.folder, "trackio"))
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or run.name
        self._trackio: Any = trackio
        trackio.init(project=project, name=f"{run.name}-{run.id[:8]}", resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row for the step."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Write the remaining rows."""
        self._trackio.finish()


class Events(TensorBoard):
    """TensorBoard's event files, in `tensorboard/` of the run folder."""

    log = TensorBoard.write

    def __init__(self, run: Run) -> None:
        super().__init__(os.path.join(run.folder, layout.TENSORBOARD), run.step)


def open_tracker(name: str, run: Run) -> Tracker:
    """Return the tracker of this name, or the user's class `module:Name`."""
    kinds: dict[str, Callable[[Run], Tracker]] = {"wandb": Wandb, "mlflow": Mlflow}
    kinds |= {"trackio": Trackio, "tensorboard": Events}
    if name in kinds:
        return kinds[name](run)
    # The import is late because it pulls in other modules.
    from jaxlaunch.trainer import user_code

    tracker: Tracker = user_code.load_object(name)(run)
    return tracker


if __name__ == "__main__":
    main()

"""The trackers by name, each with the little that is asked of it: one run, resumed by its id, and numbers by step.

What else a tracker is told, its own environment variables say: WANDB_PROJECT, MLFLOW_TRACKING_URI, TRACKIO_DIR. Without
a network or a key each keeps the run in the run folder.
"""

from __future__ import annotations

import netrc
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from jaxlaunch.runs.journal import TensorBoard


class Run(NamedTuple):
    """The run: its id, which no restart changes, the job's name, its folder, and the last step that is handed over."""

    id: str
    name: str
    folder: str
    step: int


class Tracker(Protocol):
    """What a tracker of yours is: a class that is called with a Run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Keeps the numbers of a step; each step comes once, in order, its `train/…` before its `eval/…`."""

    def close(self) -> None:
        """The training has ended, for now or for good."""


class Wandb:
    """Weights & Biases; offline where no key is set."""

    def __init__(self, run: Run) -> None:
        import wandb

        if not os.environ.get("WANDB_API_KEY") and not _has_login():
            os.environ.setdefault("WANDB_MODE", "offline")
        os.environ.setdefault("WANDB_PROJECT", run.name)
        self._run: Any = wandb.init(id=run.id, name=run.name, resume="allow", dir=run.folder)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Adds to what the step has already."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Uploads what is left."""
        self._run.finish()


def _has_login() -> bool:
    """Whether `wandb login` has kept a key for this user."""
    try:
        return any("wandb" in host for host in netrc.netrc().hosts)
    except (OSError, netrc.NetrcParseError):
        return False


class Mlflow:
    """MLflow: by MLFLOW_TRACKING_URI, else a file store in the run folder."""

    def __init__(self, run: Run) -> None:
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{os.path.join(run.folder, 'mlruns')}"
        self._client: Any = MlflowClient(uri)
        self._metric: Any = Metric
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.name
        found = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if found is None else found.experiment_id
        known = self._client.search_runs([where], f"tags.`jaxlaunch.id` = '{run.id}'")
        tags = {"jaxlaunch.id": run.id}
        one = known[0] if known else self._client.create_run(where, tags=tags, run_name=run.name)
        self._id = one.info.run_id
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One request for all numbers of the step."""
        at = int(time.time() * 1000)
        self._client.log_batch(self._id, [self._metric(name, value, at, step) for name, value in values.items()])

    def close(self) -> None:
        """A later start sets it to RUNNING again."""
        self._client.set_terminated(self._id)


class Trackio:
    """trackio: a SQLite file, in the run folder where TRACKIO_DIR does not say where."""

    def __init__(self, run: Run) -> None:
        os.environ.setdefault("TRACKIO_DIR", os.path.join(run.folder, "trackio"))
        import trackio

        project = os.environ.get("TRACKIO_PROJECT") or run.name
        self._trackio: Any = trackio
        trackio.init(project=project, name=f"{run.name}-{run.id[:8]}", resume="allow", embed=False)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """A row of the step."""
        self._trackio.log(dict(values), step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._trackio.finish()


class Events:
    """TensorBoard's event files, in `tensorboard/` of the run folder."""

    def __init__(self, run: Run) -> None:
        self._board = TensorBoard(os.path.join(run.folder, "tensorboard"), run.step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """One event."""
        self._board.write(step, values)

    def close(self) -> None:
        """Closes the file."""
        self._board.close()


_KNOWN: Mapping[str, Callable[[Run], Tracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "tensorboard": Events,
}


def open_tracker(name: str, run: Run) -> Tracker:
    """The tracker of this name, or the user's class `module:Name`."""
    if name in _KNOWN:
        return _KNOWN[name](run)
    from jaxlaunch.trainer import user_code  # with what that imports

    opened: Tracker = user_code.load(name)(run)
    return opened

"""The trackers that a job can name: wandb, MLflow, trackio, TensorBoard, or a class of the user.

A tracker only has to resume a run by its id and to accept numbers by step. Its own environment
variables, such as MLFLOW_TRACKING_URI, say where its server is. Without a server or a key, W&B
stores the run in the run folder, and MLflow and trackio in a store next to it that all runs there
share.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import json
import netrc
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import TensorBoard

# The variables with which a user of these trackers names the project.
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
}
# Limits of the servers: W&B's of a tag, MLflow's of a parameter and of a request.
_TAG_CHARS, _PARAMETER_CHARS, _PARAMETERS_PER_REQUEST = 64, 500, 100


class Run(NamedTuple):
    """The run that a tracker is called with."""

    # It is the same across restarts.
    id: str
    # The job's name.
    name: str
    folder: str
    # The last step that was sent.
    step: int
    project: str
    # The sweep of the run, if it has one.
    group: str | None
    # The labels of the job.
    labels: Mapping[str, str]
    # The job, without its environment variables.
    config: Mapping[str, Any]

    @property
    def tags(self) -> list[str]:
        """Return the labels as tags: `baseline` of a label without a value, else `team=vision`."""
        return [f"{key}={value}" if value else key for key, value in self.labels.items()]


class Place(NamedTuple):
    """Where a person sees the run: at an address, or after a command."""

    kind: str
    text: str


class Tracker(Protocol):
    """Interface of a tracker, a class that is called with a Run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step; steps come once, in order, `train/…` before `eval/…`."""

    def close(self) -> None:
        """End the run. It may be resumed later."""


class BuiltInTracker(abc.ABC):
    """A tracker of this module, which also stores samples and says where the run is."""

    # Whether this start of the run stores every step of it, those of earlier starts too.
    is_complete = False

    @abc.abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step, as any tracker does."""

    @abc.abstractmethod
    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store the texts that a model generated after `step` steps."""

    @abc.abstractmethod
    def describe_place(self) -> Place:
        """Return where the run can be seen."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the run. It may be resumed later."""


class Wandb(BuiltInTracker):
    """Weights & Biases, offline if no key is set.

    A process of W&B keeps the newest 32 KiB of an offline run in memory, and is killed with its
    machine. Each start therefore stores the whole run in a folder of its own, and deletes those of
    earlier starts when it is complete.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY"))
        # `wandb login` stores a key here.
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            has_key |= any("wandb" in host for host in netrc.netrc().hosts)
        if not has_key:
            os.environ.setdefault("WANDB_MODE", "offline")
        self._table = wandb.Table
        self._run: Any = wandb.init(
            id=run.id,
            name=run.name,
            project=run.project,
            group=run.group,
            tags=[tag[:_TAG_CHARS] for tag in run.tags] or None,
            config=dict(run.config),
            # A start with other keys of the job changes the config.
            allow_val_change=True,
            resume="allow",
            dir=run.folder,
        )
        self.is_complete = bool(self._run.offline)
        # <run folder>/wandb/offline-run-<date>-<id>/files
        self._start = Path(self._run.dir).parent
        earlier = self._start.parent.glob(f"offline-run-*-{run.id}") if self.is_complete else ()
        self._earlier_starts = [folder for folder in earlier if folder != self._start]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers to those of the same step."""
        self._run.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add a table with a row for each sample."""
        columns = list(dict.fromkeys(key for sample in samples for key in sample))
        rows = [[_format_cell(sample.get(key)) for key in columns] for sample in samples]
        self._run.log({"samples": self._table(columns=columns, data=rows)}, step=step)

    def describe_place(self) -> Place:
        """Return the address, or the command that uploads an offline run."""
        if self.is_complete:
            return Place("command", f"wandb sync {shlex.quote(str(self._start))}")
        return Place("url", str(self._run.url))

    def close(self) -> None:
        """Upload the remaining numbers."""
        self._run.finish()
        for folder in self._earlier_starts:
            shutil.rmtree(folder, ignore_errors=True)


class Mlflow(BuiltInTracker):
    """MLflow at MLFLOW_TRACKING_URI, or a file store."""

    def __init__(self, run: Run) -> None:
        from mlflow.entities import Metric, Param, RunTag
        from mlflow.tracking import MlflowClient

        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        store = _find_store(run.folder, "mlruns")
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"file:{store}"
        self._client: Any = MlflowClient(self._uri)
        self._metric: Any = Metric
        # Runs that start at the same time would create an experiment of the same name each.
        with _hold_store(None if os.environ.get("MLFLOW_TRACKING_URI") else store):
            experiment = self._client.get_experiment_by_name(run.project)
            if experiment is None:
                self._experiment_id = self._client.create_experiment(run.project)
            else:
                self._experiment_id = experiment.experiment_id
            query = f"tags.`jaxlaunch.id` = '{run.id}'"
            runs = self._client.search_runs([self._experiment_id], query)
            if not runs:
                tags = {"jaxlaunch.id": run.id}
                runs = [self._client.create_run(self._experiment_id, tags=tags, run_name=run.name)]
        self._id = runs[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")
        tags = dict(run.labels) | ({} if run.group is None else {"sweep": run.group})
        config = {
            key: value[:_PARAMETER_CHARS] for key, value in flatten_config(run.config).items()
        }
        # MLflow refuses another value of a parameter. The key of a later start becomes a tag.
        earlier = runs[0].data.params
        tags |= {key: value for key, value in config.items() if earlier.get(key, value) != value}
        params = [Param(key, value) for key, value in config.items() if key not in earlier]
        for begin in range(0, len(params), _PARAMETERS_PER_REQUEST):
            part = params[begin : begin + _PARAMETERS_PER_REQUEST]
            self._client.log_batch(self._id, params=part)
        self._client.log_batch(self._id, tags=[RunTag(*item) for item in tags.items()])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one request for all numbers of the step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store an artifact with the samples."""
        self._client.log_dict(self._id, {"samples": list(samples)}, f"samples/{step:09}.json")

    def describe_place(self) -> Place:
        """Return the address at a server, or the command that shows the file store."""
        if self._uri.startswith("http"):
            path = f"#/experiments/{self._experiment_id}/runs/{self._id}"
            return Place("url", f"{self._uri.rstrip('/')}/{path}")
        return Place("command", f"mlflow ui --backend-store-uri {shlex.quote(self._uri)}")

    def close(self) -> None:
        """End the run; a later start sets it to RUNNING again."""
        self._client.set_terminated(self._id)


class Trackio(BuiltInTracker):
    """trackio, with a SQLite file in TRACKIO_DIR."""

    def __init__(self, run: Run) -> None:
        store = _find_store(run.folder, "trackio")
        self._is_own_store = os.environ.setdefault("TRACKIO_DIR", store) == store
        import trackio

        self._trackio: Any = trackio
        self._project, self._store = run.project, store
        config = dict(run.config) | ({"tags": run.tags} if run.labels else {})
        with _hold_store(store if self._is_own_store else None):
            trackio.init(
                project=run.project,
                name=f"{run.name}-{run.id[:8]}",
                group=run.group,
                config=config,
                resume="allow",
                embed=False,
            )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add a row for the step."""
        self._trackio.log(dict(values), step=step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add the samples as one text."""
        text = "\n\n".join(_format_sample(sample) for sample in samples)
        self._trackio.log({"samples": self._trackio.Markdown(text)}, step=step)

    def describe_place(self) -> Place:
        """Return the command that shows the project."""
        variable = f"TRACKIO_DIR={shlex.quote(self._store)} " if self._is_own_store else ""
        command = f"trackio show --project {shlex.quote(self._project)}"
        return Place("command", variable + command)

    def close(self) -> None:
        """Write the remaining rows."""
        self._trackio.finish()


class Events(BuiltInTracker):
    """TensorBoard's event files, in `tensorboard/` of the run folder."""

    def __init__(self, run: Run) -> None:
        self._folder = os.path.join(run.folder, layout.TENSORBOARD)
        self._board = TensorBoard(self._folder, run.step)
        config = json.dumps(run.config, indent=1, ensure_ascii=False)
        # An indented block of Markdown, which TensorBoard shows as it is written.
        self._board.write_text(run.step, "job", "    " + config.replace("\n", "\n    "))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write an event."""
        self._board.write(step, values)

    def close(self) -> None:
        """Close the file."""
        self._board.close()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples as one text."""
        self._board.write_text(step, "samples", "\n\n".join(map(_format_sample, samples)))

    def describe_place(self) -> Place:
        """Return the command that shows the run."""
        return Place("command", f"tensorboard --logdir {shlex.quote(self._folder)}")


BUILT_IN: Mapping[str, Callable[[Run], BuiltInTracker]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "trackio": Trackio,
    "tensorboard": Events,
}


def open_tracker(name: str, run: Run) -> Tracker:
    """Return the tracker of this name, or the user's class `module:Name`."""
    if name in BUILT_IN:
        return BUILT_IN[name](run)
    # The import is late because it pulls in other modules.
    from jaxlaunch.trainer import user_code

    tracker: Tracker = user_code.load_object(name)(run)
    return tracker


def flatten_config(value: Any, prefix: str = "") -> dict[str, str]:
    """Return the values of nested blocks and lists as texts, by dotted keys."""
    if isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, Mapping | list) for item in value):
        items = [(str(index), item) for index, item in enumerate(value)]
    else:
        return {prefix: _format_cell(value)}
    flat = dict[str, str]()
    for key, item in items:
        flat |= flatten_config(item, f"{prefix}.{key}" if prefix else key)
    return flat


def _format_cell(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _format_sample(sample: Mapping[str, Any]) -> str:
    return "\n\n".join(f"**{key}:** {_format_cell(value)}" for key, value in sample.items())


def _find_store(folder: str, name: str) -> str:
    """Return the folder of a local store that the runs of a folder share."""
    run = Path(folder)
    parent = run.parent.parent if layout.is_sweep(run.parent) else run.parent
    # A run keeps the store that it began in, and one whose neighbours are of others has its own.
    is_own = (run / name).exists() or not os.access(parent, os.W_OK)
    return str((run if is_own else parent) / name)


@contextlib.contextmanager
def _hold_store(store: str | None) -> Iterator[None]:
    """Keep other runs from a local store in the meantime."""
    if store is None:
        yield
        return
    os.makedirs(store, exist_ok=True)
    with open(os.path.join(store, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

"""The trackers that a job can name: wandb, MLflow, trackio, TensorBoard, or a class of the user.

A tracker must be able to resume a run by its id, and to store numbers by step. Its own environment
variables, such as MLFLOW_TRACKING_URI, name its server. Without a server or a key, W&B stores the
run in the run folder. MLflow and trackio then use a store next to the run folder, which all runs
there share.
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import importlib.util
import io
import json
import netrc
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxlaunch.runs import layout
from jaxlaunch.runs.journal import TensorBoard
from jaxlaunch.trainer.tracking.media import Media

# The environment variable of each tracker that names the project.
PROJECT_VARIABLES = {
    "wandb": "WANDB_PROJECT",
    "mlflow": "MLFLOW_EXPERIMENT_NAME",
    "trackio": "TRACKIO_PROJECT",
}
# Limits of W&B for a tag, and of MLflow for a parameter and a request.
_TAG_CHARS, _PARAMETER_CHARS, _PARAMETERS_PER_REQUEST = 64, 500, 100


class Run(NamedTuple):
    """The description of a run, with which a tracker is created."""

    # The id is the same across restarts.
    id: str
    # The name of the job.
    name: str
    folder: str
    # The last step that was sent.
    step: int
    project: str
    # The sweep to which the run belongs.
    group: str | None
    # The labels of the job.
    labels: Mapping[str, str]
    # The job, without its environment variables.
    config: Mapping[str, Any]

    @property
    def tags(self) -> list[str]:
        """The labels as tags: `team=vision`, or `baseline` for a label without a value."""
        return [f"{key}={value}" if value else key for key, value in self.labels.items()]


class Place(NamedTuple):
    """The place where a run can be viewed: a URL, or a command that shows it."""

    kind: str
    text: str


class Tracker(Protocol):
    """The interface of a tracker. Its class is called with a Run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step. Steps are in order, and `train/…` comes before `eval/…`."""

    def close(self) -> None:
        """End the run. It may be resumed later."""


class BuiltInTracker(abc.ABC):
    """A tracker of this module, which also stores samples and tells where to view the run."""

    # Whether the steps of earlier starts are sent again, because each start stores the whole run.
    is_complete = False

    @abc.abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Store the numbers of a step, as any tracker does."""

    @abc.abstractmethod
    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store the texts that a model generated after `step` steps."""

    @abc.abstractmethod
    def log_media(self, step: int, media: Media) -> None:
        """Store the pictures, texts and tables of a step."""

    @abc.abstractmethod
    def describe_place(self) -> Place:
        """Return the place where the run can be viewed."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the run. It may be resumed later."""


class Wandb(BuiltInTracker):
    """Weights & Biases, offline if no key is set.

    A process of W&B keeps the newest 32 KiB of an offline run in memory, which are lost if it is
    killed. Each start therefore stores the whole run in its own folder, and deletes the folders of
    earlier starts at its end.
    """

    def __init__(self, run: Run) -> None:
        import wandb

        has_key = bool(os.environ.get("WANDB_API_KEY"))
        # `wandb login` stores a key here.
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            has_key |= any("wandb" in host for host in netrc.netrc().hosts)
        if not has_key:
            os.environ.setdefault("WANDB_MODE", "offline")
        self._table, self._image = wandb.Table, wandb.Image
        self._run: Any = wandb.init(
            id=run.id,
            name=run.name,
            project=run.project,
            group=run.group,
            tags=[tag[:_TAG_CHARS] for tag in run.tags] or None,
            config=dict(run.config),
            # A restart with other keys of the job changes the config.
            allow_val_change=True,
            resume="allow",
            dir=run.folder,
        )
        self.is_complete = bool(self._run.offline)
        # W&B drops what is logged with an earlier step than this.
        self._newest_step = int(self._run.step)
        # <run folder>/wandb/offline-run-<date>-<id>/files
        self._offline_folder = Path(self._run.dir).parent
        folders = (
            self._offline_folder.parent.glob(f"offline-run-*-{run.id}") if self.is_complete else ()
        )
        self._earlier_folders = [folder for folder in folders if folder != self._offline_folder]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add the numbers to those of the same step."""
        self._run.log(dict(values), step=step)
        self._newest_step = max(self._newest_step, step)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add a table with a row for each sample."""
        columns = list(dict.fromkeys(key for sample in samples for key in sample))
        rows = [[_format_cell(sample.get(key)) for key in columns] for sample in samples]
        self._run.log({"samples": self._table(columns=columns, data=rows)}, step=step)
        self._newest_step = max(self._newest_step, step)

    def log_media(self, step: int, media: Media) -> None:
        """Add pictures and tables. A text is a table of one cell, which is searchable at W&B."""
        values: dict[str, Any] = {
            name: self._image(picture, caption=f"step {step}")
            for name, picture in _open_pictures(media).items()
        }
        for name, text in media.texts.items():
            values[name] = self._table(columns=["step", "text"], data=[[step, text]])
        for name, table in media.tables.items():
            # A name may also be that of a picture.
            key = f"{name}_table" if name in values else name
            rows = [list(row) for row in table.rows]
            values[key] = self._table(columns=list(table.columns), data=rows)
        if values:
            self._newest_step = max(self._newest_step, step)
            self._run.log(values, step=self._newest_step)

    def describe_place(self) -> Place:
        """Return the address, or the command that uploads an offline run."""
        if self.is_complete:
            return Place("command", f"wandb sync {shlex.quote(str(self._offline_folder))}")
        return Place("url", str(self._run.url))

    def close(self) -> None:
        """Upload the remaining numbers."""
        self._run.finish()
        for folder in self._earlier_folders:
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
        # Without the lock, runs that start at the same time would each create the experiment.
        with _lock_store(None if os.environ.get("MLFLOW_TRACKING_URI") else store):
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
        # MLflow rejects a changed value of a parameter, so it becomes a tag.
        old_params = runs[0].data.params
        tags |= {key: value for key, value in config.items() if old_params.get(key, value) != value}
        params = [Param(key, value) for key, value in config.items() if key not in old_params]
        for begin in range(0, len(params), _PARAMETERS_PER_REQUEST):
            batch = params[begin : begin + _PARAMETERS_PER_REQUEST]
            self._client.log_batch(self._id, params=batch)
        self._client.log_batch(self._id, tags=[RunTag(*item) for item in tags.items()])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send one request for all numbers of the step."""
        now_ms = int(time.time() * 1000)
        metrics = [self._metric(name, value, now_ms, step) for name, value in values.items()]
        self._client.log_batch(self._id, metrics)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Store an artifact with the samples."""
        self._client.log_dict(self._id, {"samples": list(samples)}, f"samples/{step:09}.json")

    def log_media(self, step: int, media: Media) -> None:
        """Store images by key and step, and artifacts with the texts and the tables."""
        for name, picture in _open_pictures(media).items():
            self._client.log_image(self._id, picture, key=_path_name(name), step=step)
        for name, text in media.texts.items():
            self._client.log_text(self._id, text, f"{_path_name(name)}/{step:09}.txt")
        for name, table in media.tables.items():
            # The form of MLflow's own log_table, which needs pandas.
            content = {"columns": list(table.columns), "data": [list(row) for row in table.rows]}
            self._client.log_dict(self._id, content, f"{_path_name(name)}/{step:09}.json")

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
        with _lock_store(store if self._is_own_store else None):
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

    def log_media(self, step: int, media: Media) -> None:
        """Add pictures, texts and tables to the step."""
        values: dict[str, Any] = {
            name: self._trackio.Image(picture, caption=f"step {step}")
            for name, picture in _open_pictures(media).items()
        }
        for name, text in media.texts.items():
            # An indented block of Markdown is shown as it is written.
            values[name] = self._trackio.Markdown(_indent_lines(text))
        for name, table in media.tables.items():
            key = f"{name}_table" if name in values else name
            rows = [list(row) for row in table.rows]
            values[key] = self._trackio.Table(columns=list(table.columns), data=rows)
        if values:
            self._trackio.log(values, step=step)

    def describe_place(self) -> Place:
        """Return the command that shows the project."""
        variable = f"TRACKIO_DIR={shlex.quote(self._store)} " if self._is_own_store else ""
        command = f"trackio show --project {shlex.quote(self._project)}"
        return Place("command", variable + command)

    def close(self) -> None:
        """Write the remaining rows."""
        self._trackio.finish()


class Events(BuiltInTracker):
    """Event files of TensorBoard in the folder `tensorboard/` of the run folder."""

    def __init__(self, run: Run) -> None:
        self._folder = os.path.join(run.folder, layout.TENSORBOARD)
        self._board = TensorBoard(self._folder, run.step)
        config = json.dumps(run.config, indent=1, ensure_ascii=False)
        self._board.write_text(run.step, "job", _indent_lines(config))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write an event."""
        self._board.write(step, values)

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write the samples as one text."""
        self._board.write_text(step, "samples", "\n\n".join(map(_format_sample, samples)))

    def log_media(self, step: int, media: Media) -> None:
        """Write pictures as images, and texts and tables as Markdown."""
        for name, png in media.images.items():
            self._board.write_image(step, name, png)
        for name, text in media.texts.items():
            self._board.write_text(step, name, _indent_lines(text))
        for name, table in media.tables.items():
            self._board.write_text(step, name, table.to_markdown())

    def describe_place(self) -> Place:
        """Return the command that shows the run."""
        return Place("command", f"tensorboard --logdir {shlex.quote(self._folder)}")

    def close(self) -> None:
        """Close the file."""
        self._board.close()


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
    # Only a tracker of the user needs this module, which imports other modules.
    from jaxlaunch.trainer import user_code

    tracker: Tracker = user_code.load_object(name)(run)
    return tracker


def flatten_config(value: Any, prefix: str = "") -> dict[str, str]:
    """Flatten nested blocks and lists to texts by dotted keys."""
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


def _indent_lines(text: str) -> str:
    """Return a block of Markdown that is shown as it is written."""
    return "    " + text.replace("\n", "\n    ")


def _open_pictures(media: Media) -> dict[str, Any]:
    """Return the pictures as objects of Pillow by name, without damaged ones.

    The trackers need Pillow for pictures. The program that reports them may not have it.
    """
    if not media.images or importlib.util.find_spec("PIL") is None:
        return {}
    from PIL import Image

    pictures = dict[str, Any]()
    for name, png in media.images.items():
        try:
            with Image.open(io.BytesIO(png)) as picture:
                picture.load()
        except (OSError, ValueError, SyntaxError) as error:
            print(f"{name} is not a picture: {error}", flush=True)
        else:
            pictures[name] = picture
    return pictures


def _path_name(name: str) -> str:
    """Return a name as MLflow's folders may have it."""
    return "/".join(re.sub(r"[^A-Za-z0-9_-]", "_", part) for part in name.split("/", 1))


def _find_store(folder: str, name: str) -> str:
    """Return the folder of the local store, which the runs in the same folder share."""
    run_folder = Path(folder)
    parent = run_folder.parent
    if layout.is_sweep(parent):
        parent = parent.parent
    # A run keeps the store in which it began, and has its own store if the parent is not writable.
    has_own_store = (run_folder / name).exists() or not os.access(parent, os.W_OK)
    return str((run_folder if has_own_store else parent) / name)


@contextlib.contextmanager
def _lock_store(store: str | None) -> Iterator[None]:
    """Lock a local store against other runs."""
    if store is None:
        yield
        return
    os.makedirs(store, exist_ok=True)
    with open(os.path.join(store, ".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield

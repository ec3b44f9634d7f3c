"""Prints as JSON what W&B, MLflow, trackio and TensorBoard stored: `read_trackers.py FOLDER`.

It runs in the environment of tests/requirements/trackers.txt, and reads W&B's file by its format:
the records of LevelDB's log, after a header of seven bytes.
"""

from __future__ import annotations

import json
import os
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The media that the test writes, by the name that a tracker has for them.
MEDIA = {
    "samples": "samples",
    "images": "reported/digits",
    "texts": "reported/text",
    "confusions": "eval/confusion",
}
BLOCK_BYTES, HEADER_BYTES = 32768, 7


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records of a file of W&B."""
    data, at, record = path.read_bytes(), HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        if (left := BLOCK_BYTES - at % BLOCK_BYTES) < HEADER_BYTES:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record += data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        # A whole record, or the last part of one.
        if kind in (1, 4):
            yield record
            record = b""


def read_wandb(folder: Path) -> dict[str, Any]:
    from wandb.proto import wandb_internal_pb2

    result: dict[str, Any] = {"losses": [], **{name: [] for name in MEDIA}}
    for path in folder.glob("job/wandb/offline-run-*/*.wandb"):
        for text in read_records(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(text)
            if record.WhichOneof("record_type") == "run":
                run = record.run
                result |= {"project": run.project, "group": run.run_group, "tags": list(run.tags)}
                config = {item.key: json.loads(item.value_json) for item in run.config.update}
                result["hosts"], result["lr"] = config["hosts"], config["train"]["optimizer"]["lr"]
            if record.WhichOneof("record_type") == "history":
                values = {
                    (i.key or "/".join(i.nested_key)): i.value_json for i in record.history.item
                }
                step = record.history.step.num
                if "train/loss" in values:
                    result["losses"].append([step, float(values["train/loss"])])
                for name, tag in MEDIA.items():
                    if any(key.startswith(f"{tag}/") for key in values):
                        result[name].append(step)
    return result


def read_mlflow(folder: Path) -> dict[str, Any]:
    from mlflow.tracking import MlflowClient

    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    client = MlflowClient(f"file:{folder}/mlruns")
    experiment = client.get_experiment_by_name("vision")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "train/loss")
    tags = run.data.tags
    return {
        "project": experiment.name,
        "group": tags["sweep"],
        "tags": [f"team={tags['team']}"],
        # The second start had another number of hosts, which a parameter cannot have.
        "hosts": int(tags["hosts"]),
        "lr": float(run.data.params["train.optimizer.lr"]),
        "losses": sorted([metric.step, metric.value] for metric in history),
        **{name: list_mlflow_steps(client, run.info.run_id, tag) for name, tag in MEDIA.items()},
    }


def list_mlflow_steps(client: Any, run_id: str, tag: str) -> list[int]:
    """Return the steps of artifacts like samples/000000002.json and images/a~b+step+2+….png."""
    files = [Path(item.path) for item in client.list_artifacts(run_id, tag)]
    prefix = tag.replace("/", "~") + "+step+"
    names = [Path(item.path).name for item in client.list_artifacts(run_id, "images")]
    steps = {int(name.split("+")[2]) for name in names if name.startswith(prefix)}
    return sorted(steps.union(int(path.stem) for path in files))


def read_trackio(folder: Path) -> dict[str, Any]:
    database = sqlite3.connect(folder / "trackio" / "vision.db")
    ((config_text,),) = database.execute("select config from configs")
    config = json.loads(config_text)
    rows = [
        (step, json.loads(text))
        for step, text in database.execute("select step, metrics from metrics order by id")
    ]
    return {
        "project": "vision",
        "group": config["_Group"],
        "tags": config["tags"],
        "hosts": config["hosts"],
        "lr": config["train"]["optimizer"]["lr"],
        "losses": [[step, row["train/loss"]] for step, row in rows if "train/loss" in row],
        **{name: [step for step, row in rows if tag in row] for name, tag in MEDIA.items()},
    }


def read_tensorboard(folder: Path) -> dict[str, Any]:
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  # the package is there
    from tensorboardX.proto import event_pb2

    losses, config = dict[int, float](), dict[str, Any]()
    steps: dict[str, list[int]] = {name: [] for name in MEDIA}
    for path in sorted(
        (folder / "job" / "tensorboard").iterdir(), key=lambda path: path.stat().st_mtime
    ):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            for value in event.summary.value:
                if value.tag == "train/loss":
                    losses[event.step] = value.simple_value
                elif names := [name for name, tag in MEDIA.items() if tag == value.tag]:
                    steps[names[0]].append(event.step)
                    if names[0] == "images":
                        assert (value.image.width, value.image.height) == (3, 2)
                elif value.tag == "job":
                    assert value.metadata.plugin_data.plugin_name == "text"
                    config = json.loads(value.tensor.string_val[0])
    return {
        "hosts": config["hosts"],
        "lr": config["train"]["optimizer"]["lr"],
        "losses": sorted([step, loss] for step, loss in losses.items()),
        **steps,
    }


READERS = {
    "wandb": read_wandb,
    "mlflow": read_mlflow,
    "trackio": read_trackio,
    "tensorboard": read_tensorboard,
}
if __name__ == "__main__":
    print(json.dumps(READERS[sys.argv[1]](Path(sys.argv[2]))))

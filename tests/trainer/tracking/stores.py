"""What the trackers' own stores hold of a run that was killed three times: `python -m tests.trainer.tracking.stores`.

For each tracker a process writes the journals of a run, as rank 0 does, and is killed; the next one resumes at an
earlier step. Then the store of the tracker, read by its own code where there is any, has one run, and in it each line
of the journals once, with its values. With `--job`, `launcher run` trains a job whose processes and agents are killed
instead (jobs.py). Packages of 300 MB are installed first, in an environment of their own.
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.runs.journal import Journal
from jaxlaunch.trainer.tracking import feeding
from tests import environments
from tests.trainer.tracking import jobs

STARTS = ((0, 60), (40, 130), (120, 200), (200, 300))  # the step that each resumes at, and its last one
PATIENCE_S = 600
BLOCK = 32 * 1024  # of the file of wandb

Found = Mapping[str, list[tuple[int, float]]]  # by name: step, value


def main() -> None:
    """Prints a line for each tracker; exits with 1 where a store is wrong."""
    (packages,) = environments.python("trackers").parents[1].glob("lib/python3*/site-packages")
    sys.path.append(str(packages))
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    is_right, is_job = True, "--job" in sys.argv
    for name in [each for each in sys.argv[1:] if each != "--job"] or STORES:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if is_job:
                run_folder, rows, told = jobs.trained(name, Path(folder), packages)
                print(f"{name}: {told}", flush=True)
            else:
                run(name, folder, packages)
                run_folder, rows = Path(folder), jobs.lines(Path(folder))
            runs, found = STORES[name](run_folder)
            faults = [*compared(rows, found), *[f"{runs} runs"] * (runs != 1)]
            print(f"{name}: {sum(map(len, found.values()))} values; {'; '.join(faults) or 'each once'}", flush=True)
            is_right = is_right and not faults
    sys.exit(not is_right)


def run(name: str, folder: str, packages: Path) -> None:
    """All starts of a run; each but the last is killed."""
    variables = dict(os.environ) | {contract.TRACKER: json.dumps({"tracker": name, "name": "t"})}
    variables["PYTHONPATH"] = os.pathsep.join([os.getcwd(), str(packages)])
    for number, (first, last) in enumerate(STARTS):
        command = [sys.executable, "-m", __spec__.name if __spec__ else "", "--start", folder, str(first), str(last)]
        process = subprocess.Popen(command, env=variables | {contract.UID: f"start-{number}"}, stdout=subprocess.PIPE)
        assert process.stdout is not None and process.stdout.readline() == b"written\n"
        if last < STARTS[-1][1]:
            process.send_signal(signal.SIGKILL)
        assert process.wait(PATIENCE_S) == (0 if last == STARTS[-1][1] else -signal.SIGKILL)


def start(folder: str, first: int, last: int) -> None:
    """Writes the journals of one start, and ends the feed as a training does, again where the tracker was too slow."""
    journals = {each: Journal(f"{folder}/{each}.jsonl", first) for each in ("metrics", "eval")}
    feed = feeding.start(folder)
    for step in range(first + 1, last + 1):
        journals["metrics"].write(step, {"loss": 1 / step, "grad_norm": 2.0 * step, "time": time.time()})
        if step % 20 == 0:
            journals["eval"].write(step, {"loss": 3 / step, "accuracy": step / 300})
    print("written", flush=True)
    while feed is not None and last == STARTS[-1][1] and feed.close() is not None:
        feed = feeding.start(folder)
    if last < STARTS[-1][1]:
        signal.pause()  # until it is killed


def compared(journals: jobs.Lines, found: Found) -> Iterator[str]:
    """What is wrong in a store, against the lines of the journals: of a step that was trained twice there are two."""
    for journal, prefix in (("metrics", "train"), ("eval", "eval")):
        steps = journals[journal]
        for name in sorted({name for rows in steps.values() for row in rows for name in row} - {"step", "time"}):
            wanted = {step: [row.get(name) for row in rows] for step, rows in steps.items()}
            got = found.get(f"{prefix}/{name}", [])
            if faults := [step for step, values in wanted.items() if not _is_once(values, step, got)]:
                yield f"{prefix}/{name}: {len(faults)} of {len(wanted)} steps are wrong, {faults[0]} first"
            elif not {step for step, _ in got} <= wanted.keys():
                yield f"{prefix}/{name} has steps that are not in the journal"


def _is_once(values: Sequence[float | None], step: int, got: Sequence[tuple[int, float]]) -> bool:
    """Whether a step has one value, which is one of these, or none where it may have none."""
    has = [value for at, value in got if at == step]
    known = [value for value in values if value is not None]
    if not has:
        return len(known) < len(values)
    return len(has) == 1 and any(abs(value - has[0]) <= 1e-6 * abs(value) for value in known)


def of_mlflow(folder: Path) -> tuple[int, Found]:
    """The file store, by MLflow's client."""
    from mlflow.tracking import MlflowClient

    client, found = MlflowClient(f"file:{folder}/mlruns"), dict[str, list[tuple[int, float]]]()
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    for one in runs:
        for name in one.data.metrics:
            history = client.get_metric_history(one.info.run_id, name)
            found.setdefault(name, []).extend((each.step, each.value) for each in history)
    return len(runs), found


def of_trackio(folder: Path) -> tuple[int, Found]:
    """The rows of its SQLite file."""
    (file,) = (folder / "trackio").glob("*.db")
    rows = sqlite3.connect(file).execute("select run_name, step, metrics from metrics").fetchall()
    found = dict[str, list[tuple[int, float]]]()
    for _, step, values in rows:
        _add(found, step, json.loads(values))
    return len({name for name, _, _ in rows}), found


def of_tensorboard(folder: Path) -> tuple[int, Found]:
    """The event files, as TensorBoard shows them."""
    from tensorboard.backend.event_processing import event_accumulator  # type: ignore[import-not-found]

    events = event_accumulator.EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    names = events.Tags()["scalars"]
    return 1, {name: [(each.step, each.value) for each in events.Scalars(name)] for name in names}


def of_wandb(folder: Path) -> tuple[int, Found]:
    """The files of its offline runs, of which `wandb sync` makes one by their id."""
    from wandb.proto import wandb_internal_pb2

    found, ids = dict[str, list[tuple[int, float]]](), set[str]()
    for file in sorted((folder / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in _records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
            elif record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                _add(found, int(items["_step"]), {name: json.loads(value) for name, value in items.items()})
    return len(ids), found


def _records(data: bytes) -> Iterator[bytes]:
    """The records of a file in the form of LevelDB's log: pieces with checksum, length and kind, in blocks."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if (left := BLOCK - at % BLOCK) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


def _add(found: dict[str, list[tuple[int, float]]], step: int, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, int | float) and not name.startswith("_"):
            found.setdefault(name, []).append((step, value))


STORES: Mapping[str, Callable[[Path], tuple[int, Found]]] = {
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "tensorboard": of_tensorboard,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["--start"]:
        start(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        main()

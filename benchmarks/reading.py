"""Reading of prepared text, compared with grain's DataLoader, and the waits of a run for data.

`python -m benchmarks.reading [--mb 26] [--pairs 5] [--steps 40]` lets `launcher prepare` write
array_record shards of generated texts, with more rows than a run keeps in memory. Both sides then
take turns to read every row once, shuffled, in batches of BATCH, in this process. Ours uses the
pipeline of a run, which also checks shapes and tokens. The DataLoader uses grain's
ArrayRecordDataSource and IndexSampler, and the same function to parse a record. Then `launcher run`
trains a decoder of two million parameters on these rows, and its metrics.jsonl shows for how long
the loop waited for data.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
from absl import flags

from benchmarks import prepare
from benchmarks.table import Row, finish_benchmark, log_progress, paired_row
from jaxlaunch.contract import Key
from jaxlaunch.trainer import spec as specs
from jaxlaunch.trainer.data import records
from jaxlaunch.trainer.data.examples import Batch
from jaxlaunch.trainer.data.pipeline import Pipeline
from jaxlaunch.trainer.sources.text import PackedRows, unpack_row
from jaxlaunch.trainer.spec import TrainSpec
from jaxlaunch.trainer.tasks.lm import NextToken
from tests.gang.run_files import read_json_lines

BATCH, LENGTH = 16, 512
# With two layers and a vocabulary of 8,192 this gives 2.5 million parameters.
WIDTH = 128
# Options of the DataLoader: its defaults, as many threads as our pipeline has, and none.
LOADERS = {
    "16 threads, its default": grain.ReadOptions(),
    "4 threads": grain.ReadOptions(num_threads=4, prefetch_buffer_size=2 * BATCH),
    "no threads": grain.ReadOptions(num_threads=0, prefetch_buffer_size=0),
}
TASK = NextToken()


class Cost(NamedTuple):
    """The cost of reading every row once, and the number of rows."""

    seconds: float
    cpu_seconds: float
    rows: int


class Sizes(NamedTuple):
    """Sizes of the rows and of the model."""

    length: int = LENGTH
    width: int = WIDTH
    batch: int = BATCH


def make_document(folder: Path, tokenizer: Path, sizes: Sizes, steps: int) -> dict[str, Any]:
    """Return a job that trains on the files of a folder, which are prepared in its `out`."""
    data = {
        "source": "text",
        "path": f"{folder}/*.jsonl",
        "tokenizer": str(tokenizer),
        "packing": "first-fit",
    }
    size = {"width": sizes.width, "length": sizes.length, "vocab": prepare.VOCAB}
    train = {
        "task": "lm",
        "model": {"kind": "decoder", "layers": 2, "heads": 4, **size},
        "data": data | {"data_dir": str(folder / "out")},
        "mesh": {"dp": -1},
        "batch": sizes.batch,
        "steps": steps,
        "log_every": max(steps // 10, 1),
        "eval": {"every": None},
        "checkpoint": {"every": None},
    }
    return {"name": "reading", "accelerator": {"type": "cpu", "per_host": 2}, "train": train}


def run_launcher(command: str, folder: Path, job: Mapping[str, Any]) -> None:
    """Run a command of the launcher with a job, and with the run folder `run`."""
    (folder / "job.yaml").write_text(json.dumps(job))
    launcher = str(Path(sys.executable).with_name("launcher"))
    arguments = [launcher, command, str(folder / "job.yaml"), "--run-dir", str(folder / "run")]
    subprocess.run(arguments, check=True, stdout=subprocess.DEVNULL)


# --- reading --------------------------------------------------------------------------------------


def parse_record(record: bytes, length: int) -> dict[str, Any]:
    """Return the example of a record, as a run parses it."""
    return TASK.example(unpack_row(records.decode_record(record), length))


class Parse(grain.transforms.Map):
    """`parse_record` as a grain transformation."""

    def __init__(self, length: int) -> None:
        self._length = length

    def map(self, element: bytes) -> dict[str, Any]:
        """Return the example of a record."""
        return parse_record(element, self._length)


def read_with_jaxlaunch(prepared: Path, spec: TrainSpec, seed: int) -> Iterator[Batch]:
    """Return the batches of all rows, without an incomplete last one, as a run reads them."""
    rows = PackedRows(prepared, "train")
    pipeline = Pipeline(
        rows,
        TASK.example,
        batch=spec.batch,
        rows=range(spec.batch),
        seed=seed,
        shuffle=True,
        prefetch=spec.data.prefetch,
        threads=spec.data.threads,
        check=lambda batch: TASK.check_batch(spec, batch),
    )
    return pipeline.iterate([range(step, step + 1) for step in range(len(rows) // spec.batch)])


def read_with_grain(
    shards: list[str], spec: TrainSpec, seed: int, options: grain.ReadOptions
) -> Iterator[Batch]:
    """Return the batches of all rows, without an incomplete last one, from grain's DataLoader."""
    source = grain.sources.ArrayRecordDataSource(shards)
    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, num_epochs=1, seed=seed)
    assert isinstance(spec.model, specs.Decoder)
    operations = [Parse(spec.model.length), grain.transforms.Batch(spec.batch, drop_remainder=True)]
    loader = grain.DataLoader(
        data_source=source, sampler=sampler, operations=operations, read_options=options
    )
    return iter(loader)


def measure_cost(open_batches: Callable[[], Iterator[Batch]]) -> Cost:
    """Return the cost of creating an iterator and reading all batches."""
    started_at, cpu_started_at = time.perf_counter(), time.process_time()
    rows = sum(len(batch["tokens"]) for batch in open_batches())
    return Cost(time.perf_counter() - started_at, time.process_time() - cpu_started_at, rows)


def compare_readers(prepared: Path, spec: TrainSpec, pairs: int) -> list[Row]:
    """Return our processor time per row over the DataLoader's, for each of its options."""
    shards = sorted(map(str, prepared.glob("train-*.array_record")))
    assert isinstance(spec.model, specs.Decoder)
    rounds: dict[str, list[tuple[Cost, Cost]]] = {name: [] for name in LOADERS}
    for seed in range(1 + pairs):
        for name, options in LOADERS.items():
            our_cost = measure_cost(partial(read_with_jaxlaunch, prepared, spec, seed))
            their_cost = measure_cost(partial(read_with_grain, shards, spec, seed, options))
            rounds[name].append((our_cost, their_cost))
    return [ratio_row(name, costs[1:], spec.model.length) for name, costs in rounds.items()]


def ratio_row(name: str, pairs: list[tuple[Cost, Cost]], length: int) -> Row:
    """Return the ratio of processor times. Raises SystemExit if the numbers of rows differ."""
    counts = {cost.rows for pair in pairs for cost in pair}
    if len(counts) > 1:
        raise SystemExit(f"not as many rows: {sorted(counts)}")
    label = f"reading over grain's DataLoader, {name}: processor time of a row"
    return paired_row(label, pairs, counts.pop() * length / 1e6, 1.0, "{:.2f} million tokens")


# --- a run ----------------------------------------------------------------------------------------


def waiting_row(metrics: Path, tokens: int) -> Row:
    """Return the share of the time for which the loop waited, without the first interval."""
    first, *lines = read_json_lines(metrics)
    data_s = sum(line[Key.PART_S.format(part="data")] for line in lines)
    wall_s = sum(line[Key.WALL_S] for line in lines)
    step_s = wall_s / (lines[-1][Key.STEP] - first[Key.STEP])
    detail = (
        f"{data_s:.3f} s of {wall_s:.1f} s; a step of {tokens:,} positions takes {step_s:.2f} s"
    )
    return Row(
        "a run's wait for data over its step, 2 million parameters, 2 cores",
        data_s / wall_s,
        0.02,
        detail,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=26, help="of text, in millions of bytes")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    arguments = parser.parse_args()
    # grain's DataLoader fails unless flags have been parsed.
    flags.FLAGS(["reading"])
    with tempfile.TemporaryDirectory() as name:
        return finish_benchmark(
            measure_rows(
                Path(name), Sizes(), arguments.mb * 1_000_000, arguments.pairs, arguments.steps
            )
        )


def measure_rows(folder: Path, sizes: Sizes, size: int, pairs: int, steps: int) -> list[Row]:
    """Return all rows of the table, for a corpus of `size` bytes in `folder`."""
    log_progress(f"reading: preparing {size / 1e6:g} MB")
    prepare.train_tokenizer(folder / "tokenizer")
    prepare.write_corpus(folder, size)
    job = make_document(folder, folder / "tokenizer", sizes, steps)
    run_launcher("prepare", folder, job)
    prepared = next((folder / "out").glob("*/index.json")).parent
    log_progress(f"reading: {pairs} pairs")
    rows = compare_readers(prepared, TrainSpec.model_validate(job["train"]), pairs)
    log_progress(f"reading: {steps} steps of a run")
    run_launcher("run", folder, job)
    return [*rows, waiting_row(folder / "run" / "metrics.jsonl", sizes.batch * sizes.length)]


if __name__ == "__main__":
    sys.exit(main())

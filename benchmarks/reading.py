"""Reading prepared rows: beside grain's own DataLoader, and as a share of the step of a model of 2 million parameters.

`python -m benchmarks.reading [--mb 20] [--steps 60]`. Both loaders read the same rows of the same source, shuffled,
in batches of BATCH; grain's by threads, as it does by default, and by a process for each core, of which the faster
counts. Then the model trains on the rows, on the CPU devices of this machine, as `launcher run` would.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import prepare
from benchmarks.table import Row, emit, log, median
from trainer.data.pipeline import Pipeline
from trainer.data.source import Source
from trainer.data.sources.open import open_source
from trainer.spec import TrainSpec
from trainer.tasks.lm import NextToken

BATCH, LENGTH, ROUNDS = 64, 256, 5
BATCHES = 60  # in a round


def spec_of(folder: Path, steps: int) -> TrainSpec:
    """The job of the two million parameters: bytes, so that rows are small and many."""
    data = {"source": "text", "path": f"{folder}/*.jsonl", "packing": "concat", "data_dir": f"{folder}/out"}
    model = {"kind": "gpt2", "layers": 2, "width": 256, "heads": 4, "vocab": 512, "length": LENGTH}
    return TrainSpec.model_validate(
        {
            "task": "trainer.tasks.lm:NextToken",
            "model": model,
            "data": data | {"eval_split": 0.01},
            "batch": 16,
            "steps": steps,
            "log_every": 10,
            "eval": {"every": None},
            "checkpoint": {"every": None},
        }
    )


def ours(source: Source) -> Iterator[Any]:
    """Batches as a run reads them."""
    how = {"batch": BATCH, "rows": range(BATCH), "seed": 1, "shuffle": True, "prefetch": 2, "threads": 4}
    pipeline = Pipeline(source, NextToken().example, **how)  # type: ignore[arg-type]
    return pipeline.iterate([range(step, step + 1) for step in range(BATCHES + 1)])


def grains(source: Source, workers: int) -> Iterator[Any]:
    """Batches of grain's DataLoader."""
    import grain

    class Example(grain.transforms.Map):  # type: ignore[misc]
        def map(self, element: Any) -> Any:
            return NextToken().example(element)

    sampler = grain.samplers.IndexSampler(len(source), shuffle=True, seed=1, num_epochs=None)
    operations = [Example(), grain.transforms.Batch(BATCH, drop_remainder=True)]
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=operations, worker_count=workers))


def rate(begin: Callable[[], Iterator[Any]]) -> float:
    """Tokens a second, from the second batch on: the first waits for threads and processes to start."""
    batches = begin()
    next(batches)
    began = time.perf_counter()
    for _ in range(BATCHES):
        next(batches)
    return BATCHES * BATCH * LENGTH / (time.perf_counter() - began)


def share(spec: TrainSpec) -> float:
    """The share of the steps that a run waits for data, of its last intervals."""
    from benchmarks.loop import place
    from trainer.distributed import Stop
    from trainer.train import Run

    with place() as (where, report):
        Run(spec, NextToken(), where, Stop(), report).run()
        assert where.run_dir is not None
        lines = (Path(where.run_dir) / "metrics.jsonl").read_text().splitlines()
    found = [line for line in map(json.loads, lines) if line.get("wall_s")]
    return median([line["data_s"] / line["wall_s"] for line in found[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=20, help="of text, in millions of bytes")
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        prepare.write(Path(name), given.mb * 1_000_000)
        spec = spec_of(Path(name), given.steps)
        source = open_source(spec, "train")
        assert source is not None
        log(f"reading: {len(source)} rows")
        loaders: dict[str, Callable[[], Iterator[Any]]] = {
            "ours": lambda: ours(source),
            "threads": lambda: grains(source, 0),
            "processes": lambda: grains(source, len(os.sched_getaffinity(0))),
        }
        rounds = [{name: rate(begin) for name, begin in loaders.items()} for _ in range(ROUNDS)]
        found = {name: median([each[name] for each in rounds]) for name in loaders}
        log("reading: training")
        waits = share(spec)
    best = max(found["threads"], found["processes"])
    detail = ", ".join(f"{name} {each / 1e6:.2f}" for name, each in found.items())
    emit(
        [
            Row(
                "grain's DataLoader over our reading, tokens per second",
                best / found["ours"],
                1.0,
                f"million: {detail}",
            ),
            Row("data over the step of a model of 2 million parameters", waits, 0.02, f"{waits:.2%} of the step"),
        ]
    )


if __name__ == "__main__":
    main()

"""Images and rows of tables per second, compared with the DataLoaders of torch and grain.

`python -m benchmarks.feeding [--images 256] [--rows 100000] [--rounds 5] [--workers 2] [--only
rows]` generates JPEGs of 500 × 375 in folders by class, the same images as array_record, and a
table of numbers as .npz. Each side runs in its own process (torch in the environment of
tests/environments.py). It reads every image once, shuffled, as a random-resized crop of 224 with
flips, in batches of 64 as uint8. Then it reads the rows in batches of 256. torch reads them twice:
by batch_size and shuffle, and by a BatchSampler, which asks its TensorDataset for a whole batch.
The sides take turns. The processor time includes all workers of a side; it is the more reliable
number on a machine with other load.

`--index N` measures something else: the time to the first batch of a folder of N generated files,
without and with the cached index, and the memory after reading a tenth of them.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.feeding_side import Cost, Reader
from benchmarks.table import Row, finish_benchmark, log_progress, paired_row
from tests import environments

# The size of the JPEGs is about the mean of ImageNet's.
HEIGHT, WIDTH = 375, 500
SIZE, BATCH = 224, 64
FEATURES, TABLE_BATCH = 30, 256
CLASSES = ("cat", "dog")
LABELS = {
    "images": "JPEG folders",
    "packed": "array_record, over theirs from JPEG folders",
    "rows": "rows of a table",
    "sampled": "rows of a table, over theirs by batches that a BatchSampler draws",
}
BOUNDS = {"images": 1 / 1.2, "packed": 0.5, "rows": 0.5}
# Comparisons in which a side reads another dataset than the one of this name.
OUR_DATASETS = {"sampled": "rows"}
THEIR_DATASETS = {"packed": "images"}
# Only torch has a BatchSampler.
TORCH_ONLY = ("sampled",)


def make_jpeg(number: int, height: int, width: int) -> bytes:
    """Return a JPEG with large shapes and fine detail, like a photo."""
    rng = np.random.default_rng(number)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    pixels = np.asarray(coarse, np.float32) + rng.normal(0, 14, (height, width, 1))
    file = io.BytesIO()
    Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()


def write_files(folder: Path, images: int, rows: int) -> None:
    """Write the images and the table that all sides read."""
    for number in range(images):
        path = folder / "photos" / CLASSES[number % 2] / f"{number:06}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(make_jpeg(number, HEIGHT, WIDTH))
    rng = np.random.default_rng(0)
    x_NF = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    np.savez(folder / "table.npz", x=x_NF, y=rng.integers(0, 2, rows))


def pack_images(folder: Path) -> None:
    """Write the images as array_record, with shorter sides of 256 pixels."""
    data = {"source": "images", "path": str(folder / "photos"), "size": SIZE}
    train = {"task": "classify", "model": {"kind": "resnet", "classes": 2}, "data": data}
    job = {"name": "feeding", "accelerator": {"type": "cpu", "per_host": 1}, "train": train}
    (folder / "job.yaml").write_text(json.dumps(job))
    launcher = str(Path(sys.executable).with_name("launcher"))
    command = [
        launcher,
        "prepare",
        str(folder / "job.yaml"),
        "--to",
        str(folder / "packed"),
        "--resize",
        "256",
    ]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def side_options(folder: Path, workers: int) -> dict[str, Any]:
    """Return the options of every side."""
    return {
        "folder": str(folder),
        "size": SIZE,
        "batch": BATCH,
        "table_batch": TABLE_BATCH,
        "workers": workers,
    }


def compare_sides(folder: Path, workers: int, rounds: int, only: Sequence[str]) -> list[Row]:
    """Return our cost per example over that of each other side, for the datasets in `only`."""
    options, python = side_options(folder, workers), sys.executable
    other_sides = {
        "torch's DataLoader": Reader(
            str(environments.find_python("torch")), "torch", options, torchvision_env()
        ),
        "grain's DataLoader": Reader(python, "grain", options, {}),
    }
    ours = Reader(python, "ours", options, {})
    log_progress(
        f"feeding: {ours.versions}; " + "; ".join(side.versions for side in other_sides.values())
    )
    costs: dict[tuple[str, str], list[tuple[Cost, Cost]]] = {}
    for seed in range(1 + rounds):
        for name, other in other_sides.items():
            # Two comparisons may share a measurement of the other side.
            their_costs: dict[str, Cost] = {}
            for dataset in only:
                if dataset in TORCH_ONLY and "torch" not in name:
                    continue
                their_dataset = THEIR_DATASETS.get(dataset, dataset)
                if their_dataset not in their_costs:
                    their_costs[their_dataset] = other.read(their_dataset, seed)
                our_cost = ours.read(OUR_DATASETS.get(dataset, dataset), seed)
                costs.setdefault((dataset, name), []).append((our_cost, their_costs[their_dataset]))
    for side in (ours, *other_sides.values()):
        side.close()
    return [
        ratio_row(f"{LABELS[dataset]}: {name}", pairs[1:], BOUNDS.get(dataset))
        for (dataset, name), pairs in costs.items()
    ]


def torchvision_env() -> dict[str, str]:
    """Return torch's environment with torchvision's folder on its path."""
    environments.find_python("torchvision")
    (site,) = environments.environment_folder("torchvision").glob("lib/python3*/site-packages")
    return {**environments.LAZY, "PYTHONPATH": str(site)}


def ratio_row(label: str, pairs: list[tuple[Cost, Cost]], bound: float | None) -> Row:
    """Return the ratio of processor times.

    Raises SystemExit if the sides did not read equally many examples.
    """
    counts = {cost.examples for pair in pairs for cost in pair}
    if len(counts) > 1:
        raise SystemExit(f"{label}: not as many examples: {sorted(counts)}")
    return paired_row(f"processor time of an example, {label}", pairs, counts.pop(), bound)


# --- many files -----------------------------------------------------------------------------------


def index_rows(folder: Path, count: int) -> list[Row]:
    """Return the time to the first batch of a folder of `count` files, and the growth of memory."""
    started_at = time.perf_counter()
    for number in range(count):
        path = folder / "photos" / f"{number % 1000:03}" / f"{number:07}.jpg"
        if number < 1000:
            path.parent.mkdir(parents=True)
            path.write_bytes(make_jpeg(number, 48, 64))
        else:
            # There are only a thousand images, with many hard links.
            path.hardlink_to(folder / "photos" / path.parent.name / f"{number % 1000:07}.jpg")
    log_progress(f"feeding: {count:,} files are made in {time.perf_counter() - started_at:.0f} s")
    options = {
        "folder": str(folder),
        "size": 32,
        "batch": BATCH,
        "table_batch": TABLE_BATCH,
        "workers": 0,
    }
    variables = {"XDG_CACHE_HOME": str(folder / "cache")}
    reader = Reader(sys.executable, "ours", options, variables)
    uncached = reader.read("first", 0)
    reader.close()
    reader = Reader(sys.executable, "ours", options, variables)
    cached, early, late = (reader.read(dataset, 0) for dataset in ("first", "some", "more"))
    reader.close()
    detail = (
        f"{late.resident >> 20} MiB after {late.examples:,} images, {early.resident >> 20} MiB "
        f"after {early.examples:,}"
    )
    return [
        seconds_row(f"the first batch of {count:,} files, no index", uncached, None),
        seconds_row(f"the first batch of {count:,} files, cached index", cached, 10.0),
        Row(
            "memory after a tenth of the images over that after a hundredth",
            late.resident / early.resident,
            1.05,
            detail,
        ),
    ]


def seconds_row(label: str, cost: Cost, bound: float | None) -> Row:
    """Return a row of processor seconds, which other load on the machine hardly affects."""
    return Row(
        f"seconds of the processor until {label}",
        cost.cpu_seconds,
        bound,
        f"{cost.seconds:.1f} s by the clock",
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    for key, value in (
        ("images", 256),
        ("rows", 100_000),
        ("rounds", 5),
        ("workers", 2),
        ("index", 0),
    ):
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--only", nargs="+", choices=list(LABELS), default=list(LABELS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if arguments.index:
            return finish_benchmark(index_rows(Path(name), arguments.index))
        log_progress(f"feeding: writing {arguments.images} images and {arguments.rows:,} rows")
        write_files(Path(name), arguments.images, arguments.rows)
        if "packed" in arguments.only:
            pack_images(Path(name))
        return finish_benchmark(
            compare_sides(Path(name), arguments.workers, arguments.rounds, arguments.only)
        )


if __name__ == "__main__":
    sys.exit(main())

"""One side of benchmarks.feeding: a process that reads a dataset once per request.

Each side imports its own libraries. Processor time is that of the process and of all processes that
it started, including those that have ended.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.side import ROOT, Process

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
# The probability of a flip, and the share of an image's area that a crop has.
FLIP = 0.5
AREA = (0.08, 1.0)
# The number of examples in each batch.
BatchSizes = Iterator[int]


class Cost(NamedTuple):
    """The cost of reading a dataset once. `resident` is the memory afterwards, in bytes."""

    seconds: float
    cpu_seconds: float
    examples: int
    resident: int


class Reader(Process):
    """A process that reads a dataset on request."""

    def __init__(
        self, python: str, name: str, options: Mapping[str, Any], environ: Mapping[str, str]
    ) -> None:
        path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH", "")]))
        variables = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "OMP_NUM_THREADS": "1",
            **environ,
            "PYTHONPATH": path,
        }
        super().__init__(
            [python, "-m", "benchmarks.feeding_side", name, json.dumps(options)], variables
        )

    def read(self, dataset: str, seed: int) -> Cost:
        """Return the cost of reading a dataset once, in the order of a seed."""
        return Cost(*self.ask(json.dumps([dataset, seed])))


def cpu_seconds() -> float:
    """Return the processor seconds of this process and of all its descendants.

    /proc counts in ticks, which are coarse, so the time of this process itself is read separately.
    """
    own_pid = os.getpid()
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        # utime, stime, cutime and cstime; only the last two, of ended children, for this process.
        ticks[pid] = sum(map(int, fields[13 if pid == own_pid else 11 : 15]))

    def is_descendant(pid: int) -> bool:
        while pid > 1 and pid != own_pid:
            pid = parents.get(pid, 0)
        return pid == own_pid

    return (
        time.process_time() + sum(ticks[pid] for pid in ticks if is_descendant(pid)) / TICKS_PER_S
    )


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes."""
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def serve_reads(versions: str, read: Callable[[str, int], BatchSizes]) -> None:
    """Read a dataset for each line on stdin, and print the cost."""
    answers, sys.stdout = sys.stdout, sys.stderr
    print(json.dumps(versions), file=answers, flush=True)
    for line in sys.stdin:
        dataset, seed = json.loads(line)
        started_at, cpu_started_at = time.perf_counter(), cpu_seconds()
        examples = sum(read(dataset, seed))
        cost = Cost(
            time.perf_counter() - started_at,
            cpu_seconds() - cpu_started_at,
            examples,
            resident_bytes(),
        )
        print(json.dumps(cost), file=answers, flush=True)


# --- the sides ------------------------------------------------------------------------------------


def jaxlaunch_side(options: Mapping[str, Any]) -> tuple[str, Callable[[str, int], BatchSizes]]:
    """Return our version, and a reader with the pipeline of a run."""
    from importlib.metadata import version

    from jaxlaunch.trainer.data.pipeline import Pipeline
    from jaxlaunch.trainer.sources.open import open_source
    from jaxlaunch.trainer.spec import TrainSpec
    from jaxlaunch.trainer.tasks.classify import Classify

    folder, workers = options["folder"], options["workers"]
    augment = {"crop": list(AREA), "flip": FLIP}
    settings = {"size": options["size"], "augment": augment, "threads": max(1, workers)}
    blocks = {
        "images": {"source": "images", "path": f"{folder}/photos", "workers": workers, **settings},
        "packed": {
            "source": "array_record",
            "path": f"{folder}/packed/train-*.array_record",
            **settings,
        },
        "rows": {
            "source": "table",
            "path": f"{folder}/table.npz",
            "label": "y",
            "threads": max(1, workers),
        },
    }
    shares = {"first": 0.0, "some": 0.01, "more": 0.1}

    def read_batches(dataset: str, seed: int) -> BatchSizes:
        task = Classify()
        source_name = "images" if dataset in shares else dataset
        spec = TrainSpec.model_validate(
            {"task": "classify", "data": blocks[source_name], "batch": options["batch"]}
        )
        source = open_source(spec, "train")
        assert source is not None
        batch = options["table_batch" if source_name == "rows" else "batch"]
        threads, prefetch = spec.data.threads, spec.data.prefetch
        pipeline = Pipeline(
            source,
            task.example,
            batch=batch,
            rows=range(batch),
            seed=seed,
            shuffle=True,
            prefetch=prefetch,
            threads=threads,
        )
        steps = max(1, int(len(source) // batch * shares.get(dataset, 1.0)))
        for batch_arrays in pipeline.iterate([range(step, step + 1) for step in range(steps)]):
            yield len(batch_arrays["label"])

    return f"jaxlaunch {version('jaxlaunch')}", read_batches


def torch_side(options: Mapping[str, Any]) -> tuple[str, Callable[[str, int], BatchSizes]]:
    """Return torch's version, and a reader with its DataLoader and torchvision's transforms."""
    import numpy as np
    import torch
    import torchvision
    from torchvision.transforms import v2

    torch.set_num_threads(1)
    crop = v2.RandomResizedCrop(options["size"], scale=AREA, antialias=True)
    transform = v2.Compose([crop, v2.RandomHorizontalFlip(FLIP), v2.PILToTensor()])
    with np.load(f"{options['folder']}/table.npz") as table:
        rows = torch.utils.data.TensorDataset(
            torch.from_numpy(table["x"]), torch.from_numpy(table["y"])
        )
    images = torchvision.datasets.ImageFolder(f"{options['folder']}/photos", transform)

    def make_loader(dataset: Any, batch: int) -> Any:
        workers = options["workers"]
        generator = torch.Generator().manual_seed(0)
        return torch.utils.data.DataLoader(
            dataset,
            batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=generator,
        )

    order = torch.utils.data.RandomSampler(rows, generator=torch.Generator().manual_seed(0))
    batches = torch.utils.data.BatchSampler(order, options["table_batch"], drop_last=True)
    loaders = {
        "images": make_loader(images, options["batch"]),
        "rows": make_loader(rows, options["table_batch"]),
        "sampled": torch.utils.data.DataLoader(
            rows, batch_size=None, sampler=batches, num_workers=options["workers"]
        ),
    }

    def read_batches(dataset: str, seed: int) -> BatchSizes:
        for _, label in loaders[dataset]:
            yield len(label)

    return f"torch {torch.__version__}, torchvision {torchvision.__version__}", read_batches


class _Files:
    """Paths and labels of the images in folders by class."""

    def __init__(self, folder: str) -> None:
        classes = sorted(pathlib.Path(folder, "photos").iterdir())
        self._pairs = [
            (str(path), label)
            for label, class_folder in enumerate(classes)
            for path in sorted(class_folder.iterdir())
        ]

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, number: int) -> tuple[str, int]:
        return self._pairs[number]


class _Rows:
    """Examples of the rows of the table."""

    def __init__(self, folder: str) -> None:
        import numpy as np

        with np.load(f"{folder}/table.npz") as table:
            self._x, self._y = table["x"], table["y"]

    def __len__(self) -> int:
        return len(self._y)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"image": self._x[number], "label": self._y[number]}


def grain_side(options: Mapping[str, Any]) -> tuple[str, Callable[[str, int], BatchSizes]]:
    """Return grain's version, and a reader with its DataLoader that decodes images with PIL."""
    import grain
    import numpy as np
    from absl import flags
    from PIL import Image

    from jaxlaunch.trainer.data import augment

    flags.FLAGS(["feeding"])
    size = options["size"]

    class CropAndFlip(grain.transforms.RandomMap):
        """A random-resized crop and a random flip."""

        def random_map(self, element: tuple[str, int], rng: Any) -> dict[str, Any]:
            """Return the example for a path and its label."""
            path, label = element
            with Image.open(path) as opened:
                image = opened.convert("RGB")
            top, left, height, width = augment.random_box(
                (image.height, image.width), AREA, (3 / 4, 4 / 3), rng
            )
            box = (left, top, left + width, top + height)
            image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
            if rng.random() < FLIP:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            return {"image": np.asarray(image), "label": label}

    def read_batches(dataset: str, seed: int) -> BatchSizes:
        source: Any = (_Files if dataset == "images" else _Rows)(options["folder"])
        batch = options["batch" if dataset == "images" else "table_batch"]
        steps = [CropAndFlip()] if dataset == "images" else []
        sampler = grain.samplers.IndexSampler(len(source), shuffle=True, num_epochs=1, seed=seed)
        loader = grain.DataLoader(
            data_source=source,
            sampler=sampler,
            operations=[*steps, grain.transforms.Batch(batch, drop_remainder=True)],
            worker_count=options["workers"] if dataset == "images" else 0,
            read_options=grain.ReadOptions(
                num_threads=max(1, options["workers"]), prefetch_buffer_size=2 * batch
            ),
        )
        for examples in loader:
            yield len(examples["label"])

    return f"grain {grain.__version__}", read_batches


SIDES = {"ours": jaxlaunch_side, "torch": torch_side, "grain": grain_side}


if __name__ == "__main__":
    serve_reads(*SIDES[sys.argv[1]](json.loads(sys.argv[2])))

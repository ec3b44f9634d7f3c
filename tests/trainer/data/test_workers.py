"""Processes that read: real ones, of which none imports jax."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxlaunch.trainer import counts
from jaxlaunch.trainer.data import workers
from jaxlaunch.trainer.data.examples import Batch
from jaxlaunch.trainer.data.pipeline import Evaluation, Pipeline
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError
from jaxlaunch.trainer.sources.torch import MapDataset, open_dataset

COUNT, BATCH, STEPS = 48, 16, 9  # three epochs

MODULE = """
import os, random, signal
from pathlib import Path
import numpy as np

class Tensor:
    def __init__(self, array):
        self.array = array
    def detach(self):
        return self
    def numpy(self):
        return self.array

class Drawing:
    def __init__(self, killed=""):
        self.killed = killed
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if index % 11 == 5 and self.killed and not os.path.exists(f"{self.killed}/{index}"):
            Path(f"{self.killed}/{index}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        large = np.random.random(1500).astype(np.float32) + index
        small = random.randrange(2**31)
        return {"large": Tensor(large.reshape(50, 30).T), "small": small, "index": index}

class Given(Drawing):
    def __getitem__(self, index, rng):
        return rng.random(3), index

class Counted(Drawing):
    def __getitem__(self, index):
        from jaxlaunch.trainer.counts import Counter
        Counter("jaxlaunch_bucket_read_bytes_total").add(index)
        return {"index": index}

class Wrong:
    def __init__(self, at):
        self.at = at
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if index != self.at:
            return {"x": index}
        if self.at == 7:
            raise ValueError("a file without\\na header")
        if self.at == 8:
            raise TimeoutError("the bucket does not answer")
        if self.at == 9:
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.at == 10:
            os._exit(3)
        return {"x": lambda: 1}

class Hanging(Wrong):
    def __getitem__(self, index):
        print("reading", flush=True)
        signal.pause()

class Stream:
    def __len__(self):
        return 10
    def __iter__(self):
        return iter(range(10))

class SequentialSampler:
    pass

def default(items):
    return items
default.__module__ = "torch.utils.data._utils.collate"

class Loader:
    batch_size, num_workers, sampler, collate_fn = 4, 2, SequentialSampler(), staticmethod(default)
    def __init__(self, dataset):
        self.dataset = dataset

loader, streaming = Loader(Drawing()), Loader(Stream())
"""


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the module `their_items`; ends the processes that its tests started."""
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "their_items.py").write_text(MODULE)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for count in (2, 8):
        workers.shared_workers(count).close()
    workers.shared_workers.cache_clear()


def continue_drawing(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a task of a user's may do: draw behind the dataset, from the same generators."""
    return {**raw, "noise": np.random.random(4), "more": random.random()}


def add_random(raw: Mapping[str, Any], rng: np.random.Generator) -> Mapping[str, Any]:
    return {**raw, "noise": rng.random(4)}


def make_pipeline(dataset: MapDataset, example: Any, rows: range = range(4, BATCH)) -> Pipeline:
    return Pipeline(
        dataset, example, batch=BATCH, rows=rows, seed=3, shuffle=True, prefetch=2, threads=4
    )


def hash_batch(batch: Batch) -> str:
    digest = hashlib.sha256()
    for key in sorted(batch):
        digest.update(
            f"{key} {batch[key].dtype} {batch[key].shape}".encode() + batch[key].tobytes()
        )
    return digest.hexdigest()


def hash_batches(
    dataset: MapDataset, example: Any, start: int = 0, killed: random.Random | None = None
) -> list[str]:
    """The hash of each batch from a step on, while a process is killed now and then."""
    result = []
    values = make_pipeline(dataset, example).iterate(
        [range(step, step + 1) for step in range(start, STEPS)]
    )
    for batch in values:
        result.append(hash_batch(batch))
        if (
            killed is not None
            and (pids := workers.shared_workers(dataset.workers).pids)
            and killed.random() < 0.5
        ):
            os.kill(killed.choice(pids), signal.SIGKILL)
    values.close()
    return result


def test_killed_workers_deliver_the_same_batches(
    datasets: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = hash_batches(open_dataset("their_items:Drawing", {}), continue_drawing)
    assert len(set(expected)) == STEPS
    dataset = open_dataset("their_items:Drawing", {"killed": str(tmp_path)}, workers=8)
    assert hash_batches(dataset, continue_drawing, killed=random.Random(1)) == expected
    assert hash_batches(dataset, continue_drawing, start=4) == expected[4:]
    fell = {int(path.name) for path in tmp_path.iterdir()}
    assert fell == {5, 16, 27, 38}  # each killed its process once
    message = capfd.readouterr().err
    assert (
        "was killed by SIGKILL while it read" in message
        and "another process reads again" in message
    )
    assert len(workers.shared_workers(8).pids) <= 8


def test_task_continues_the_generators_of_the_dataset(datasets: Path) -> None:
    expected, result = (
        hash_batches(open_dataset("their_items:Given", {}, workers=count), add_random)
        for count in (0, 2)
    )
    assert result == expected


def test_trainer_has_the_counts_of_its_workers(datasets: Path) -> None:
    def counted(count: int) -> float:
        before = counts.keyed_totals().get("bucket_read_bytes", 0.0)
        hash_batches(open_dataset("their_items:Counted", {}, workers=count), dict)
        return counts.keyed_totals()["bucket_read_bytes"] - before

    assert counted(0) == counted(2) > 0


def test_evaluation_and_cache_equal_the_dataset(datasets: Path) -> None:
    def batches(count: int, deterministic: bool | None) -> list[str]:
        dataset = open_dataset("their_items:Drawing", {}, workers=count)
        held_out = Evaluation(
            dataset,
            lambda raw: {"index": raw["index"]},
            batch=20,
            rows=range(20),
            threads=1,
            deterministic=deterministic,
        )
        return [hash_batch(batch) for _ in range(2) for batch in held_out]

    expected = batches(0, None)
    assert batches(2, None) == expected == batches(2, True)


@pytest.mark.parametrize(
    ("at", "kind", "message"),
    [
        (
            7,
            DataError,
            r"their_items:Wrong: example 7 cannot be read: ValueError: a file without\na header "
            r".*:\d+ in __g",
        ),
        (
            8,
            StorageError,
            r"example 8 cannot be read: TimeoutError: the bucket does not answer "
            r"\(.*their_items.py:\d+ in",
        ),
        (
            9,
            DataError,
            r"3 processes in turn that read example 9 ended: the last was killed by SIGSEGV",
        ),
        (
            10,
            DataError,
            r"3 processes in turn that read example 10 ended: the last left with exit code 3",
        ),
        (
            11,
            DataError,
            r"example 11 cannot be sent to the trainer: .*lambda.*; return arrays and numbers",
        ),
    ],
)
def test_worker_failure_names_the_example(
    datasets: Path, at: int, kind: type[Exception], message: str
) -> None:
    broken = make_pipeline(
        open_dataset("their_items:Wrong", {"at": at}, workers=2), dict, range(BATCH)
    )
    with pytest.raises(kind, match=message) as caught:
        for step in range(COUNT // BATCH):
            broken.read_batch(step)
    assert type(caught.value) is kind
    assert (
        len(
            make_pipeline(
                open_dataset("their_items:Wrong", {"at": -1}, workers=2), dict
            ).read_batch(0)["x"]
        )
        == 12
    )


def test_workers_exit_with_the_trainer(datasets: Path) -> None:
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\nfrom jaxlaunch.trainer.data.workers import "
        "RandomPolicy, Request\nfrom jaxlaunch.trainer.data.workers import Workers\nopener = "
        "'jaxlaunch.trainer.sources.torch:open_dataset'\nargs = ('their_items:Hanging', {'at': "
        "0})\nWorkers(1).read_items(Request(opener, args, RandomPolicy(0, 0, False, False), [0], "
        "[0]))\n"
    )
    trainer = subprocess.Popen(
        [sys.executable, "-c", program, str(datasets)], stdout=subprocess.PIPE
    )
    assert trainer.stdout is not None
    with trainer.stdout as pair:
        assert pair.readline() == b"reading\n"
        trainer.kill()
        assert pair.read() == b""  # its end, for nobody holds the pipe any more
    assert trainer.wait() == -signal.SIGKILL


def test_worker_imports_neither_jax_nor_grain(datasets: Path) -> None:
    program = (
        "import sys; from jaxlaunch.trainer.data import worker; from jaxlaunch.trainer.sources "
        "import torch\nprint({'jax', 'grain'} & set(sys.modules))"
    )
    assert subprocess.check_output([sys.executable, "-c", program]) == b"set()\n"


def test_loader_workers_are_the_default(datasets: Path) -> None:
    assert open_dataset("their_items:loader", {}, workers=None).workers == 2
    assert open_dataset("their_items:loader", {}, workers=0).workers == 0
    assert open_dataset("their_items:Drawing", {}, workers=None).workers == 0
    assert open_dataset("their_items:streaming", {}, workers=None).workers == 0
    words = r"is iterable: .*so 3 processes would each read all of it.*their_items.py:"
    with pytest.raises(SpecError, match=words):
        open_dataset("their_items:streaming", {}, workers=3)

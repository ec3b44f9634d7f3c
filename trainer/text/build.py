"""Prepares the rows of a corpus, once: `python -m trainer.text.build FOLDER`, a recipe on stdin.

A light process of its own, without jax, whose workers each tokenize a unit of the files or pack a shard; memory is that
of a worker times their number, whatever the corpus. What is complete is never made again: killed at any moment and
begun again, it gives the same bytes. Two builds of one folder take turns, by a file lock.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainer import contract
from trainer.errors import DataError, StorageError, TrainerError
from trainer.text import documents, parts, shards
from trainer.text.recipe import INDEX, Recipe
from trainer.text.shards import Corpus

SHARD_BYTES = 64 << 20  # of text in a shard, about
MOST_SHARDS = 4096
SAY_S = 2.0  # seconds between two lines of progress
PR_SET_PDEATHSIG = 1  # prctl(2)


def build(recipe: Recipe, folder: Path, processes: int = 1) -> dict[str, Any]:
    """Makes the folder of a recipe, or what is lacking of it; its index. Raises DataError, SpecError, StorageError."""
    with _locked(folder):
        if (folder / INDEX).exists():
            return read(folder)
        folder.mkdir(parents=True, exist_ok=True)
        making = folder / "parts"
        making.mkdir(exist_ok=True)
        units = documents.units(recipe.paths)
        count = _count(units)
        lacking = [unit for unit in range(len(units)) if not parts.is_there(making, unit)]
        tasks = [(recipe, making, unit, units[unit], count) for unit in lacking]
        _run("tokenized", "parts", parts.write, tasks, processes, len(units))
        corpus, report = _counted(recipe, making, len(units), count)
        lacking = [shard for shard in range(count) if not shards.place(making, shard).exists()]
        _run(
            "packed",
            "shards",
            shards.write,
            [(recipe, folder, making, shard, corpus) for shard in lacking],
            processes,
            count,
        )
        for draft in folder.glob("*.tmp"):  # of those that were killed
            draft.unlink()
        index = _index(recipe, making, count, report)
        shards.write_json(folder / INDEX, index)
        shutil.rmtree(making)
        return index


def read(folder: Path) -> dict[str, Any]:
    """The index of a complete folder."""
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def check(folder: Path, *, whole: bool = False) -> dict[str, Any]:
    """The index of a folder whose files are there in their sizes and, if `whole`, to the byte. Raises DataError."""
    index = read(folder)
    for name, about in index["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size == about["size"] and not (whole and shards.digest(path) != about["sha256"]):
            continue
        what = "is missing" if size is None else "is damaged"
        hint = "remove that folder, and it is prepared again"
        raise DataError(f"{path} {what}: {_sized(size)} where {about['size']} bytes were written; {hint}")
    return index


def _sized(size: int | None) -> str:
    return "nothing" if size is None else f"{size} bytes"


def _count(units: list[list[documents.Part]]) -> int:
    """How many shards: a function of the files alone."""
    size = sum(part.size for unit in units for part in unit)
    return min(MOST_SHARDS, -(-max(size, 1) // SHARD_BYTES))


def _counted(recipe: Recipe, making: Path, units: int, count: int) -> tuple[Corpus, dict[str, Any]]:
    """What the first pass found, and the report on it. Raises DataError where there is nothing to train on."""
    first_U, documents_, lengths = [], 0, np.zeros(64, np.int64)
    totals = dict.fromkeys(("tokens", "bytes", "replaced", "empty"), 0)
    for unit in range(units):
        about = parts.index(making, unit)
        first_U.append(documents_)
        documents_ += len(about.length_D)
        lengths += np.bincount(np.log2(np.maximum(about.length_D, 1)).astype(int), minlength=64)
        found = (int(about.length_D.sum()), int(about.bytes_D.sum()), about.replaced, about.empty)
        totals = {key: totals[key] + each for key, each in zip(totals, found, strict=True)}
    if not documents_:
        raise DataError(f"data.path: {recipe.paths[0]} and what else matches hold no document with a text in it")
    if recipe.eval_split and documents_ == 1:
        raise DataError(
            f"data.eval_split = {recipe.eval_split} of one document leaves none to train on; set it to 0, or name "
            "data.eval_path"
        )
    report = {"documents": documents_, **totals, "lengths": np.trim_zeros(lengths, "b").tolist()}
    return Corpus(count, tuple(first_U), documents_), report


def _index(recipe: Recipe, making: Path, count: int, report: dict[str, Any]) -> dict[str, Any]:
    files: dict[str, Any] = {}
    for shard in range(count):
        files |= json.loads(shards.place(making, shard).read_text())
    rows = {split: sum(each["rows"] for each in files.values() if each["split"] == split) for split in shards.SPLITS}
    if not sum(rows.values()):
        raise DataError(f"data.path: {recipe.paths[0]} and what else matches hold chats without a token to predict")
    fill = sum(each["filled"] for each in files.values()) / (sum(rows.values()) * (recipe.length + 1))
    named: dict[str, Any] = {"address": recipe.address, "tokenizer": recipe.tokenizer_digest}
    if recipe.template is not None:
        named["targets"] = sum(each["targets"] for each in files.values())
    return {**named, "length": recipe.length, "rows": rows, "fill": fill, **report, "files": files}


# --- processes --------------------------------------------------------------------------------------------------------


def _run(verb: str, what: str, work: Callable[..., None], tasks: list[Any], processes: int, total: int) -> None:
    """Calls `work` with each of `tasks`, in as many processes as are of use; says how far it is."""
    if not tasks:
        return
    say = _Progress(verb, what, total - len(tasks), total)
    if min(processes, len(tasks)) == 1:
        for task in tasks:
            work(*task)
            say.one()
        return
    context = multiprocessing.get_context("spawn")  # pyarrow and the tokenizers have threads, which no fork survives
    with concurrent.futures.ProcessPoolExecutor(
        min(processes, len(tasks)), context, initializer=_alone, initargs=(os.getpid(),)
    ) as pool:
        running = [pool.submit(work, *task) for task in tasks]
        try:
            for each in concurrent.futures.as_completed(running):
                each.result()
                say.one()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            say.end()


def _alone(parent: int) -> None:
    """A worker is one core's: the tokenizers' own threads would be on top. It ends with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    die_with(parent)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; without it a killed run would leave its workers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(contract.STARTUP)


class _Progress:
    """A line on stderr now and then; on a terminal one that replaces itself."""

    def __init__(self, verb: str, what: str, done: int, total: int) -> None:
        self._verb, self._what, self._done, self._total = verb, what, done, total
        self._said_at = time.monotonic()
        self._is_open = False

    def one(self) -> None:
        """Counts one more."""
        self._done += 1
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            share = self._done / self._total
            bar = "█" * round(30 * share) + "░" * (30 - round(30 * share))
            line = f"{self._verb} {bar} {self._done} of {self._total} {self._what}"
            self._is_open = sys.stderr.isatty()
            print(line, file=sys.stderr, end="\r" if self._is_open else "\n", flush=True)

    def end(self) -> None:
        """Leaves the line as it is."""
        if self._is_open:
            print(file=sys.stderr)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds the lock of one folder; the kernel releases it when its holder dies. Raises DataError."""
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        raise DataError(
            f"the text cannot be prepared in {folder.parent}, which cannot be written ({error}); set data.data_dir"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Builds as stdin says, with all cores; prints nothing, or the error as a line of JSON. Returns the exit code."""
    die_with(int(sys.argv[2]))
    recipe = Recipe.from_json(sys.stdin.read())
    try:
        build(recipe, Path(sys.argv[1]), len(os.sched_getaffinity(0)))
    except TrainerError as error:
        print(json.dumps({"message": str(error), "code": error.code}))
        return error.code
    except OSError as error:
        failed = StorageError(f"preparing the text in {sys.argv[1]} failed: {error}")
        print(json.dumps({"message": str(failed), "code": failed.code}))
        return failed.code
    return contract.DONE


if __name__ == "__main__":
    sys.exit(main())

"""Prepares the rows of a corpus, once: `python -m jaxlaunch.trainer.text.build FOLDER PARENT`, a recipe on stdin.

A light process of its own, without jax, whose workers each tokenize a unit of the files or pack a shard; memory is that
of a worker times their number, whatever the corpus. What is complete is never made again: killed at any moment and
begun again, it gives the same bytes. Two builds of one folder take turns, by a file lock; where the file system has
none, both do all of it, and neither disturbs the other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxlaunch import contract
from jaxlaunch.trainer.errors import DataError, Stopped, StorageError, TrainerError
from jaxlaunch.trainer.text import documents, parts, shards
from jaxlaunch.trainer.text.recipe import INDEX, Recipe
from jaxlaunch.trainer.text.shards import Corpus

BUCKET_BYTES = 16 << 20  # of text that is packed at once, about: a byte of it is up to 20 of memory
SHARD_BYTES = 64 << 20  # of text in a shard, about, where there are few
MOST_SHARDS = 256  # whoever reads them holds two files of each open
MAKING = "parts"  # folder of what is begun
LEAST = 2  # tokens of a text in which one is predicted
SAY_S = 2.0  # seconds between two lines of progress
PR_SET_PDEATHSIG = 1  # prctl(2)
NO_LOCKS = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)  # of a file system without flock
STOPPED = "stopped while the text was prepared, in {}; what is complete is kept, and the next start resumes from there"


def build(recipe: Recipe, folder: Path, processes: int = 1) -> dict[str, Any]:
    """Makes the folder of a recipe, or what is lacking of it; its index. Raises DataError, SpecError, StorageError."""
    with _locked(folder):
        try:
            if not (folder / INDEX).exists():
                _make(recipe, folder, processes)
            tidy(folder)
            return read(folder)
        except OSError as error:
            if (folder / INDEX).exists():  # another finished meanwhile, where there are no locks, and tidied
                return read(folder)
            raise StorageError(_failed(folder, error)) from error


def _failed(folder: Path, error: OSError) -> str:
    """Why it could not be written, in one sentence."""
    why, hint = str(error), "what is complete is kept, and the next start resumes from there"
    if error.errno == errno.ENOSPC or "No space left" in why:
        with contextlib.suppress(OSError):
            why += f", {shutil.disk_usage(folder).free >> 20} MiB free"
        hint = "make room or set data.data_dir; until it is done it takes about 6 bytes for a token; " + hint
    return f"preparing the text in {folder} failed: {why}; {hint}"


def _make(recipe: Recipe, folder: Path, processes: int) -> None:
    making = folder / MAKING
    making.mkdir(parents=True, exist_ok=True)
    units = documents.units(recipe.paths)
    size = max(sum(part.size for unit in units for part in unit), 1)
    buckets = -(-size // BUCKET_BYTES)
    alone = dataclasses.replace(recipe, paths=())  # of which there may be many: no worker needs them
    lacking = [unit for unit in range(len(units)) if not parts.is_there(making, unit)]
    tasks = [(alone, making, unit, units[unit], buckets) for unit in lacking]
    _run("tokenized", "parts", parts.write, tasks, processes, len(units))
    corpus, report = _counted(recipe, making, len(units), min(buckets, MOST_SHARDS, -(-size // SHARD_BYTES)), buckets)
    lacking = [shard for shard in range(corpus.shards) if not shards.place(making, shard).exists()]
    packed = [(alone, folder, making, shard, corpus) for shard in lacking]
    _run("packed", "shards", shards.write, packed, processes, corpus.shards)
    shards.write_json(folder / INDEX, _index(recipe, making, corpus.shards, report))


def tidy(folder: Path) -> None:
    """Removes what a complete folder needs no more, that of a process killed at the very end included."""
    shutil.rmtree(folder / MAKING, ignore_errors=True)
    with contextlib.suppress(OSError):
        for draft in folder.glob("*.tmp"):
            draft.unlink(missing_ok=True)


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
        raise DataError(f"{path} {what}: {size or 0} of {about['size']} bytes are there; {hint}")
    return index


def _counted(recipe: Recipe, making: Path, units: int, count: int, buckets: int) -> tuple[Corpus, dict[str, Any]]:
    """What the first pass found, and the report on it. Raises DataError where there is nothing to train on."""
    first_U, documents_, lengths = [], 0, np.zeros(64, np.int64)
    totals = dict.fromkeys(("tokens", "bytes", "replaced", "empty"), 0)
    for unit in range(units):
        about, of_D = parts.whole(making, unit)
        first_U.append(documents_)
        documents_ += about.documents
        lengths += np.bincount(np.log2(np.maximum(of_D.length_D, 1)).astype(int), minlength=64)
        found = (int(of_D.length_D.sum()), int(of_D.bytes_D.sum()), about.replaced, about.empty)
        totals = {key: totals[key] + each for key, each in zip(totals, found, strict=True)}
    if not documents_:
        raise DataError(f"data.path: {recipe.paths[0]} and what else matches hold no document with a text in it")
    cut = _cut(recipe, totals["tokens"]) if recipe.eval_split and documents_ == 1 else None
    report = {"documents": documents_, **totals, "lengths": np.trim_zeros(lengths, "b").tolist()}
    return Corpus(count, buckets, tuple(first_U), documents_, cut), report


def _cut(recipe: Recipe, tokens: int) -> int:
    """Where the only document is cut, by tokens: its end is held out. Raises DataError for a row, and a short text."""
    held_out = max(round(tokens * recipe.eval_split), LEAST)
    if documents.kind_of(recipe.paths[0]) != "text" or tokens - held_out < LEAST:
        raise DataError(
            f"data.eval_split = {recipe.eval_split} of one document leaves none to train on; set it to 0, or name "
            "data.eval_path"
        )
    print(
        f"preparing text: data.eval_split = {recipe.eval_split} of one document, whose last {held_out} of {tokens} "
        "tokens are held out",
        file=sys.stderr,
        flush=True,
    )
    return tokens - held_out


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


def _run(verb: str, what: str, work: Callable[..., None], tasks: Sequence[Any], processes: int, total: int) -> None:
    """Calls `work` with each of `tasks`, in as many processes as are of use; says how far it is.

    Where the system kills one, as it does for want of memory, half as many go on with what is left.
    """
    if not tasks:
        return
    say = _Progress(verb, what, total - len(tasks), total)
    left = dict(enumerate(tasks))
    processes = min(processes, len(tasks))
    while left and processes > 1:
        try:
            _pooled(work, left, processes, say)
        except concurrent.futures.process.BrokenProcessPool:
            processes //= 2
            print(
                f"preparing text: a process was killed, as the system does where memory is short; {processes} continue",
                file=sys.stderr,
                flush=True,
            )
    for task in left.values():
        work(*task)
        say.one()


def _pooled(work: Callable[..., None], left: dict[int, Any], processes: int, say: _Progress) -> None:
    """Takes the tasks that are done out of `left`."""
    context = multiprocessing.get_context("spawn")  # pyarrow and the tokenizers have threads, which no fork survives
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_alone, initargs=(os.getpid(),))
    try:
        running = {pool.submit(work, *task): number for number, task in left.items()}
        for each in concurrent.futures.as_completed(running):
            each.result()
            del left[running.pop(each)]
            say.one()
    except BaseException:
        for process in multiprocessing.active_children():  # what they are at takes long, and is of no use
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _alone(parent: int) -> None:
    """A worker is one core's: the tokenizers' own threads would be on top. It ends with its parent, and only so."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group
    die_with(parent)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends; without it a killed run would leave its workers."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(contract.STARTUP)


class _Progress:
    """A line on stderr now and then."""

    def __init__(self, verb: str, what: str, done: int, total: int) -> None:
        self._verb, self._what, self._done, self._total = verb, what, done, total
        self._said_at = time.monotonic()

    def one(self) -> None:
        """Counts one more."""
        self._done += 1
        if time.monotonic() - self._said_at >= SAY_S:
            self._said_at = time.monotonic()
            print(f"{self._verb} {self._done} of {self._total} {self._what}", file=sys.stderr, flush=True)


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
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise StorageError(f"{path} cannot be locked: {error}") from error
            print(
                f"preparing text: {path.parent} has no file locks; others that prepare do the same work",
                file=sys.stderr,
            )
        yield


def main() -> NoReturn:
    """Builds as stdin says, with all cores; prints nothing, or the error as a line of JSON. Exits with its code."""
    die_with(int(sys.argv[2]))
    folder = Path(sys.argv[1])
    os.environ.pop("PYTHONPATH", None)  # a worker would import from the user's folders before it has this sys.path
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    code = contract.DONE
    try:
        build(Recipe.from_json(sys.stdin.read()), folder, len(os.sched_getaffinity(0)))
    except TrainerError as error:
        said = STOPPED.format(folder) if isinstance(error, Stopped) else str(error)
        print(json.dumps({"message": said, "code": error.code}), flush=True)
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = contract.STARTUP
    finally:
        sys.stderr.flush()
        os._exit(code)  # at once: else it would wait for its workers' tasks; they end with it


def _stop(signum: int, frame: types.FrameType | None) -> None:
    raise Stopped(signal.Signals(signum).name)


if __name__ == "__main__":
    main()

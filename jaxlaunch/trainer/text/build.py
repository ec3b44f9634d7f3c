"""Prepares the rows of a corpus: `python -m jaxlaunch.trainer.text.build FOLDER PARENT < RECIPE`.

The build runs in a separate process without jax. Its workers first tokenize units of the files and
then pack shards, so the memory is proportional to the number of workers and not to the corpus.
Complete parts are never built again, and a build that is killed and restarted produces the same
bytes. Two builds of one folder take turns by a file lock; on a file system without locks both do
all of the work, without conflicts.
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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from jaxlaunch import contract
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.errors import DataError, Stopped, StorageError, TrainerError
from jaxlaunch.trainer.text import chat_notes, documents, shards
from jaxlaunch.trainer.text.chat_notes import Notes
from jaxlaunch.trainer.text.recipe import INDEX_FILE, Recipe
from jaxlaunch.trainer.text.shards import Corpus

# Amount of text that is packed at once. A byte of text takes up to 20 bytes of memory.
BUCKET_BYTES = 16 << 20
# Approximate amount of text in a shard, unless there would be more than MAX_SHARDS.
SHARD_BYTES = 64 << 20
# Readers keep both files of each shard open.
MAX_SHARDS = 256
# Folder of the unfinished build.
PARTS_FOLDER = "parts"
# A text needs two tokens for one prediction.
MIN_TOKENS = 2
# Interval between two lines of progress.
PROGRESS_INTERVAL_S = 2.0
# Option of prctl(2).
PR_SET_PDEATHSIG = 1
# Errors of flock on file systems that do not support it.
NO_LOCK_ERRORS = (errno.ENOTSUP, errno.ENOSYS, errno.EINVAL, errno.ENOLCK)
RESUME_HINT = "what is complete is kept, and the next start resumes from there"
STOPPED = f"stopped while the text was prepared, in {{}}; {RESUME_HINT}"


def build_rows(recipe: Recipe, folder: Path, processes: int = 1) -> dict[str, Any]:
    """Build the missing parts of the folder of a recipe, and return its index.

    Raises DataError, SpecError, StorageError.
    """
    with _lock_folder(folder):
        try:
            if not (folder / INDEX_FILE).exists():
                _make_rows(recipe, folder, processes)
            remove_leftovers(folder)
            return read_index(folder)
        except OSError as error:
            if (folder / INDEX_FILE).exists():
                # Without file locks, another process may have finished and removed the parts.
                return read_index(folder)
            raise StorageError(_describe_failure(folder, error)) from error


def _describe_failure(folder: Path, error: OSError) -> str:
    message, hint = str(error), RESUME_HINT
    if error.errno == errno.ENOSPC or "No space left" in message:
        with contextlib.suppress(OSError):
            message += f", {shutil.disk_usage(folder).free >> 20} MiB free"
        need = "until it is done it takes about 6 bytes for a token"
        hint = f"make room or set data.data_dir; {need}; {RESUME_HINT}"
    return f"preparing the text in {folder} failed: {message}; {hint}"


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of a complete folder, including those of killed processes."""
    shutil.rmtree(folder / PARTS_FOLDER, ignore_errors=True)
    with contextlib.suppress(OSError):
        for draft in folder.glob("*.tmp"):
            draft.unlink(missing_ok=True)


def read_index(folder: Path) -> dict[str, Any]:
    """Read the index of a complete folder."""
    index: dict[str, Any] = json.loads((folder / INDEX_FILE).read_text())
    return index


def describe_notes(index: dict[str, Any]) -> list[str]:
    """Return a sentence for each kind of content of chats that is not trained."""
    return chat_notes.describe_notes(chat_notes.notes_from_json(index.get("notes", {})))


def check_folder(folder: Path, *, verify: bool = False) -> None:
    """Raise DataError unless all files have their recorded sizes and, if `verify`, digests."""
    for name, record in read_index(folder)["files"].items():
        path = folder / name
        size = path.stat().st_size if path.exists() else None
        if size == record["size"] and not (verify and shards.file_digest(path) != record["sha256"]):
            continue
        problem = "is missing" if size is None else "is damaged"
        sizes = f"{size or 0} of {record['size']} bytes are there"
        hint = "remove that folder, and it is prepared again"
        raise DataError(f"{path} {problem}: {sizes}; {hint}")


def _make_rows(recipe: Recipe, folder: Path, processes: int) -> None:
    parts_folder = folder / PARTS_FOLDER
    parts_folder.mkdir(parents=True, exist_ok=True)
    units = documents.split_units(recipe.paths)
    text_bytes = max(sum(part.size for unit in units for part in unit), 1)
    buckets = -(-text_bytes // BUCKET_BYTES)
    # There may be many paths, and the workers do not need them.
    worker_recipe = dataclasses.replace(recipe, paths=())
    missing = [unit for unit in range(len(units)) if not shards.is_complete(parts_folder, unit)]
    tasks = [(worker_recipe, parts_folder, unit, units[unit], buckets) for unit in missing]
    _run_tasks("tokenized", "parts", shards.write_part, tasks, processes, len(units))
    shard_count = min(buckets, MAX_SHARDS, -(-text_bytes // SHARD_BYTES))
    corpus, report = _count_documents(recipe, parts_folder, len(units), shard_count, buckets)
    records = [shards.record_path(parts_folder, shard) for shard in range(corpus.shards)]
    missing = [shard for shard, record in enumerate(records) if not record.exists()]
    shard_tasks = [(worker_recipe, folder, parts_folder, shard, corpus) for shard in missing]
    _run_tasks("packed", "shards", shards.write_shard, shard_tasks, processes, corpus.shards)
    files: dict[str, Any] = {}
    rows = dict.fromkeys(shards.SPLITS, 0)
    for record in records:
        files |= json.loads(record.read_text())
    for file in files.values():
        rows[file["split"]] += file["rows"]
    if not sum(rows.values()):
        problem = "and what else matches hold chats without a token to predict"
        raise DataError(f"data.path: {recipe.paths[0]} {problem}")
    positions = sum(rows.values()) * (recipe.length + 1)
    fill = sum(file["filled"] for file in files.values()) / positions
    index: dict[str, Any] = {"address": recipe.address, "tokenizer": recipe.tokenizer_digest}
    if recipe.has_targets:
        index["targets"] = sum(file["targets"] for file in files.values())
        notes: Notes = Counter()
        for unit in range(len(units)):
            notes.update(shards.read_notes(parts_folder, unit))
        index["notes"] = chat_notes.notes_to_json(notes)
    index |= {"length": recipe.length, "rows": rows, "fill": fill, **report, "files": files}
    shards.write_json(folder / INDEX_FILE, index)


def _count_documents(
    recipe: Recipe, parts_folder: Path, units: int, shard_count: int, buckets: int
) -> tuple[Corpus, dict[str, Any]]:
    """Count the documents of all parts, and determine which are held out."""
    # The lowest and the highest rank and key of a document.
    ranks, keys = (splits.HASH_RANGE, 0), (splits.HASH_RANGE, 0)
    report = dict.fromkeys(("documents", "tokens", "bytes", "replaced", "empty"), 0)
    lengths = np.zeros(64, np.int64)
    for unit in range(units):
        part_counts, index_D = shards.read_part(parts_folder, unit)
        if part_counts.documents:
            ranks, keys = _widen_range(ranks, index_D.rank_D), _widen_range(keys, index_D.key_D)
        lengths += np.bincount(np.log2(np.maximum(index_D.length_D, 1)).astype(int), minlength=64)
        sums = int(index_D.length_D.sum()), int(index_D.bytes_D.sum())
        counts = (part_counts.documents, *sums, part_counts.replaced, part_counts.empty)
        report = {key: report[key] + number for key, number in zip(report, counts, strict=True)}
    if not report["documents"]:
        problem = "and what else matches hold no document with a text in it"
        raise DataError(f"data.path: {recipe.paths[0]} {problem}")
    cut = None
    if recipe.eval_split and report["documents"] == 1:
        # The end of the only document is held out, in tokens.
        tokens = report["tokens"]
        held_out = max(round(tokens * recipe.eval_split), MIN_TOKENS)
        setting = f"data.eval_split = {recipe.eval_split} of one document"
        if documents.file_kind(recipe.paths[0]) != "text" or tokens - held_out < MIN_TOKENS:
            hint = "set it to 0, or name data.eval_path"
            raise DataError(f"{setting} leaves none to train on; {hint}")
        _print_message(f"{setting}, whose last {held_out} of {tokens} tokens are held out")
        cut = tokens - held_out
    share = recipe.eval_split if cut is None else 0.0
    has_copies_only = bool(share) and ranks[0] == ranks[1] and recipe.group is None
    if has_copies_only:
        reason = f"all {report['documents']} documents are copies of one"
        _print_message(f"{reason}, so the held-out metrics tell what is remembered")
    limit = splits.held_out_limit(share, *(keys if has_copies_only else ranks))
    corpus = Corpus(shard_count, buckets, units, limit, has_copies_only, cut)
    return corpus, {**report, "lengths": np.trim_zeros(lengths, "b").tolist()}


def _widen_range(bounds: tuple[int, int], hash_D: splits.Keys) -> tuple[int, int]:
    return min(bounds[0], int(hash_D.min())), max(bounds[1], int(hash_D.max()))


def _print_message(message: str) -> None:
    print(f"preparing text: {message}", file=sys.stderr, flush=True)


# --- processes ------------------------------------------------------------------------------------


def _run_tasks(
    verb: str,
    unit_name: str,
    work: Callable[..., None],
    tasks: Sequence[Any],
    processes: int,
    total: int,
) -> None:
    """Call `work` with each of `tasks` in up to `processes` processes, and print the progress.

    If the system kills a process, usually for lack of memory, half as many continue with the
    remaining tasks.
    """
    remaining = dict(enumerate(tasks))
    printed_at = time.monotonic()

    def finish_task(number: int) -> None:
        nonlocal printed_at
        del remaining[number]
        if time.monotonic() - printed_at >= PROGRESS_INTERVAL_S:
            printed_at = time.monotonic()
            message = f"{verb} {total - len(remaining)} of {total} {unit_name}"
            print(message, file=sys.stderr, flush=True)

    processes = min(processes, len(tasks))
    while remaining and processes > 1:
        try:
            _run_in_pool(work, remaining, processes, finish_task)
        except concurrent.futures.process.BrokenProcessPool:
            processes //= 2
            reason = "a process was killed, probably because memory ran out"
            _print_message(f"{reason}; {processes} continue")
    for number, task in list(remaining.items()):
        work(*task)
        finish_task(number)


def _run_in_pool(
    work: Callable[..., None],
    tasks: dict[int, Any],
    processes: int,
    finish_task: Callable[[int], None],
) -> None:
    # pyarrow and the tokenizers have threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(
        processes, context, initializer=_initialize_worker, initargs=(os.getpid(),)
    )
    try:
        running = {pool.submit(work, *task): number for number, task in tasks.items()}
        for future in concurrent.futures.as_completed(running):
            future.result()
            finish_task(running.pop(future))
    except BaseException:
        for process in multiprocessing.active_children():
            # Nobody needs the results of the running tasks, and waiting for them takes long.
            process.kill()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _initialize_worker(parent: int) -> None:
    """Disable the threads of tokenizers in a worker, and let it end with its parent."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # Ctrl-C reaches the whole process group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent(parent)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, so that no workers remain."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(contract.STARTUP)


def follow_parent() -> Callable[[], bool]:
    """Let this process end with its parent, and return a function that is true after a signal.

    The signals are SIGINT and SIGTERM, which no longer end the process.
    """
    die_with_parent(os.getppid())
    received: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda signum, frame: received.append(signum))
    return lambda: bool(received)


@contextlib.contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which the kernel releases if this process is killed.

    Raises DataError if the folder is not writable, and StorageError.
    """
    path = folder.with_name(f".{folder.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError as error:
        problem = f"{folder.parent}, which cannot be written ({error})"
        raise DataError(f"the text cannot be prepared in {problem}; set data.data_dir") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCK_ERRORS:
                raise StorageError(f"{path} cannot be locked: {error}") from error
            _print_message(f"{path.parent} has no file locks; others that prepare do the same work")
        yield


def main() -> NoReturn:
    """Build the recipe on stdin, print an error as a line of JSON, and exit with its code."""
    die_with_parent(int(sys.argv[2]))
    folder = Path(sys.argv[1])
    # A spawned worker would import modules of the user's folders before it receives this sys.path.
    os.environ.pop("PYTHONPATH", None)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_stopped)
    code = contract.DONE
    try:
        build_rows(Recipe.from_json(sys.stdin.read()), folder, len(os.sched_getaffinity(0)))
    except TrainerError as error:
        message = STOPPED.format(folder) if isinstance(error, Stopped) else str(error)
        print(json.dumps({"message": message, "code": error.code}), flush=True)
        code = error.code
    except BaseException:
        traceback.print_exc()
        code = contract.STARTUP
    finally:
        sys.stderr.flush()
        # Exit at once, because a normal exit would wait for the tasks of the workers. The kernel
        # kills the workers.
        os._exit(code)


def _raise_stopped(signum: int, frame: types.FrameType | None) -> None:
    raise Stopped(signal.Signals(signum).name)


if __name__ == "__main__":
    main()

"""Mirrors a run folder in a bucket: `python -m jaxlaunch.trainer.buckets.mirror URL FOLDER ...`.

The agent starts this program as a separate process, because the agent uses only the standard
library, and access to a bucket needs the packages of the trainer. The program first fetches the
files of earlier attempts and prints `ready`. Then it uploads each changed file within seconds, and
large files less often. Files are uploaded whole, because objects cannot be appended to. A line
`ranks 8 16` on stdin says that the host runs ranks 8 to 15 from now on: the program fetches their
logs, so that this host continues the lines of other hosts, and echoes the line on stdout. At the
end of stdin it uploads all changes, prints `done` and exits. Errors are JSON on stdout before
`ready`, and lines on stderr after it.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import select
import shutil
import signal
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jaxlaunch import contract, regular_files
from jaxlaunch.runs import layout
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.errors import SpecError, StorageError, TrainerError

# The next restart needs these files first.
UPLOAD_INTERVALS_S = {layout.ATTEMPTS: 1.0, layout.SUMMARY: 1.0, layout.METRICS: 1.0}
DEFAULT_UPLOAD_INTERVAL_S = 5.0
# Number of bytes that are read at once.
CHUNK_BYTES = 1 << 20
# A large file is uploaded at this average rate or a lower one.
MAX_BYTES_PER_S = 1 << 20
# The only file that a second host appends to if the first is lost.
MERGED_FILE = layout.ATTEMPTS
# The leader shows the ends of the logs of this many ranks.
SHOWN_RANKS = 32

State = tuple[int, int]  # (modification time in ns, size in bytes)


class Mirror:
    """A folder and its copy in a bucket, without hidden and temporary files."""

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url.rstrip("/"), folder
        # The state and the time of the last upload, by the name of the file.
        self._uploads: dict[str, tuple[State, float]] = {}

    def pull(self, ranks: range, *, logs_only: bool) -> None:
        """Fetch the logs of `ranks` and, unless `logs_only`, all files of earlier attempts."""
        action = f"reading the run folder {self._url}"
        with remote.convert_errors(action, SpecError), _refuse_missing_bucket(action):
            names = remote.list_names(self._url)
            matches = filter(None, map(layout.LOG_NAME.fullmatch, names))
            newest_start = max((int(match[1] or 0) for match in matches), default=0)
            for name in names:
                if not name.startswith(".") and _is_needed(
                    name, newest_start, ranks, logs_only=logs_only
                ):
                    path = self._folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    # Another process may have removed the object since it was listed.
                    with contextlib.suppress(FileNotFoundError):
                        path.write_bytes(self._filesystem().cat_file(f"{self._url}/{name}"))
                        self._uploads[name] = _file_state(path), 0.0

    def move_ranks(self, old_ranks: range, ranks: range) -> None:
        """Upload the logs that other hosts continue, and fetch those of the new `ranks`."""
        self.push(at_once=True)
        for name in list(self._uploads):
            match = layout.LOG_NAME.fullmatch(name)
            if match and int(match[2]) in old_ranks and int(match[2]) not in ranks:
                del self._uploads[name]
                (self._folder / name).unlink(missing_ok=True)
        for rank in ranks:
            if rank not in old_ranks:
                self.pull(range(rank, rank + 1), logs_only=True)

    def push(self, *, at_once: bool = False) -> None:
        """Upload the changed files that are due, or all changed files if `at_once`.

        A file that cannot be read, or that the store refuses, does not keep the others from being
        uploaded. Raises StorageError, SpecError.
        """
        now, refusal = time.monotonic(), None
        for name, state in self._file_states().items():
            uploaded_state, uploaded_at = self._uploads.get(name, ((0, -1), 0.0))
            interval_s = UPLOAD_INTERVALS_S.get(name, DEFAULT_UPLOAD_INTERVAL_S)
            interval_s = max(interval_s, state[1] / MAX_BYTES_PER_S)
            if state == uploaded_state or not (at_once or now - uploaded_at >= interval_s):
                continue
            try:
                if self._upload_file(name):
                    self._uploads[name] = state, now
            except (SpecError, OSError) as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    def _upload_file(self, name: str) -> bool:
        """Upload a file. Return False if it no longer exists."""
        try:
            file = open(self._folder / name, "rb", opener=regular_files.open_regular)  # noqa: SIM115
        except FileNotFoundError:
            # A process of the job has removed the file since it was listed.
            return False
        action = f"writing {self._url}/{name}"
        with file, remote.convert_errors(action, SpecError), _refuse_missing_bucket(action):
            source: BinaryIO = file
            if name == MERGED_FILE:
                source = io.BytesIO(self._merge_attempts(file.read()))
            with (
                remote.name_missing_bucket(self._url),
                self._filesystem().open(f"{self._url}/{name}", "wb") as target,
            ):
                shutil.copyfileobj(source, target, CHUNK_BYTES)
        return True

    def _merge_attempts(self, local: bytes) -> bytes:
        """Return the local attempts after those that another host has added to the bucket."""
        remote_attempts = b""
        with contextlib.suppress(FileNotFoundError):
            remote_attempts = self._filesystem().cat_file(f"{self._url}/{MERGED_FILE}")
        local_lines = set(local.splitlines())
        other_lines = (
            line + b"\n" for line in remote_attempts.splitlines() if line not in local_lines
        )
        return b"".join(other_lines) + local

    def _file_states(self) -> dict[str, State]:
        states = {}
        for parent, folders, names in os.walk(self._folder):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for name in names:
                if not name.startswith(".") and not name.endswith(".tmp"):
                    path = Path(parent, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = path.stat()
                        # A pipe or a socket has no content to copy.
                        if stat.S_ISREG(status.st_mode):
                            file_name = str(path.relative_to(self._folder))
                            states[file_name] = status.st_mtime_ns, status.st_size
        return states

    def _filesystem(self) -> Any:
        return remote.open_filesystem(self._url)


@contextlib.contextmanager
def _refuse_missing_bucket(action: str) -> Iterator[None]:
    """Turn the FileNotFoundError for a missing bucket into a StorageError."""
    try:
        yield
    except FileNotFoundError as error:
        raise StorageError(f"{action} failed: {error}") from error


def _file_state(path: Path) -> State:
    status = path.stat()
    return status.st_mtime_ns, status.st_size


def _is_needed(name: str, newest_start: int, ranks: range, *, logs_only: bool) -> bool:
    """Return whether a host with these ranks needs a file.

    It needs only the logs of the newest start: those of its ranks and, if it needs all other files
    as the leader does, those of the first ranks.
    """
    if match := layout.LOG_NAME.fullmatch(name):
        start, rank = int(match[1] or 0), int(match[2])
        return start == newest_start and (rank in ranks or (not logs_only and rank < SHOWN_RANKS))
    return not logs_only


def main() -> int:
    """Mirror the folder until stdin ends and return the exit code."""
    program = "python -m jaxlaunch.trainer.buckets.mirror"
    parser = argparse.ArgumentParser(prog=program, description=__doc__)
    parser.add_argument("url")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, nargs=2, required=True, metavar=("FIRST", "END"))
    whole_help = "fetch all files, not only the logs of these ranks"
    parser.add_argument("--whole", action="store_true", help=whole_help)
    options = parser.parse_args()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        # Output that the processes write while they stop must be uploaded too.
        signal.signal(signal_number, signal.SIG_IGN)
    mirror = Mirror(options.url, options.folder)
    try:
        remote.check_url("the run folder", options.url)
        mirror.pull(range(*options.ranks), logs_only=not options.whole)
    except (TrainerError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return contract.STORAGE
    print("ready", flush=True)
    return _mirror_until_end(mirror, range(*options.ranks))


def _mirror_until_end(mirror: Mirror, ranks: range) -> int:
    is_last, failure, partial_line = False, "", b""
    while True:
        try:
            mirror.push(at_once=is_last)
            failure = ""
        except (TrainerError, OSError) as error:
            if str(error) != failure:
                failure = str(error)
                print(f"mirror: {failure}", file=sys.stderr, flush=True)
        if is_last and not failure:
            # Nobody reads the exit code, because the agent reaps every child in its own loop.
            print("done", flush=True)
        if is_last:
            return contract.STORAGE if failure else contract.DONE
        readable, _, _ = select.select([0], [], [], min(UPLOAD_INTERVALS_S.values()))
        data = os.read(0, 4096) if readable else b""
        is_last = bool(readable) and not data
        *commands, partial_line = (partial_line + data).split(b"\n")
        for command in commands:
            old_ranks, ranks = ranks, range(*map(int, command.split()[1:]))
            try:
                mirror.move_ranks(old_ranks, ranks)
            except (TrainerError, OSError) as error:
                # The agent does not wait for long, so an error is only reported.
                message = f"mirror: the logs of ranks that moved may lack lines: {error}"
                print(message, file=sys.stderr, flush=True)
            print(command.decode(), flush=True)


if __name__ == "__main__":
    sys.exit(main())

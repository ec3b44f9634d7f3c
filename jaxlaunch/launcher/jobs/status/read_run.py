"""Program that writes the contents of a run folder to stdout, for `status` and `logs`.

jobs/volume.py runs the source of this module with `python -c` in a pod, so it must not import
jaxlaunch. The only argument is a JSON object: `folder`, `names` (layout.READ_NAMES), `ranks` (a
list, or null for all), `pattern` (a regular expression for lines, or null), `tail` (the number of
lines of each rank, or null) and `bytes` (the limit for all logs together). The answer is a JSON
object: `summary` (without stacks) and `attempts` are the texts of the files, and each of the `logs`
has `rank`, `text` and `left_out` (the number of bytes before the text). The answer is compressed
with zlib and written as lines of base64 with a prefix. The last line has its SHA-256.
"""

from __future__ import annotations

import base64
import collections
import hashlib
import json
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO

PREFIX, END = "jaxlaunch run: ", "jaxlaunch run end: "
# Characters of the answer in one line. The container runtime splits lines of more than 16 KiB.
LINE_CHARS = 8000
# A summary may hold the stacks of thousands of ranks.
MAX_SUMMARY_BYTES, MAX_ATTEMPTS_BYTES = 1 << 25, 1 << 18
# First line of each file of a log but its first, written by launcher/agent/io/output.
ROTATION_LINE = re.compile(rb"\((\d{1,18}) bytes of this log are before this file; [^\n]{1,80}\)")


def open_below(path: str, root: str) -> BinaryIO | None:
    """Open a regular file below `root` without following links below it, or return None."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    *folders, name = os.path.relpath(path, root).split(os.sep)
    folder_fd = -1
    try:
        folder_fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        for part in folders:
            next_fd = os.open(part, flags | os.O_DIRECTORY, dir_fd=folder_fd)
            os.close(folder_fd)
            folder_fd = next_fd
        fd = os.open(name, flags, dir_fd=folder_fd)
    except OSError:
        return None
    finally:
        if folder_fd >= 0:
            os.close(folder_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def read_end(path: str, max_bytes: int) -> str | None:
    """Return the last `max_bytes` bytes of a file as text, or None if it cannot be read."""
    file = open_below(path, os.path.dirname(path))
    if file is None:
        return None
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - max_bytes))
        return file.read(max_bytes).decode(errors="replace")


def read_summary(path: str) -> str | None:
    """Return the text of summary.json without stacks and NCCL's output, or None if unreadable."""
    file = open_below(path, os.path.dirname(path))
    if file is None:
        return None
    with file:
        data = file.read(MAX_SUMMARY_BYTES + 1)
    try:
        fields = json.loads(data) if len(data) <= MAX_SUMMARY_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return json.dumps(
        {name: value for name, value in fields.items() if name not in ("stacks", "nccl")}
    )


def find_newest_start(folder: str, names: dict[str, str]) -> str:
    """Return the folder of the newest start that has logs, or the run folder if there is none."""
    starts_folder, log_folder = os.path.join(folder, names["starts"]), os.path.dirname(names["log"])
    try:
        numbers = sorted(
            (int(name) for name in os.listdir(starts_folder) if name.isdecimal()), reverse=True
        )
    except OSError:
        return folder
    folders = (os.path.join(starts_folder, str(number)) for number in numbers)
    return next(
        (start for start in folders if os.path.isdir(os.path.join(start, log_folder))), folder
    )


def read_log(
    run_folder: str,
    path: str,
    rank: int,
    pattern: re.Pattern[str] | None,
    tail: int | None,
    max_bytes: int,
) -> dict[str, Any]:
    """Return the last selected lines of a rank, and the number of bytes left out before them.

    Args:
        run_folder: Folder of the run, below which no link is followed.
        path: The newest file of the rank's log, below `run_folder`.
        rank: The rank.
        pattern: Regular expression for the lines, or None for all.
        tail: Largest number of lines, or None.
        max_bytes: Largest number of bytes.
    """
    files = [
        file
        for file in (open_below(path + ".1", run_folder), open_below(path, run_folder))
        if file is not None
    ]
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    # Without a pattern only the end of the log is read.
    skipped_bytes = max(0, sum(sizes) - max_bytes) if pattern is None else 0
    lines, held_bytes, left_out = collections.deque[bytes](), 0, 0
    for position, (file, length) in enumerate(zip(files, sizes, strict=True)):
        with file:
            first_line = file.readline(200).rstrip(b"\n")
            rotated = ROTATION_LINE.fullmatch(first_line)
            if rotated is None:
                file.seek(0)
            elif position == 0:
                left_out += int(rotated[1])
            content_start = file.tell()
            if skipped_bytes >= length:
                left_out, skipped_bytes = left_out + length - content_start, skipped_bytes - length
                continue
            if skipped_bytes > content_start:
                file.seek(skipped_bytes)
                # The rest of a partial line is skipped.
                file.readline()
                left_out += file.tell() - content_start
            skipped_bytes = 0
            for line in file:
                if pattern is not None and pattern.search(line.decode(errors="replace")) is None:
                    continue
                lines.append(line)
                held_bytes += len(line)
                while held_bytes > max_bytes or (tail is not None and len(lines) > tail):
                    dropped_bytes = len(lines.popleft())
                    held_bytes, left_out = held_bytes - dropped_bytes, left_out + dropped_bytes
    return {"rank": rank, "text": b"".join(lines).decode(errors="replace"), "left_out": left_out}


def find_ranks(folder: str, log: str, ranks: Iterable[int] | None) -> list[int]:
    """Return those of the ranks, or of all, that have a log in the folder of a start."""
    log_folder, template = os.path.split(log)
    prefix, suffix = map(re.escape, template.split("{rank}"))
    pattern = re.compile(prefix + r"(\d{1,7})" + suffix)
    try:
        names = os.listdir(os.path.join(folder, log_folder))
    except OSError:
        return []
    existing_ranks = {int(match[1]) for match in map(pattern.fullmatch, names) if match}
    return sorted(existing_ranks if ranks is None else existing_ranks & set(ranks))


def main() -> None:
    """Write the answer to the request in the only argument."""
    request = json.loads(sys.argv[1])
    folder, pattern, names = request["folder"], request["pattern"], request["names"]
    start_folder = find_newest_start(folder, names)
    ranks = find_ranks(start_folder, names["log"], request["ranks"])
    compiled_pattern = None if pattern is None else re.compile(pattern)
    answer = {
        "summary": read_summary(os.path.join(folder, names["summary"])),
        "attempts": read_end(os.path.join(folder, names["attempts"]), MAX_ATTEMPTS_BYTES),
        "logs": [
            read_log(
                folder,
                os.path.join(start_folder, names["log"].format(rank=rank)),
                rank,
                compiled_pattern,
                request["tail"],
                request["bytes"] // len(ranks),
            )
            for rank in ranks
        ],
    }
    packed = zlib.compress(json.dumps(answer).encode())
    text = base64.b64encode(packed).decode()
    for start in range(0, len(text), LINE_CHARS):
        print(PREFIX + text[start : start + LINE_CHARS])
    print(END + hashlib.sha256(packed).hexdigest(), flush=True)


if __name__ == "__main__":
    main()

"""Program that reads a run folder and writes its contents to stdout, for `status` and `logs --from-volume`.

Its source is the argument of `python -c` in a pod, so it must not import jaxlaunch. The only argument is JSON:
`folder`, `ranks` (a list, or null for all), `pattern` (of lines, or null), `tail` (lines of each rank, or null) and
`bytes` (of all logs together). The answer is JSON: `summary` (without stacks) and `attempts` as in the files, and
`logs`, each with `rank`, `text` and `left_out` (bytes before the text). It is compressed with zlib and written as lines
of base64 with a prefix. The last line has its SHA-256.
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
# The container runtime splits lines of more than 16 KiB.
WIDTH = 8000
# In bytes. A summary may hold the stacks of thousands of ranks.
MAX_SUMMARY, MAX_ATTEMPTS = 1 << 25, 1 << 18
# The first line of a file that is not the first of its log, as launcher/agent/io/output writes it.
ROTATED = re.compile(rb"\((\d{1,18}) bytes of this log are before this file; [^\n]{1,80}\)")
NAME = re.compile(r"rank-(\d{1,7})\.log")


def opened(path: str, below: str) -> BinaryIO | None:
    """Open a regular file below a folder, or return None. A pipe would block, and a link may lead anywhere."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    *between, name = os.path.relpath(path, below).split(os.sep)
    at = -1
    try:
        at = os.open(below, os.O_RDONLY | os.O_DIRECTORY)
        for each in between:
            inner = os.open(each, flags | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        fd = os.open(name, flags, dir_fd=at)
    except OSError:
        return None
    finally:
        if at >= 0:
            os.close(at)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return os.fdopen(fd, "rb")


def end(path: str, size: int) -> str | None:
    """Return the last `size` bytes of a file as text, or None if it cannot be read."""
    file = opened(path, os.path.dirname(path))
    if file is None:
        return None
    with file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size).decode(errors="replace")


def summary(path: str) -> str | None:
    """Return summary.json without stacks and NCCL's text, or None if it cannot be read."""
    file = opened(path, os.path.dirname(path))
    if file is None:
        return None
    with file:
        data = file.read(MAX_SUMMARY + 1)
    try:
        fields = json.loads(data) if len(data) <= MAX_SUMMARY else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict):
        return None
    return json.dumps({name: value for name, value in fields.items() if name not in ("stacks", "nccl")})


def newest(folder: str) -> str:
    """Return the folder of the newest start that has logs, or the run's own folder."""
    starts = os.path.join(folder, "starts")
    try:
        numbers = sorted((int(name) for name in os.listdir(starts) if name.isdecimal()), reverse=True)
    except OSError:
        return folder
    found = (os.path.join(starts, str(number)) for number in numbers)
    return next((start for start in found if os.path.isdir(os.path.join(start, "logs"))), folder)


def log_path(folder: str, rank: int) -> str:
    """Return the path of a rank's newest log in the folder of a start."""
    return os.path.join(folder, "logs", f"rank-{rank}.log")


def log(
    run: str, folder: str, rank: int, pattern: re.Pattern[str] | None, tail: int | None, size: int
) -> dict[str, Any]:
    """Return the last selected lines of a rank, at most `size` bytes, and the number of omitted bytes before them.

    Args:
        run: Folder of the run, below which no link is followed.
        folder: Folder of a start of the run, below `run`.
        rank: The rank.
        pattern: Pattern of the lines, or None for all.
        tail: Largest number of lines, or None.
        size: Largest number of bytes.
    """
    path = log_path(folder, rank)
    files = [file for file in (opened(path + ".1", run), opened(path, run)) if file is not None]
    sizes = [os.fstat(file.fileno()).st_size for file in files]
    # Without a pattern only the end of the log is read.
    skip = max(0, sum(sizes) - size) if pattern is None else 0
    kept, held, left_out = collections.deque[bytes](), 0, 0
    for place, (file, length) in enumerate(zip(files, sizes, strict=True)):
        with file:
            first = file.readline(200).rstrip(b"\n")
            rotated = ROTATED.fullmatch(first)
            if rotated is None:
                file.seek(0)
            elif place == 0:
                left_out += int(rotated[1])
            begin = file.tell()
            if skip >= length:
                left_out, skip = left_out + length - begin, skip - length
                continue
            if skip > begin:
                file.seek(skip)
                # The rest of a partial line is skipped.
                file.readline()
                left_out += file.tell() - begin
            skip = 0
            for line in file:
                if pattern is not None and pattern.search(line.decode(errors="replace")) is None:
                    continue
                kept.append(line)
                held += len(line)
                while held > size or (tail is not None and len(kept) > tail):
                    gone = len(kept.popleft())
                    held, left_out = held - gone, left_out + gone
    return {"rank": rank, "text": b"".join(kept).decode(errors="replace"), "left_out": left_out}


def found(folder: str, ranks: Iterable[int] | None) -> list[int]:
    """Return the requested ranks that have a log."""
    try:
        names = os.listdir(os.path.join(folder, "logs"))
    except OSError:
        return []
    here = {int(match[1]) for match in map(NAME.fullmatch, names) if match}
    return sorted(here if ranks is None else here & set(ranks))


def main() -> None:
    """Answer the request in the only argument."""
    asked = json.loads(sys.argv[1])
    folder, pattern = asked["folder"], asked["pattern"]
    logs = newest(folder)
    ranks = found(logs, asked["ranks"])
    matches = None if pattern is None else re.compile(pattern)
    answer = {
        "summary": summary(os.path.join(folder, "summary.json")),
        "attempts": end(os.path.join(folder, "attempts.jsonl"), MAX_ATTEMPTS),
        "logs": [log(folder, logs, rank, matches, asked["tail"], asked["bytes"] // len(ranks)) for rank in ranks],
    }
    packed = zlib.compress(json.dumps(answer).encode())
    text = base64.b64encode(packed).decode()
    for start in range(0, len(text), WIDTH):
        print(PREFIX + text[start : start + WIDTH])
    print(END + hashlib.sha256(packed).hexdigest(), flush=True)


if __name__ == "__main__":
    main()

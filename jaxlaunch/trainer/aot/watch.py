"""Keeps a compilation within a machine's memory and within an hour, and says how far it is."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import contract

EVERY = 15.0  # seconds between two of them
LONGEST = 3600.0  # seconds
SHARE = 0.8  # of the memory that is free at the start
GIB = 1024**3


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Within it the process ends with a refusal when it takes longer, or holds more memory, than it may.

    A compiler's call does not return before it is done, so nothing milder ends it.
    """
    done, most = threading.Event(), _field("/proc/meminfo", "MemAvailable") * SHARE
    thread = threading.Thread(target=_watch, args=(done, most), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _watch(done: threading.Event, most: float) -> None:
    started = said = time.monotonic()
    while not done.wait(1.0):
        now, held = time.monotonic(), _field("/proc/self/status", "VmRSS")
        if held > most:
            _refuse(f"the compiler needs more than {most / GIB:.1f} GiB, {SHARE:.0%} of this machine's free memory")
        if now - started > LONGEST:
            _refuse(f"the compiler is not done after {LONGEST:.0f} s")
        if now - said >= EVERY:
            said = now
            print(
                f"{contract.COMPILING}{now - started:.0f} s, {held / GIB:.1f} GiB of this machine's memory",
                file=sys.stderr,
            )


def _refuse(why: str) -> None:
    print(contract.refusal_line(f"{why}: compile a smaller model of the same kind", contract.BAD_SPEC), file=sys.stderr)
    sys.stderr.flush()
    os._exit(contract.BAD_SPEC)


def _field(file: str, key: str) -> int:
    """Bytes of a field that /proc gives in kB."""
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024

"""How tests compile: quickly, once for all processes of a gang, into the user's cache directory.

What is there was compiled from equal HLO by an equal JAX for an equal processor, with equal
options: JAX's key and the folder's name contain them, but not the position of an operation in a
file. A test that reads this position compiles for itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path

from tests.site.jaxcache import BEFORE

# XLA's options for what compiles far longer than it computes (jaxlib 0.10). LLVM IR of a fusion is
# written at once, not by way of MLIR: less than half the processor time. A program's code is one
# module, not up to 32, each with a copy of what they share: three quarters of the rest.
QUICK_OPTIONS = {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1}
# The same as environment variables of a process; and LLVM does without most of its passes.
QUICK_COMPILES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "XLA_FLAGS": " ".join(f"--{name}={value}".lower() for name, value in QUICK_OPTIONS.items()),
}
# Of a gang, process 0 compiles for all: tests/site/sitecustomize.py, which must be on the path of
# each.
SITE = str(Path(__file__).parent / "site")
FOLDER_VARIABLE = "TEST_COMPILED"  # of the environment variable that holds the folder's path
MAX_AGE_S = 30 * 24 * 3600.0  # seconds since it was written; then a program is compiled again
VISIBLE_AFTER_S = 60.0  # an entry's time is that of its writing: it is visible some moments later


def quick_start_env() -> dict[str, str]:
    """Return variables for a command that starts the processes of a gang."""
    make_folder()  # for other programs: a benchmark
    return {
        **QUICK_COMPILES,
        "JAX_SHARE_BINARY_BETWEEN_HOSTS": "1",
        "JAX_COMPILATION_CACHE_DIR": os.environ[FOLDER_VARIABLE],
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        BEFORE: str(time.time() - VISIBLE_AFTER_S),
        "PYTHONPATH": SITE,
    }


def make_folder() -> None:
    """Make the folder for this process and its children, and remove old files in it."""
    if FOLDER_VARIABLE in os.environ:
        return  # the first process of the test run has done so
    home = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlaunch" / "compiled"
    )
    folder = home / hashlib.sha256(describe_processor().encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - MAX_AGE_S
    for file in home.glob("*/*"):
        with suppress(FileNotFoundError):  # another test run removes it too
            if file.stat().st_mtime < oldest:
                file.unlink()
    os.environ[FOLDER_VARIABLE] = str(folder)


def describe_processor() -> str:
    """Return what code for this machine's processor depends on."""
    with suppress(OSError):
        return "\n".join(
            sorted(
                set(
                    re.findall(
                        r"^(?:model name|flags)\s.*", Path("/proc/cpuinfo").read_text(), re.M
                    )
                )
            )
        )
    return " ".join(os.uname())

"""Run the suite in two lanes: `make test` runs what every change needs, `make test-all` runs the rest.

The marker `extended` is the only rule: it marks what a contributor need not run (checks of
documentation, benchmarks, scale, compilers of other accelerators, comparisons with other libraries,
long kills). A lane has the same parts as the other one. Tests that mostly wait run one pytest after
the other in the background: those that start and stop clusters of their own, the others of
tests/cluster in parallel on one cluster, and the gang tests with time limits (heartbeats, timeouts,
alerts), two files at a time. Meanwhile the tests that compute, and have no time limits of their
own, use what is left of the machine, at a lower priority. Their gangs come last, when nothing else
runs, three files at a time: starts and stops of two gangs leave a sixth of two cores idle. The
output of each pytest run is printed in one piece, and the names of all failed tests are printed at
the end, because of a long log often only the end is kept.

A few failed tests are run again when nothing else runs: on a shared machine, what they wait for may
have been starved. Tests that pass only then are named, and they fail the suite if they are more
than one in a thousand.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

import pytest

from tests import failures

Command = Sequence[str]
PYTEST = (sys.executable, "-m", "pytest", "--durations=20")
LOW_PRIORITY = ("nice", "-n", "10")
A_THOUSAND = 1000  # tests, of which one may pass only alone
MAX_AGAIN = 5  # more faults are no accident; all tests of a file that a fixture failed count as one
AGAIN_WITHIN_S = 4500.0  # after the start: CI gives the suite no more than some minutes beyond

# In the order of collection; a file's tests share their gangs, so they stay together.
BY_FILE = ("--dist", "loadfile", "--no-loadscope-reorder")
# What the tests of a file share is made once where they stay together, but for files at the seams.
SPLIT = ("-n", "auto", "--dist", "worksteal")


def lane_parts(is_extended: bool) -> dict[str, tuple[Command, ...]]:
    """Return the pytest commands of each part of a lane, in the order in which they run."""
    lane = "extended" if is_extended else "not extended"
    cluster = (
        (*PYTEST, "tests/cluster", "-m", f"before_the_cluster and {lane}"),
        (*PYTEST, "tests/cluster", "-m", f"not before_the_cluster and {lane}", "-n", "3"),
    )
    wait = (
        *cluster,
        (*PYTEST, "tests/gang", "-m", f"not computes and {lane}", "-n", "2", *BY_FILE),
    )
    units = (
        *PYTEST,
        *SPLIT,
        "tests",
        "--ignore",
        "tests/cluster",
        "--ignore",
        "tests/gang",
        "-m",
        lane,
    )
    gangs = (*PYTEST, "tests/gang", "-m", f"computes and {lane}", "-n", "3", *BY_FILE)
    return {
        "cluster": cluster,
        "wait": wait,
        "compute": ((*LOW_PRIORITY, *units), (*LOW_PRIORITY, *gangs)),
    }


def main() -> int:
    """Run a lane and return 0 if all of it passed, else the greatest exit code of a pytest.

    The arguments are `--extended` for the lane of `make test-all`, and the name of a part to run it
    alone.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    # A shell makes what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    names = [name for name in sys.argv[1:] if name != "--extended"]
    is_extended = len(names) < len(sys.argv) - 1
    parts = lane_parts(is_extended)
    if names:
        return worst([in_turn(command) for command in parts[names[0]]])
    background = (
        sys.executable,
        "-m",
        "tests.suite",
        *(["--extended"] if is_extended else []),
        "wait",
    )
    return run(background, parts["compute"])


def run(waits: Command, compute: Sequence[Command]) -> int:
    """Runs `waits` beside all of `compute`, one after the other; returns 0 when all passed, some of them when alone.

    An interrupt is passed on once to what runs, which cleans up before this returns.
    """
    began, codes = time.monotonic(), []
    with (
        tempfile.NamedTemporaryFile(prefix="pytest-") as log,
        tempfile.NamedTemporaryFile(prefix="failed-") as failed,
    ):
        os.environ[failures.FILE] = failed.name
        title(
            "in the background; its output follows that of the next ones, until then see "
            f"{log.name}: ",
            waits,
        )
        background = start(waits, log)
        try:
            for command in compute:
                codes.append(in_turn(command))
            title("in the background until now: ", waits)
            codes.append(follow(background, log.name))
        except BaseException:
            interrupt(background)
            follow(background, log.name)
            raise
        found = failures.read(Path(failed.name))
        names = list(dict.fromkeys(failure.name for failure in found))
        causes = {failure.cause for failure in found}
        code = worst(codes)
        few = 0 < len(causes) <= MAX_AGAIN and time.monotonic() - began < AGAIN_WITHIN_S
        alone_passes = code == pytest.ExitCode.TESTS_FAILED and few and again(names)
        passes = alone_passes and len(causes) * A_THOUSAND <= failures.ran(Path(failed.name))
        print(
            *(
                line
                for line in Path(failed.name).read_text().splitlines()
                if line.startswith("FAILED")
            ),
            sep="\n",
        )
    ends = ", ".join("passed" if code == 0 else f"exit {code}" for code in codes)
    alone = (
        f"; when run again, alone, what failed passed: {', '.join(names)}" if alone_passes else ""
    )
    alone += "" if passes or not alone_passes else f", more than one test in {A_THOUSAND:,}"
    print(f"===== {ends}: {(time.monotonic() - began) / 60:.1f} minutes{alone}", flush=True)
    return 0 if passes else code


def worst(codes: Sequence[int]) -> int:
    """The greatest exit code; of a process that a signal killed, the signal's number."""
    return max(map(abs, codes))


def again(names: Sequence[str]) -> bool:
    """Whether the tests of these names pass now, file by file."""
    of = itertools.groupby(sorted(names), lambda name: name.partition("::")[0])
    return not any([in_turn((*PYTEST, *of_file)) for _, of_file in of])


def in_turn(command: Command) -> int:
    """Runs the command to its end; returns its exit code."""
    title("", command)
    return end(start(command))


def title(how: str, command: Command) -> None:
    print(f"===== {how}{' '.join(command)}", flush=True)


def start(command: Command, log: BinaryIO | None = None) -> subprocess.Popen[bytes]:
    """In a process group of its own: a Ctrl-C reaches only us, and it must not interrupt the cleanup a second time."""
    output = None if log is None else log.fileno()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
    )


def end(process: subprocess.Popen[bytes]) -> int:
    """Waits for the process; returns its exit code."""
    try:
        return process.wait()
    except BaseException:
        interrupt(process)
        process.wait()
        raise


def interrupt(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


def follow(process: subprocess.Popen[bytes], log: str) -> int:
    """Prints what the process wrote and goes on to write; returns its exit code."""
    with open(log, "rb") as reader:
        while True:
            has_ended = process.poll() is not None
            sys.stdout.buffer.write(reader.read())
            sys.stdout.flush()
            if has_ended:
                return process.returncode
            time.sleep(0.2)


if __name__ == "__main__":
    sys.exit(main())

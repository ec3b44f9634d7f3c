"""Run the suite in two lanes: `make test` for every change, `make test-all` for the rest.

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
than one in a thousand, or more than one in a lane of fewer tests.
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
THOUSAND_TESTS = 1000  # tests, of which one may pass only alone
MAX_AGAIN = 5  # more are not an accident; all tests of a file that a fixture failed count as one
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
        return worst_code([run_command(command) for command in parts[names[0]]])
    background = (
        sys.executable,
        "-m",
        "tests.suite",
        *(["--extended"] if is_extended else []),
        "wait",
    )
    return run_parts(background, parts["compute"])


def run_parts(waits: Command, compute: Sequence[Command]) -> int:
    """Run `waits` next to all of `compute`, one after the other; return 0 if all passed.

    Some may pass only when run again alone. An interrupt is passed on once to what runs, which
    cleans up before this returns.
    """
    started_at, codes = time.monotonic(), []
    with (
        tempfile.NamedTemporaryFile(prefix="pytest-") as log,
        tempfile.NamedTemporaryFile(prefix="failed-") as failed,
    ):
        os.environ[failures.FILE_VARIABLE] = failed.name
        print_title(
            "in the background; its output follows that of the next ones, until then see "
            f"{log.name}: ",
            waits,
        )
        background = start_command(waits, log)
        try:
            for command in compute:
                codes.append(run_command(command))
            print_title("in the background until now: ", waits)
            codes.append(follow_log(background, log.name))
        except BaseException:
            interrupt(background)
            follow_log(background, log.name)
            raise
        failed_tests = failures.read_failures(Path(failed.name))
        names = list(dict.fromkeys(failure.name for failure in failed_tests))
        causes = {failure.cause for failure in failed_tests}
        code = worst_code(codes)
        few = 0 < len(causes) <= MAX_AGAIN and time.monotonic() - started_at < AGAIN_WITHIN_S
        alone_passes = code == pytest.ExitCode.TESTS_FAILED and few and pass_again(names)
        allowed = max(1, failures.count_tests(Path(failed.name)) // THOUSAND_TESTS)
        passes = alone_passes and len(causes) <= allowed
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
    alone += "" if passes or not alone_passes else f", more than one test in {THOUSAND_TESTS:,}"
    print(f"===== {ends}: {(time.monotonic() - started_at) / 60:.1f} minutes{alone}", flush=True)
    return 0 if passes else code


def worst_code(codes: Sequence[int]) -> int:
    """Return the greatest exit code, or the signal's number of a killed process."""
    return max(map(abs, codes))


def pass_again(names: Sequence[str]) -> bool:
    """Run the tests of these names again, file by file; return whether all pass."""
    tests_by_file = itertools.groupby(sorted(names), lambda name: name.partition("::")[0])
    return not any([run_command((*PYTEST, *of_file)) for _, of_file in tests_by_file])


def run_command(command: Command) -> int:
    """Run the command to its end and return its exit code."""
    print_title("", command)
    return wait_for_end(start_command(command))


def print_title(description: str, command: Command) -> None:
    print(f"===== {description}{' '.join(command)}", flush=True)


def start_command(command: Command, log: BinaryIO | None = None) -> subprocess.Popen[bytes]:
    """Start the command in a process group of its own.

    A Ctrl-C reaches only this process, and must not interrupt the cleanup a second time.
    """
    output = None if log is None else log.fileno()
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, process_group=0
    )


def wait_for_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the process and return its exit code."""
    try:
        return process.wait()
    except BaseException:
        interrupt(process)
        process.wait()
        raise


def interrupt(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)


def follow_log(process: subprocess.Popen[bytes], log: str) -> int:
    """Print what the process writes, and return its exit code."""
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

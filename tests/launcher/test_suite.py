"""`make test` runs several pytests, shows each whole, and fails when one fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests import failures, suite

ROOT = Path(__file__).parents[2]
RUNS = "import sys; from tests import suite; sys.exit(suite.run_parts({waits!r}, {compute!r}))"


def print_words(*words: str, code: int = 0) -> list[str]:
    text = (
        f"import sys, time\nfor word in {words}: print(word, flush=True); "
        f"time.sleep(0.05)\nsys.exit({code})"
    )
    return [sys.executable, "-c", text]


def start_suite(waits: Sequence[str], compute: Sequence[Sequence[str]]) -> subprocess.Popen[str]:
    program = RUNS.format(waits=waits, compute=compute)
    pipe = subprocess.PIPE
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }  # of a worker of xdist
    return subprocess.Popen(
        [sys.executable, "-c", program], cwd=ROOT, env=env, stdout=pipe, stderr=pipe, text=True
    )


def write_test(folder: Path, text: str) -> list[str]:
    """The command that runs this file of tests there."""
    (folder / "test_it.py").write_text(text)
    options = ("-p", "tests.failures", "-p", "no:cacheprovider", "--rootdir", str(folder))
    return [sys.executable, "-m", "pytest", *options, str(folder)]


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_output_of_each_run_is_shown_and_one_failure_fails_all(failing: int | None) -> None:
    waits, first, two = (
        print_words(*(f"{name}-{part}" for part in range(3)), code=int(place == failing))
        for place, name in enumerate(("waits", "one", "two"))
    )
    with start_suite(waits, [first, two]) as process:
        out, _ = process.communicate()
    words = [line for line in out.splitlines() if re.fullmatch(r"\w+-\d", line)]
    assert words == [f"{name}-{part}" for name in ("one", "two", "waits") for part in range(3)]
    assert process.returncode == (0 if failing is None else 1)


def test_interrupt_ends_runs_and_shows_their_cleanup(tmp_path: Path) -> None:
    cleans = """
import pathlib, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    pathlib.Path(sys.argv[1]).touch()
    time.sleep(600)
finally:
    print("cleaned up", flush=True)
"""
    up = [tmp_path / name for name in ("waits", "computes")]
    waits, computes = ([sys.executable, "-c", cleans, str(path)] for path in up)
    with start_suite(waits, [computes, print_words("never")]) as process:
        while process.poll() is None and not all(path.exists() for path in up):
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate()
    assert out.count("cleaned up\n") == 2 and "never\n" not in out
    assert process.returncode != 0


@pytest.mark.parametrize("is_extended", [False, True])
def test_every_test_folder_is_in_one_run_of_each_lane(is_extended: bool) -> None:
    lane = "extended" if is_extended else "not extended"
    parts = suite.lane_parts(is_extended)
    runs = [part for command in (*parts["wait"], *parts["compute"]) for part in command]
    assert {"tests", "tests/cluster", "tests/gang", lane} <= set(runs)
    kinds = ("computes", "not computes", "before_the_cluster", "not before_the_cluster")
    assert {f"{kind} and {lane}" for kind in kinds} <= set(runs)


def test_names_of_failed_tests_are_printed_last(tmp_path: Path) -> None:
    first = write_test(tmp_path, "def test_passes(): pass\ndef test_fails(): assert 1 == 2\n")
    with start_suite(first, [[*first, "-n", "1"]]) as process:
        out, _ = process.communicate()
    *_, one_line, other, last = out.expandtabs(1).splitlines()
    assert one_line == other == "FAILED test_it.py::test_fails (call): assert 1 == 2"
    assert last.startswith("===== exit 1, exit 1: ")
    assert process.returncode == 1


FAILS_ONCE = """
import pathlib, pytest
@pytest.mark.parametrize("number", range({count}))
def test_fails(number):
    seen = pathlib.Path({folder!r}, str(number))
    if not seen.exists():
        seen.touch()
        assert False, "starved"
"""


@pytest.mark.parametrize(
    ("count", "in_a", "named", "code"),
    [
        (suite.MAX_AGAIN, 1, True, 0),
        (suite.MAX_AGAIN + 1, 1, False, 1),
        (suite.MAX_AGAIN, 1000, True, 1),
        (1, 1000, True, 0),
    ],
)
def test_flaky_tests_are_named_and_fail_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    count: int,
    in_a: int,
    named: bool,
    code: int,
) -> None:
    first = write_test(tmp_path, FAILS_ONCE.format(count=count, folder=str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(suite, "PYTEST", first[:-1])
    monkeypatch.setattr(suite, "THOUSAND_TESTS", in_a)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Half of the time to start pytest, which starts four times.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    monkeypatch.setenv(failures.FILE_VARIABLE, "")  # run() sets it, and this gives it back
    assert suite.run_parts(print_words("waits"), [first]) == code
    last = capfd.readouterr().out.splitlines()[-1]
    assert ("when run again, alone, what failed passed: test_it.py::test_fails[0]" in last) == named
    assert ("more than one test in 1,000" in last) == (named and code == 1)


def test_failed_fixture_of_a_file_counts_once() -> None:
    setup = [failures.Failure(f"a.py::test[{number}]", "(setup): no answer") for number in range(9)]
    calls = [failures.Failure(f"a.py::test[{number}]", "(call): no answer") for number in range(2)]
    assert len({failure.cause for failure in setup}) == 1
    assert len({failure.cause for failure in [*setup, *calls]}) == 3


def test_killed_pytest_fails_the_suite() -> None:
    assert suite.worst_code([0, -9, 0]) == 9

"""Progress over a real pipe: what an agent would read."""

import json
import os
import threading
from collections.abc import Iterator

import pytest

from jaxlaunch import contract
from jaxlaunch.trainer.metrics.progress import Progress


class Pipe:
    """A non-blocking pipe, and its other end as JSON lines."""

    def __init__(self) -> None:
        self.end, self.fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.reader = open(self.end)  # noqa: SIM115 (open as long as the object)
        self.lines = (json.loads(line) for line in self.reader if line.strip())
        self.progress = Progress(self.fd)

    def until(self, expected: dict[str, object]) -> list[dict[str, object]]:
        """Lines up to and including `expected`."""
        read = []
        for line in self.lines:
            read.append(line)
            if line == expected:
                return read
        raise AssertionError(f"{expected} never came: {read}")


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    pipe.progress.close()
    os.close(pipe.fd)
    pipe.reader.close()


def test_calls_without_pipe_do_nothing() -> None:
    progress = Progress(None)
    progress.report_hello()
    progress.report_phase("step", 1)
    progress.report_error(ValueError("x"), 83)
    progress.close()


def test_hello_names_versions(pipe: Pipe) -> None:
    pipe.progress.report_hello()
    hello = next(pipe.lines)
    assert (
        hello["hello"] == "trainer"
        and hello["python"].startswith("3.")
        and hello["jax"][0].isdigit()
    )


def test_phase_change_is_sent_immediately(pipe: Pipe) -> None:
    for phase in ("init", "restore", "compile", "step"):
        pipe.progress.report_phase(phase, 7)
        assert next(pipe.lines) == {"phase": phase, "step": 7}


def test_many_steps_make_few_lines_and_newest_is_sent(pipe: Pipe) -> None:
    for step in range(10_001):
        pipe.progress.report_phase("step", step)
    read = pipe.until({"phase": "step", "step": 10_000})
    assert len(read) < 1000
    assert [line["step"] for line in read] == sorted(line["step"] for line in read)


def test_alternating_phases_are_limited(pipe: Pipe) -> None:
    for step in range(5_000):
        pipe.progress.report_phase("data", step)
        pipe.progress.report_phase("step", step)
    pipe.progress.report_phase("save", 5_000)
    assert len(pipe.until({"phase": "save", "step": 5_000})) < 1000


def test_commit_is_sent_after_its_step(pipe: Pipe) -> None:
    pipe.progress.report_phase("step", 1)
    pipe.progress.report_phase("step", 2)
    pipe.progress.report_committed(2)
    assert {"phase": "step", "step": 2} in pipe.until({"committed": 2})


def test_error_line_holds_end_of_long_traceback(pipe: Pipe) -> None:
    def fall(depth: int) -> None:
        if depth == 0:
            raise ValueError("é" * 100_000)
        (fall if depth % 2 else lambda d: fall(d))(depth - 1)

    with pytest.raises(ValueError) as caught:
        fall(50)
    thread = threading.Thread(target=pipe.progress.report_error, args=(caught.value, 83))
    thread.start()
    error = next(pipe.lines)["error"]
    thread.join()
    assert error["type"] == "ValueError" and error["code"] == 83
    assert error["traceback"].rstrip().endswith("é") and error["message"].startswith("é")


def test_full_pipe_never_blocks_caller(pipe: Pipe) -> None:
    for size in (4096, 1):  # to the last byte
        with pytest.raises(BlockingIOError):
            while True:
                os.write(pipe.fd, b"\n" * size)
    pipe.progress.report_phase("step", 5)
    pipe.progress.report_committed(5)
    assert pipe.until({"committed": 5}) == [{"phase": "step", "step": 5}, {"committed": 5}]


def test_line_after_full_pipe_is_complete(pipe: Pipe) -> None:
    os.write(pipe.fd, b"\n" * 60_000)  # there is room for the beginning of a long line
    assert not contract.send(pipe.fd, {"error": {"type": "ValueError", "traceback": "x" * 30_000}})
    assert not contract.send(pipe.fd, {"phase": "step", "step": 4})  # there is room for nothing
    text = os.read(pipe.end, 65536)
    for step in (5, 6):
        assert contract.send(pipe.fd, {"phase": "step", "step": step})
    text += os.read(pipe.end, 65536)
    lines = [line for line in text.split(b"\n") if line]
    assert lines[0].startswith(b'{"error"') and len(lines) == 3
    assert [json.loads(line)["step"] for line in lines[1:]] == [5, 6]


def test_newest_metrics_are_sent_before_close(pipe: Pipe) -> None:
    for step in range(5_000):
        pipe.progress.report_metrics({"step": step})
    pipe.progress.close()
    assert len(pipe.until({"metrics": {"step": 4_999}})) < 1000


def test_stop_and_notes_are_sent(pipe: Pipe) -> None:
    pipe.progress.report_note("walked back to step 20")
    pipe.progress.report_stopped(37, saved=True)
    pipe.progress.close()
    assert next(pipe.lines) == {"note": "walked back to step 20"}
    assert next(pipe.lines) == {"stopped": {"step": 37, "saved": True, "note": ""}}


def test_temporary_phase_restores_previous_phase(pipe: Pipe) -> None:
    pipe.progress.report_phase("data", 7)
    with pytest.raises(KeyError), pipe.progress.temporary_phase("save", 7):
        raise KeyError
    pipe.progress.report_note("the end")
    assert [line.get("phase") for line in pipe.until({"note": "the end"})] == [
        "data",
        "save",
        "data",
        None,
    ]

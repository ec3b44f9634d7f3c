"""Lines from real pipes, whose writers may never stop."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.launcher.agent.io.output import LinePipe


class NoLoop:
    """Replaces the event loop: the tests read by themselves."""

    def watch(self, *_: Any) -> None: ...

    def unwatch(self, *_: Any) -> None: ...


@pytest.fixture
def lines() -> list[bytes]:
    return []


@pytest.fixture
def pipe(lines: list[bytes]) -> Iterator[LinePipe]:
    created = LinePipe(cast(Loop, NoLoop()), 100, lines.append)
    yield created
    created.close()
    os.close(created.write_end)


def test_drain_ends_while_the_writer_continues(pipe: LinePipe, lines: list[bytes]) -> None:
    with subprocess.Popen(
        ["yes", "x" * 50], stdout=pipe.write_end, stderr=subprocess.DEVNULL
    ) as writer:
        try:
            while not lines:
                pipe.drain()
            stopped_at = len(lines)
            pipe.drain()
            assert len(lines) - stopped_at <= 1 + (1 << 20) // 51  # at most what a pipe can hold
        finally:
            writer.kill()


def test_named_pipe_that_a_program_removed_is_closed(tmp_path: Path, lines: list[bytes]) -> None:
    path = tmp_path / "pipe"
    created = LinePipe(cast(Loop, NoLoop()), 100, lines.append, str(path))
    os.write(created.write_end, b"first\nthe last")
    created.close_write_end()
    path.unlink()
    created.drain()
    created.close()
    assert lines == [b"first", b"the last"]


def test_drain_reads_everything_written_before(pipe: LinePipe, lines: list[bytes]) -> None:
    os.write(pipe.write_end, b"line\n" * 10_000 + b"the last")
    pipe.drain()
    pipe.close()
    assert lines == [b"line"] * 10_000 + [b"the last"]

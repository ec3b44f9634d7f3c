"""What launcher, agent and trainer share, where a table does not show it."""

from __future__ import annotations

import bdb
import fcntl
import json
import os
import resource

import pytest

from jaxlaunch import contract


def raise_error(message: str) -> BaseException:
    try:
        raise ValueError(message)
    except ValueError as error:
        return error


@pytest.mark.parametrize("code", [None, contract.CRASH])
def test_error_line_has_exception_traceback_and_code(code: int | None) -> None:
    error = contract.error_line(raise_error("a bad batch"), code)["error"]
    assert (error["type"], error["message"], error["code"]) == ("ValueError", "a bad batch", code)
    assert error["traceback"].startswith("Traceback") and error["traceback"].endswith(
        "ValueError: a bad batch\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_quit_debugger_is_explained_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    monkeypatch.setattr(os, "isatty", lambda fd: is_terminal)
    error = contract.error_line(bdb.BdbQuit(), None)["error"]
    assert error["type"] == "BdbQuit"
    if is_terminal:
        assert error["message"] == ""
    else:
        words = "standard input is not a terminal, so breakpoint() cannot read from it"
        assert words in error["message"] and "debugging#pdb-in-a-rank" in error["message"]


@pytest.mark.parametrize("fill", ["x", "é", "🦊", "\x00"])
def test_error_line_fits_pipe(fill: str) -> None:
    read, write = os.pipe()
    line = contract.error_line(raise_error(fill * 50_000), None)
    assert len(json.dumps(line)) < contract.MAX_LINE
    os.set_blocking(write, False)
    assert contract.send(write, line) or len(json.dumps(line)) > 65_000
    os.close(write)
    with open(read, "rb") as pipe:
        assert json.loads(pipe.readline()) == line


def test_waiting_line_is_sent_on_any_descriptor() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        # The usual limit is 1024.
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
        high = fcntl.fcntl(write, fcntl.F_DUPFD, 1024)  # select takes none from here on
        os.write(write, b"x" * 60_000)
        assert not contract.send(high, {"note": "x" * 30_000})
        os.close(high)
    finally:
        os.close(read)
        os.close(write)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)

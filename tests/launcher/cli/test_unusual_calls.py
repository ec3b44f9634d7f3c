"""Unusual calls that once ended in a traceback, a wrong message, or not at all."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.yaml import reader
from tests.launcher.invoke import Launcher

JOB = "name: c\naccelerator: {type: cpu}\ncommand: [x]\n"
MAIN = (sys.executable, "-m", "jaxlaunch.launcher.cli.main")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(JOB)
    return tmp_path / "c.yaml"


def test_pipe_is_read_unless_it_has_no_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="is a pipe that nothing writes to"):
        reader.read_document(tmp_path / "fifo")
    read_fd, write_fd = os.pipe()
    with subprocess.Popen(("sh", "-c", "sleep 0.2; echo name: a"), stdout=write_fd):
        os.close(write_fd)
        assert reader.read_document(Path(f"/dev/fd/{read_fd}")).data == {"name": "a"}
    os.close(read_fd)


def test_bytes_that_arrive_while_a_pipe_is_opened_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_fd, write_fd = os.pipe()
    select_ready, set_blocking = select.select, os.set_blocking
    unwritten = [b"name: a"]

    def write_job() -> None:
        if unwritten:
            os.write(write_fd, unwritten.pop())
            os.close(write_fd)

    def select_before_write(*arguments: Any) -> Any:
        ready = select_ready(*arguments)
        write_job()
        return ready

    def write_before_wait(descriptor: int, blocking: bool) -> None:
        write_job()
        set_blocking(descriptor, blocking)

    monkeypatch.setattr(select, "select", select_before_write)
    monkeypatch.setattr(os, "set_blocking", write_before_wait)
    assert reader.read_document(Path(f"/dev/fd/{read_fd}")).data == {"name": "a"}
    os.close(read_fd)


def test_closed_or_full_stdout_is_reported(job: Path) -> None:
    process = subprocess.run(
        ("sh", "-c", '"$@" >&-', "sh", *MAIN, "validate", str(job)), capture_output=True, text=True
    )
    assert (process.returncode, process.stderr) == (0, "")
    with open("/dev/full", "w") as device:
        full_process = subprocess.run(
            (*MAIN, "validate", str(job)), stdout=device, stderr=subprocess.PIPE, text=True
        )
    assert full_process.stderr == "The output cannot be written: No space left on device.\n"
    assert full_process.returncode == 2


def test_empty_run_dir_is_refused(run_launcher: Launcher, job) -> None:
    result = run_launcher("run", str(job), "--run-dir", "")
    assert result.code == 2 and "'--run-dir': it is empty" in result.err
    assert [path.name for path in job.parent.iterdir()] == ["c.yaml"]


def test_init_accepts_file_name(run_launcher: Launcher, job) -> None:
    assert run_launcher("init", "first.yaml").code == 0
    assert Path("first.yaml").read_text().count("name: first\n") == 1


def test_tabs_and_undecoded_arguments(run_launcher: Launcher, job) -> None:
    job.write_text("name: c\n\thosts: 2\n")
    result = run_launcher("validate", str(job))
    assert f"{job}:2: is not YAML: a tab in column 1.\n  hint: use spaces instead." in result.err
    for text, line, column in (
        ("a:\n  b: 1\n \tc: 2\n", 3, 2),
        ("a:\n  -\tb: 1\n    c: 2\n", 2, 4),
        ("a:\tb: c\n", 1, 3),
    ):
        job.write_text(text)
        message = run_launcher("validate", str(job)).err
        assert f"{job}:{line}: is not YAML: a tab in column {column}." in message
    override = load.parse_override("name=Übung".encode().decode("ascii", "surrogateescape"))
    assert isinstance(override, load.Override) and override.value == "Übung"

"""Calls that once ended in a traceback, in a wrong sentence, or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.yaml import reader
from tests.launcher.invoke import launcher

JOB = "name: c\naccelerator: {type: cpu}\ncommand: [x]\n"
MAIN = (sys.executable, "-m", "jaxlaunch.launcher.cli.main")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(JOB)
    return tmp_path / "c.yaml"


def test_a_pipe_without_a_writer_is_no_job_and_one_with_is_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match="is a pipe that nothing writes to"):
        reader.read_document(tmp_path / "fifo")
    reads, writes = os.pipe()
    with subprocess.Popen(("sh", "-c", "sleep 0.2; echo name: a"), stdout=writes):
        os.close(writes)
        assert reader.read_document(Path(f"/dev/fd/{reads}")).data == {"name": "a"}
    os.close(reads)


def test_an_output_that_is_closed_or_full_is_no_bug_of_ours(job: Path) -> None:
    closed = subprocess.run(
        ("sh", "-c", '"$@" >&-', "sh", *MAIN, "validate", str(job)), capture_output=True, text=True
    )
    assert (closed.returncode, closed.stderr) == (0, "")
    with open("/dev/full", "w") as full:
        found = subprocess.run(
            (*MAIN, "validate", str(job)), stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (
        found.stderr == "The output cannot be written: No space left on device.\n"
        and found.returncode == 2
    )


def test_an_empty_run_folder_is_not_the_working_folder(job, capsys, monkeypatch) -> None:
    left = launcher(capsys, monkeypatch, "run", str(job), "--run-dir", "")
    assert left.code == 2 and "'--run-dir': it is empty" in left.err
    assert [path.name for path in job.parent.iterdir()] == ["c.yaml"]


def test_init_takes_the_name_of_the_file_for_that_of_the_job(job, capsys, monkeypatch) -> None:
    assert launcher(capsys, monkeypatch, "init", "first.yaml").code == 0
    assert Path("first.yaml").read_text().count("name: first\n") == 1


def test_a_tab_and_a_letter_of_another_locale_are_said(job, capsys, monkeypatch) -> None:
    job.write_text("name: c\n\thosts: 2\n")
    left = launcher(capsys, monkeypatch, "validate", str(job))
    assert f"{job}:2: is not YAML: a tab in column 1.\n  hint: use spaces instead." in left.err
    for text, line, column in (
        ("a:\n  b: 1\n \tc: 2\n", 3, 2),
        ("a:\n  -\tb: 1\n    c: 2\n", 2, 4),
        ("a:\tb: c\n", 1, 3),
    ):
        job.write_text(text)
        said = launcher(capsys, monkeypatch, "validate", str(job)).err
        assert f"{job}:{line}: is not YAML: a tab in column {column}." in said
    found = load.parse_override("name=Übung".encode().decode("ascii", "surrogateescape"))
    assert isinstance(found, load.Override) and found.value == "Übung"

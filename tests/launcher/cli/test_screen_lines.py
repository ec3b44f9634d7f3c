"""What commands show on a terminal: whole words in its width, and the colours of states."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.cli import output, screen_lines
from jaxlaunch.launcher.cli.live_block import LiveBlock
from jaxlaunch.launcher.cli.screen_lines import Colour, Paragraph
from jaxlaunch.launcher.cli.status import describe_explanation
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation
from jaxlaunch.launcher.report.curves import Curve
from jaxlaunch.records.rank_history import CurrentHang, RankHistory
from tests.launcher import apiserver
from tests.launcher.apiserver import Server
from tests.launcher.invoke import launcher
from tests.launcher.report import made_runs

SGR = re.compile(r"\x1b\[(\d+)m(.*?)\x1b\[0m", re.DOTALL)
WIDTHS = (80, 60)
Show = Callable[[Callable[[], object], int], str]


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Show:
    """A function that returns what another one writes to a terminal of some columns."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def show_on_terminal(write: Callable[[], object], width: int) -> str:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        chunks = list[bytes]()

        def read() -> None:
            # The read fails once the other end is closed.
            with contextlib.suppress(OSError):
                while chunk := os.read(ours, 65536):
                    chunks.append(chunk)

        reader = threading.Thread(target=read)
        reader.start()
        with open(theirs, "w") as terminal, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", terminal)
            patch.setattr(sys, "stderr", terminal)
            write()
        reader.join()
        os.close(ours)
        return b"".join(chunks).decode().replace("\r\n", "\n")

    return show_on_terminal


def broken_rows(text: str, width: int) -> list[str]:
    """Return the rows that a terminal breaks in the middle of a word that fits in a row."""
    rows = [row.removesuffix(" \\") for row in SGR.sub(r"\2", text).splitlines()]
    assert not any("\x1b" in row for row in rows), rows
    longest_words = (max(map(len, row.split()), default=0) for row in rows)
    return [
        row for row, longest in zip(rows, longest_words, strict=True) if len(row) > width > longest
    ]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three runs below runs/: one is done, one has failed, and one with a long name is done."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs"
    made_runs.run(folder / "one")
    job = made_runs.JOB.replace("steps: 1000", "steps: 500  # such as for a first look at the data")
    made_runs.run(folder / "two", codes=(137, contract.CRASH), job=job)
    name = "a-run-whose-name-says-everything-about-its-learning-rate-and-batch"
    made_runs.run(folder / name, codes=(137, 137, 0), points=30)
    return folder


COMMANDS = {
    "status": ("status", "--local", "two"),
    "status -o wide": ("status", "--local", "two", "-o", "wide"),
    "explain": ("explain", "--local", "two"),
    "compare": ("compare", "one", "two", "a-run-whose-name-says-everything-about-its"
                "-learning-rate-and-batch"),
    "list": ("list", "--local", "-o", "wide"),
    "plan": ("plan", "job.yaml"),
    "doctor": ("doctor", "job.yaml"),
}  # fmt: skip
JOB = """
name: a-job-of-its-own
image: registry.example/an/image/with/a/long/name:2026-11-28
accelerator: {type: cpu}
hosts: 4
command: [python, train.py]
priority: one-that-the-cluster-does-not-have
resources: {memory: 3Gi}
"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_row_is_broken_in_the_middle_of_a_word(
    runs: Path,
    server: Server,
    show: Show,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    width: int,
) -> None:
    config = apiserver.write_kubeconfig(runs.parent, server.url, "team")
    monkeypatch.setenv("KUBECONFIG", str(config))
    server.put("/api/v1/namespaces/team", {"metadata": {"labels": {}}})
    (runs.parent / "job.yaml").write_text(JOB)
    arguments = COMMANDS[command]

    result = launcher(capsys, monkeypatch, *arguments)
    plain = result.out
    text = show(lambda: launcher(capsys, monkeypatch, *arguments), width)

    assert len(plain.splitlines()) > 2, result.err
    assert not SGR.search(plain)
    assert broken_rows(text, width) == []
    # Only tables leave something out.
    if command in ("status", "explain", "plan", "doctor"):
        shown = SGR.sub(r"\2", text).replace(" \\\n", " ").split()
        shown = shown[: len(plain.split())]
        assert [word for word in shown if not word.endswith("d")] == [
            word for word in plain.split() if not word.endswith("d")
        ]


def test_states_have_colours_that_no_color_removes(
    runs: Path,
    show: Show,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def shown_colours(*arguments: str) -> list[tuple[str, str]]:
        text = show(lambda: launcher(capsys, monkeypatch, *arguments), 100)
        return SGR.findall(text)

    assert shown_colours("status", "--local", "one") == [("32", "one: Done")]
    assert shown_colours("status", "--local", "two") == [("31", "two: Failed")]
    ((code, headline),) = shown_colours("explain", "--local", "one")
    assert code == "32" and headline.startswith("one is done")
    colours = shown_colours("explain", "--local", "two")
    assert {code for code, _ in colours} == {"31"} and colours[0][1].startswith("two failed")
    assert shown_colours("list", "--local") == [("32", "Done"), ("32", "Done"), ("31", "Failed")]
    coloured = show(lambda: launcher(capsys, monkeypatch, "explain", "--local", "two"), 100)
    monkeypatch.setenv("NO_COLOR", "1")
    plain = show(lambda: launcher(capsys, monkeypatch, "explain", "--local", "two"), 100)
    assert "\x1b" not in plain and plain == SGR.sub(r"\2", coloured)


@pytest.mark.parametrize(
    ("situation", "colour"),
    [("done", "32"), ("oom", "31"), ("hang", "33"), ("queued", "33"), ("running", None)],
)
def test_headline_of_explain_has_the_colour_of_its_situation(
    show: Show, situation: str, colour: str | None
) -> None:
    answer = Explanation("lm", "", situation, "lm is so", (), (), None, None, None, ())
    text = show(lambda: output.show_lines(*describe_explanation(answer)), 80)
    assert SGR.findall(text) == ([] if colour is None else [(colour, "lm is so")])


@pytest.mark.parametrize("width", [100, *WIDTHS])
@pytest.mark.parametrize("no_color", [False, True])
def test_live_block_fits_and_shows_a_hang_in_yellow(
    tmp_path: Path, show: Show, monkeypatch: pytest.MonkeyPatch, width: int, no_color: bool
) -> None:
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    history = RankHistory()
    history.add_column(time.time(), "sssd", [3] * 4, None)
    history.hang = CurrentHang(2, "in step in read_examples (tasks.py:12)", 1.0, has_waiting=True)
    curve = Curve()
    for step in range(1, 100):
        curve.add_item((step, float(step), 1 / step))
    block = LiveBlock(tmp_path)
    values = {"step": 60.0, "target_step": 600.0, "goodput_ratio": 0.97}
    curves = {"loss": curve}

    def show_block() -> None:
        lines = block._format_lines(values, curves, history, 0.0)
        output.show_status(*map(screen_lines.make_paragraph, lines))

    text = show(show_block, width)
    monkeypatch.setattr(output, "_status", "")

    rows = SGR.sub(r"\2", text.removeprefix("\r\x1b[2K")).splitlines()
    assert all(len(row) < width for row in rows), rows
    assert rows[0].startswith("training ━") and rows[0].endswith(" 60/600")
    assert re.fullmatch(r"loss 0\.0101 █[▁▂▃▄▅▆▇█]+▁", rows[1])
    words = "4 ranks: 3 training, 1 waiting for data; rank 2 hangs in step in read_examples "
    assert " ".join(" ".join(rows[2:]).split()) == f"{words}(tasks.py:12), goodput 97%"
    colours = {code for code, _ in SGR.findall(text)}
    assert colours == (set() if no_color else {"33"})


def test_paragraph_is_broken_at_words_below_its_indent() -> None:
    line = Paragraph("  why        one two three four", indent=13)
    assert screen_lines.render_line(line, 21, has_colours=False) == [
        "  why        one two",
        "             three",
        "             four",
    ]
    # A word that is longer than the row is left to the terminal.
    line = Paragraph("see /a/path/that/is/long now")
    assert screen_lines.render_line(line, 12, has_colours=False) == [
        "see",
        "  /a/path/that/is/long",
        "  now",
    ]
    assert screen_lines.render_line(line, None, has_colours=False) == [line]
    assert screen_lines.render_line(Paragraph(""), 10, has_colours=True) == [""]


def test_command_stays_whole_or_can_be_copied() -> None:
    command = "launcher run job.yaml --run-dir /tmp/lm"
    line = Paragraph(f"  next: {command}", indent=4, commands=[command])
    assert screen_lines.render_line(line, 45, has_colours=False) == ["  next:", f"    {command}"]
    rows = screen_lines.render_line(line, 30, has_colours=False)
    assert rows == ["  next: launcher run \\", "    job.yaml --run-dir /tmp/lm"]
    rows = screen_lines.render_line(line, 24, has_colours=False)
    assert rows == ["  next: launcher run \\", "    job.yaml --run-dir \\", "    /tmp/lm"]


def test_colour_continues_in_the_next_row_and_foreign_ones_are_escaped() -> None:
    line = Paragraph("a\x1b[31m done now, said b", coloured="done now", colour=Colour.GREEN)
    rows = screen_lines.render_line(line, 14, has_colours=True)
    assert rows == ["a\\x1b[31m \x1b[32mdone\x1b[0m", "  \x1b[32mnow\x1b[0m, said b"]


def test_table_shortens_texts_and_continues_below() -> None:
    rows = [["RUN", "STEP", "NOTE"], ["one", "100/1000", "a text of many words"]]
    ((head, row),) = screen_lines.fit_table(rows, 30, 3)
    assert (head, row) == (rows[0], ["one", "100/1000", "a text of ma…"])
    first, second = screen_lines.fit_table(rows, 20, 3)
    assert first == [["RUN", "STEP"], ["one", "100/1000"]]
    assert second == [["RUN", "NOTE"], ["one", "a text of man…"]]
    assert screen_lines.fit_table(rows, 100, 3) == [rows]
    assert screen_lines.fit_table([], 10, 3) == [[]]


@pytest.fixture(autouse=True)
def no_status() -> Iterator[None]:
    yield
    output._status = output._coloured_status = ""

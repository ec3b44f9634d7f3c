"""`jaxlaunch.report` in one process: what it sends, when, and what it refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import jaxlaunch
from jaxlaunch import contract, reporting
from jaxlaunch.launcher.agent.gang.progress import RankProgress, read_line


class Pipe:
    """Keeps what is sent; refuses all while it is full."""

    def __init__(self) -> None:
        self.lines: list[Mapping[str, Any]] = []
        self.is_full = False
        self.taken = threading.Event()

    def send(self, line: Mapping[str, Any]) -> bool:
        if not self.is_full:
            self.lines.append(line)
            self.taken.set()
        return not self.is_full


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Pipe:
    pipe_end = Pipe()
    reports = reporting.ReportQueue(pipe_end.send)
    monkeypatch.setattr(reporting, "_open_queue", lambda: reports)
    return pipe_end


def test_first_report_is_immediate_and_later_ones_are_merged(pipe: Pipe) -> None:
    jaxlaunch.report(step=1, loss=np.float32(0.5))
    assert pipe.lines == [{"phase": "step", "step": 1}, {"metrics": {"loss": 0.5}}]
    pipe.taken.clear()
    for step in range(2, 500):
        jaxlaunch.report(step=step)
    assert pipe.taken.wait(60)
    while pipe.lines[-1] != {"phase": "step", "step": 499}:
        assert pipe.taken.wait(60)
    assert len(pipe.lines) < 100


def test_total_reaches_the_status_of_the_rank(pipe: Pipe) -> None:
    jaxlaunch.report(total=600)
    rank = RankProgress(0.0)
    for line in pipe.lines:
        rank.take_message(read_line(json.dumps(line).encode(), 0), 1.0)
    assert (rank.status.total, rank.status.phase) == (600, "step")


def test_full_pipe_delays_reports(pipe: Pipe) -> None:
    pipe.is_full = True
    jaxlaunch.report(phase="save", committed=7)
    pipe.is_full = False
    assert pipe.taken.wait(60)
    while len(pipe.lines) < 2:
        assert pipe.taken.wait(60)
    assert pipe.lines == [{"phase": "save"}, {"committed": 7}]


def test_pending_reports_are_merged_without_loss(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reporting, "MIN_PERIOD_S", 3600.0
    )  # all of them wait, however slow this machine is
    jaxlaunch.report(step=1)
    jaxlaunch.report(step=2, loss=0.5)
    jaxlaunch.report(phase="eval", accuracy=0.9)
    reports = reporting._open_queue()
    assert reports is not None
    reports.flush()
    assert pipe.lines[1:] == [
        {"phase": "eval", "step": 2},
        {"metrics": {"loss": 0.5, "accuracy": 0.9}},
    ]


def test_signal_handler_may_report() -> None:
    sent: list[Mapping[str, Any]] = []

    def send(line: Mapping[str, Any]) -> bool:
        if not sent:
            sent.append({})
            reports.add_messages(
                {"phase": {"phase": "save"}}
            )  # as a handler does, in this very thread
        sent.append(line)
        return True

    reports = reporting.ReportQueue(send)
    reports.add_messages({"phase": {"phase": "step", "step": 1}})
    reports.flush()
    assert {"phase": "save"} in sent and {"phase": "step", "step": 1} in sent


def test_non_finite_metrics_become_null(pipe: Pipe) -> None:
    jaxlaunch.report(step=1, loss=math.nan, norm=math.inf, rate=np.ones((1,)), none=None)
    assert pipe.lines[-1] == {"metrics": {"loss": None, "norm": None, "rate": 1.0, "none": None}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"step": 1.5}, "report(step=1.5): must be a whole number, not float"),
        ({"step": -1}, "report(step=-1): must be a number of steps, at least 0"),
        ({"total": 1.5}, "report(total=1.5): must be a whole number, not float"),
        ({"committed": "4"}, "report(committed='4'): must be a whole number, not str"),
        (
            {"phase": "training"},
            "report(phase='training'): a phase is one of restore, compile, step, data, "
            "eval, save, done",
        ),
        ({"loss": "low"}, "report(loss=…): a number, not str"),
        ({"loss": [1.0, 2.0]}, "report(loss=…): a number, not list"),
    ],
)
def test_invalid_reports_are_refused_outside_jobs(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        jaxlaunch.report(**arguments)
    assert str(caught.value) == message


def test_report_outside_jobs_needs_only_standard_library() -> None:
    program = (
        "import sys, jaxlaunch; jaxlaunch.report(step=1, loss=2.0); print(*sorted(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    tops = {name.partition(".")[0] for name in done.stdout.split()}
    assert not tops & {"jax", "numpy", "launcher", "trainer"}


def test_phases_match_contract() -> None:
    assert ("prepare", "init", *reporting.PHASES) == contract.PHASES


def test_metrics_of_earlier_steps_name_their_step(pipe: Pipe) -> None:
    jaxlaunch.report(step=1, loss=1.0)
    jaxlaunch.report(step=2, loss=0.5)
    jaxlaunch.report(step=3)
    while len(pipe.lines) < 4:
        assert pipe.taken.wait(60)
        pipe.taken.clear()
    assert pipe.lines[2:] == [{"phase": "step", "step": 3}, {"metrics": {"loss": 0.5}, "of": 2}]

"""What agents reported, read from what any program in their pods may have written."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from jaxlaunch.launcher.cli import status as screens
from jaxlaunch.launcher.client.job_view import ClusterView
from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.jobs.logs import lines
from jaxlaunch.launcher.jobs.status.job_status import derive_status
from jaxlaunch.records import log_lines
from tests import mutate
from tests.launcher import objects
from tests.launcher.objects import beat, farewell, jobset, judged, over, past, snapshot

TAIL = log_lines.TailLine(at=1.0, attempt=1, generation=0, rank=1, lines=["a", "b"])


@pytest.mark.parametrize(
    "text",
    [
        "[" * 4_000,
        '{"a":' * 700,
        '{"jaxlaunch": 1, "verdict": 5}',
        '{"jaxlaunch": 1, "verdict": {"cause": "crash", "code": "83", "message": "boom"}}',
        '{"jaxlaunch": 1, "verdict": {"cause": "crash", "code": 83, "message": ["boom"]}}',
        '{"jaxlaunch": 1, "attempt": "x", "verdict": {"cause": "crash", "code": 83, '
        '"message": "boom"}}',
        '{"jaxlaunch": 1, "host": %s, "verdict": {"cause": "crash", "code": 83, "message": "boom"}}'
        % ("9" * 400),
    ],
    ids=range(7),
)
def test_invalid_termination_message_is_ignored(text: str) -> None:
    assert log_lines.parse_termination_message(text) is None
    observed = snapshot(jobset(1, status=objects.ended("Failed")), over(0, 83, message=text))
    assert explain_job(observed).headline.startswith("lm failed: host 0")


def test_corrupted_messages_never_raise() -> None:
    chance = random.Random(1913)
    messages = [
        farewell(
            83, "rank 1 raised: ValueError: x", attempt=2, rank=1, step=3, traceback="T"
        ).encode()
    ]
    records = (
        beat(committed=3, committed_at=1.0, metrics={"loss": 1.0}),
        past(82),
        judged(83),
        TAIL,
    )
    seeds = [line.split(" ", 2)[1:] for line in map(log_lines.format_line, records)]
    for _ in range(60):
        message = [
            entry.decode(errors="replace") for entry in mutate.mutated_lines(messages, 50, chance)
        ]
        message.sort(key=lambda text: log_lines.parse_termination_message(text) is None)
        texts = []
        for _ in range(50):
            kind, fields = chance.choice(seeds)
            mutated = mutate.mutate_message(fields.encode(), chance)
            texts.append(f"jaxlaunch: {kind} {mutated.decode(errors='replace')}")
        status = [record for record in map(log_lines.parse_line, texts) if record is not None]
        pods = [over(number, 83, message=text) for number, text in enumerate(message[:5])]
        first = over(0, 64, message=farewell(64, "the cause", attempt=2**63 - 1))
        for observed in (
            snapshot(jobset(5), *pods, records=status),
            snapshot(jobset(5), first, *pods[1:], records=status),
        ):
            report = [
                derive_status(observed),
                explain_job(observed),
                *lines.previous_lines(status, observed.members),
            ]
            json.dumps([dataclasses.asdict(entry) for entry in report], default=str)
            list(screens.describe_job(ClusterView(observed)))
        assert (
            observed.report.attempt_end is not None
            and observed.report.attempt_end.verdict.message == "the cause"
        )

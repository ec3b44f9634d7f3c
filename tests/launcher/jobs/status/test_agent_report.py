"""What agents reported, read from what any program in their pods may have written."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

from jaxlaunch.launcher.cli import status as screens
from jaxlaunch.launcher.cli.job_view import ClusterView
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
def test_a_termination_message_of_another_form_is_no_agent_s(text: str) -> None:
    assert log_lines.parse_termination_message(text) is None
    seen = snapshot(jobset(1, status=objects.ended("Failed")), over(0, 83, message=text))
    assert explain_job(seen).headline.startswith("lm failed: host 0")


def test_messages_and_lines_that_were_changed_anywhere_keep_no_reader_from_its_answer() -> None:
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
    for _ in range(200):
        written = [
            each.decode(errors="replace") for each in mutate.mutated_lines(messages, 50, chance)
        ]
        written.sort(key=lambda text: log_lines.parse_termination_message(text) is None)
        texts = []
        for _ in range(50):
            kind, fields = chance.choice(seeds)
            texts.append(
                f"jaxlaunch: {kind} {mutate.mutate_message(fields.encode(), chance).decode(errors='replace')}"
            )
        found = [record for record in map(log_lines.parse_line, texts) if record is not None]
        pods = [over(number, 83, message=text) for number, text in enumerate(written[:5])]
        first = over(0, 64, message=farewell(64, "the cause", attempt=2**63 - 1))
        for seen in (
            snapshot(jobset(5), *pods, records=found),
            snapshot(jobset(5), first, *pods[1:], records=found),
        ):
            told = [
                derive_status(seen),
                explain_job(seen),
                *lines.previous_lines(found, seen.members),
            ]
            json.dumps([dataclasses.asdict(one) for one in told], default=str)
            list(screens.describe_job(ClusterView(seen)))
        assert (
            seen.report.attempt_end is not None
            and seen.report.attempt_end.verdict.message == "the cause"
        )

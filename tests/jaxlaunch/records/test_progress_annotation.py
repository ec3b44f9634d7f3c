"""The annotation that outlives the pods: it is bounded, and malformed parts are ignored."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from jaxlaunch.records.log_lines import MAX_ANNOTATION_BYTES, ProgressAnnotation
from jaxlaunch.records.verdict import verdict_for_code

FULL = ProgressAnnotation(
    "1234",
    1_795_000_000.0,
    "stopped",
    attempt=3,
    generation=1,
    step=40,
    committed=37,
    goodput=0.8125,
    restarts={"crash": 1, "preempted": 1},
    metrics={"loss": 2.25, "accuracy": 0.5},
    verdict=verdict_for_code(80, "saved at step 37", rank=0, step=37),
)


@pytest.mark.parametrize(
    "annotation", [FULL, ProgressAnnotation("1234", 1.0, "running", 0, 0)], ids=["all", "nothing"]
)
def test_annotation_round_trip(annotation: ProgressAnnotation) -> None:
    assert ProgressAnnotation.from_json(annotation.to_json(), "1234") == annotation


@pytest.mark.parametrize("letter", ["x", "ü", "😀", '"', "\x1b"])
def test_annotation_is_bounded(letter: str) -> None:
    ends = {
        f"cause_{'x' * 20}_{number}".translate(str.maketrans("0123456789", "abcdefghij")): 2**50
        for number in range(20)
    }
    verdict = verdict_for_code(83, letter * 100_000, rank=0, traceback="x" * 100_000)
    metrics = {f"{letter * 39}{number}": 1e300 / 7 for number in range(99)}
    text = ProgressAnnotation(
        "1234", 1.0, "ended", 3, 1, verdict, restarts=ends, metrics=metrics
    ).to_json()
    assert len(text) <= MAX_ANNOTATION_BYTES
    parsed = ProgressAnnotation.from_json(text, "1234")
    assert parsed is not None and parsed.restarts == ends and "\x1b" not in parsed.verdict.message  # type: ignore[union-attr]


WRONG: dict[str, Any] = {
    "another's": {"uid": "5678"},
    "a time of no year": {"at": 1e300},
    "no time": {"at": None},
    "a time that is none": {"at": "now"},
    "a word nobody knows": {"when": "soon"},
    "a list of words": {"when": ["stopped"]},
    "a step that is text": {"step": "40"},
    "a step that is true": {"step": True},
    "a step below 0": {"step": -1},
    "a step of 5,000 digits": {"step": 10**4999 // 7},
    "a goodput above 1": {"goodput": 7.0},
    "a goodput that is no number": {"goodput": "nan"},
    "ends that are a list": {"ends": ["crash"]},
    "a cause that is a sentence": {"ends": {"crash; rm -rf": 1}},
    "a count that is text": {"ends": {"crash": "1"}},
    "a verdict that is text": {"verdict": "done"},
    "a verdict without a message": {"verdict": {"cause": "crash", "code": 83}},
    "a verdict whose code is no exit code": {
        "verdict": {"cause": "crash", "code": 8300, "message": "x"}
    },
    "a verdict whose rank is a list": {
        "verdict": {"cause": "crash", "code": 83, "message": "x", "rank": [0]}
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_one_invalid_field_invalidates_annotation(case: str) -> None:
    changed = json.loads(FULL.to_json()) | WRONG[case]
    text = (
        json.dumps(changed)
        if "digits" not in case
        else FULL.to_json().replace('"step":40', f'"step":{"7" * 1900}')
    )
    assert ProgressAnnotation.from_json(text, "1234") is None


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "{", "[" * 1_999, '"x"', "{}" + " " * 3_000, "\ud800"]
)
def test_other_text_is_no_annotation(text: str) -> None:
    assert ProgressAnnotation.from_json(text, "1234") is None


def test_corrupted_annotation_is_invalid_or_well_formed() -> None:
    generator, text = random.Random(13), FULL.to_json()
    for _ in range(3_000):
        letters = list(text)
        for _ in range(generator.randrange(1, 4)):
            letters[generator.randrange(len(letters))] = generator.choice(
                '0123456789eE+-.,:{}[]"\\ntfu \x00\ud800'
            )
        parsed = ProgressAnnotation.from_json("".join(letters), "1234")
        assert parsed is None or ProgressAnnotation.from_json(parsed.to_json(), "1234") is not None

"""Ends of programs at different times: a few rows of the table in tests/endings.py."""

from __future__ import annotations

from typing import Any

import pytest

from tests.endings import ENDINGS, FAULTS, GAPS_S, KINDS, TEE, Row, Runner, covering_set
from tests.found import shows

# JAX's own heartbeats would abort a rank 30 s after a peer's process has gone.
USUAL = [
    Row("plain", "return", 12, 1),
    Row("plain", "os._exit", 40, 0),
    Row("report", "shutdown", 12, 0, (1, 2)),
    *(row for row in FAULTS if row.kind == "hang" and row.layout == (2, 1)),
    *(row for row in FAULTS if row.shell == TEE and row.layout == (1, 1)),
    *(row for row in FAULTS if row.kind == "alone" and row.layout == (2, 1) and not row.shell),
]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    runner = Runner(tmp_path_factory.mktemp("endings"))
    return {line["row"]: line for line in runner.judge_rows(USUAL)}


@pytest.mark.parametrize("row", USUAL, ids=lambda row: row.name)
def test_verdict_tells_how_the_program_ended(row: Row, lines: dict[str, dict[str, Any]]) -> None:
    assert not lines[row.name]["wrong"], lines[row.name]
    if row.ending == "kill":
        shows("without set -o pipefail a pipeline has", lines[row.name]["message"])


def choose_rows() -> list[Row]:
    """Return long gaps of each ending and kind, and each fault with words of its own."""
    rows: list[Row] = []
    for row in covering_set():
        is_new = row.ending not in [other.ending for other in rows]
        if row.gap == max(GAPS_S) and (is_new or row.kind not in [other.kind for other in rows]):
            rows.append(row)
    covered = {(row.ending, row.shell, row.words) for row in USUAL if row in FAULTS}
    for row in FAULTS:
        if (row.ending, row.shell, row.words) not in covered:
            covered.add((row.ending, row.shell, row.words))
            rows.append(row)
    return rows


@pytest.mark.extended
def test_faults_and_long_gaps_are_judged_rightly(tmp_path_factory: pytest.TempPathFactory) -> None:
    # `python -m tests.endings` runs the whole table, which takes too long for the suite.
    rows = choose_rows()
    assert {row.ending for row in rows} >= set(ENDINGS) and {row.kind for row in rows} >= set(KINDS)
    runner = Runner(tmp_path_factory.mktemp("endings"))
    wrong = [line for line in runner.judge_rows(rows) if line["wrong"]]
    assert not wrong

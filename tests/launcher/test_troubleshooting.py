"""docs/troubleshooting.md has an entry for whatever the commands report, and the links to it lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.diagnose.doctor.checks import CHECKS, SERVER
from jaxlaunch.launcher.diagnose.doctor.checks import see as see_check
from jaxlaunch.launcher.diagnose.explain.situations import SITUATIONS, see
from tests.found import PAGE, ROWS
from tests.launcher.test_docs import anchors

ROOT = Path(__file__).parents[2]
# Situations of a job that needs nobody's help.
WELL = frozenset(
    """creating queued gathering running restarted restarting stopping stopped done deleting starting
    scaling-up init-runs""".split()
)


def test_the_page_has_what_one_sees_the_cause_the_answer_and_what_to_do() -> None:
    assert len(ROWS) >= 60
    assert [row for row in ROWS if len(row) != 4 or not all(cell.strip() for cell in row)] == []


def test_no_words_on_the_screen_are_explained_twice() -> None:
    seen = [row[0].strip() for row in ROWS]
    assert sorted({text for text in seen if seen.count(text) > 1}) == []


def test_every_situation_has_an_entry_and_a_link_where_something_is_wrong() -> None:
    answers = "".join(row[2] for row in ROWS)
    assert [situation for situation in SITUATIONS if f"`{situation}`" not in answers] == []
    assert {situation for situation in SITUATIONS if see(situation) is None} == WELL


@pytest.mark.parametrize("code", contract.OUTCOMES)
def test_every_exit_code_has_an_entry_with_its_cause(code: int) -> None:
    row = next(row for row in ROWS if f"`exit {code}`" in row[0])
    assert f"{contract.OUTCOMES[code].cause} ({code})" in row[2]


@pytest.mark.parametrize("code", [134, 137, 139, 143])
def test_what_a_signal_leaves_is_explained(code: int) -> None:
    assert f"`exit {code}`" in PAGE


def test_causes_are_named_with_their_own_code() -> None:
    causes = {row.cause: row.code for row in contract.OUTCOMES.values() if row.cause != "killed"}  # by any signal
    named = re.findall(r"\b([a-z_]+) \((\d+)\)", PAGE)
    assert [
        (cause, code) for cause, code in named if cause in causes and cause != "killed" and causes[cause] != int(code)
    ] == []


def test_every_link_to_the_page_leads_to_a_section() -> None:
    codes = [troubleshooting.of_code(code) for code in contract.OUTCOMES]
    situations = [see(situation) for situation in SITUATIONS]
    checks = [see_check(check) for check in (SERVER, *CHECKS)]
    found = {link.partition("#")[2] for link in (*codes, *situations, *checks) if link is not None}
    assert found <= anchors(ROOT / troubleshooting.PAGE)


def test_a_failed_job_links_to_what_its_exit_code_means() -> None:
    assert see("failed", contract.HANG) == "launcher help troubleshooting#hangs-and-timeouts"
    assert see("failed") == "launcher help troubleshooting#exit-codes"
    assert troubleshooting.of_code(134) == "launcher help troubleshooting#exit-codes"
    assert troubleshooting.of_code(contract.DONE) is troubleshooting.of_code(contract.PREEMPTED) is None

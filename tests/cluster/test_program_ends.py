"""Ends of programs at different times in real pods: the verdict, and the restarts of the JobSet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.gangs import Gang, Workspace, make_workspace, read_verdicts
from tests.cluster.waiting import wait_until
from tests.endings import NEVER, PROGRAM, RAISED, Row, row_command

pytestmark = pytest.mark.extended
NO_RESTART = {"restarts": {"in_place": 0, "crash": 0}}
# By name of the job: the row, and the other keys of the job. A job that is done has the default
# restarts, and must not use them.
ROWS: Mapping[str, tuple[Row, Mapping[str, Any]]] = {
    "exports": (Row("plain", "return", 15, 1), {}),
    "exports-on-1": (Row("plain", "return", 15, 0), {}),
    # JAX's heartbeats would end the other rank after 30 s, and the end of rank 0 at once.
    "exits": (Row("plain", "os._exit", 45, 1), {}),
    "exits-on-0": (Row("report", "os._exit", 15, 0), {}),
    "hangs": (
        Row("hang", "late hang", 0, 0, code=82, rank=1, words="rank 1 in step in work"),
        {"timeouts": {"step": "5s"}, **NO_RESTART},
    ),
    "pipes": (
        Row("plain", "raise", shell='sh -c "{python} 2>&1 | tee /dev/null"', code=70, words=RAISED),
        {},
    ),
    "alone": (Row("alone", "return", code=64, words=NEVER), {}),
}


@pytest.fixture(scope="module")
def gangs(cluster: Access, bare_image: str) -> Iterator[tuple[Workspace, Mapping[str, Gang]]]:
    """Start all rows at once."""
    with make_workspace(cluster, bare_image) as workspace:
        started = {}
        for name, (row, keys) in ROWS.items():
            command = row_command(row, ["python3", "-c", PROGRAM])
            job = {"hosts": 2, "command": command, "resources": {"cpu": "10m"}, **keys}
            started[name] = workspace.start(name, Defaults(), **job)
        yield workspace, started


@pytest.mark.parametrize("name", ROWS)
def test_jobset_ends_as_the_program_did(
    gangs: tuple[Workspace, Mapping[str, Gang]], name: str
) -> None:
    workspace, started = gangs
    gang, (row, _) = started[name], ROWS[name]
    end = gang.wait_for_end()
    ended = wait_until(
        lambda: gang.hosts,
        lambda hosts: all(host.terminated for host in hosts),
        f"{name}'s containers ended",
    )
    verdicts = read_verdicts(ended)
    messages = {verdict.message for verdict in verdicts}
    assert (end, gang.counters) == ("Failed" if row.code else "Completed", (0, 0)), messages
    assert {verdict.code for verdict in verdicts} == {row.code}
    assert all(row.words in message for message in messages), messages
    if row.rank is not None:
        assert {verdict.rank for verdict in verdicts} == {row.rank}
    if not row.code:
        assert workspace.launcher("logs", name).stdout.count("Traceback") == 0

"""`launcher explain` and `launcher status` on real situations: the first line names each.

Every job is submitted at once; each is then watched until it has settled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.access import Access
from tests.cluster.gangs import until
from tests.cluster.harness import kwok
from tests.cluster.situations import POOL, PREPARED, SITUATIONS
from tests.cluster.stage import Stage, staged
from tests.found import shows
from tests.launcher.invoke import launcher


@pytest.fixture(scope="module")
def stage(cluster: Access, base_image: str) -> Iterator[Stage]:
    """Every situation, begun."""
    with (
        staged(cluster, base_image) as made,
        kwok.fake_nodes(cluster.api, 2, {POOL: made.words["{pool}"]}, {}),
    ):
        made.prepare(PREPARED)
        for name, situation in SITUATIONS.items():
            made.start(name, situation)
        yield made


@pytest.mark.parametrize("name", SITUATIONS)
def test_the_first_line_names_the_situation(stage: Stage, name: str) -> None:
    situation = SITUATIONS[name]
    found = stage.settles(name, situation.first_line, situation.namespace)
    assert found.next_move or found.situation in ("running", "restarted")
    stage.leads(name, situation.namespace)


def test_a_pull_that_waits_before_its_next_try_is_found_as_that(stage: Stage) -> None:
    again = until(
        "it waits", lambda: [one for one in stage.messages("no-image") if "Back-off" in one]
    )
    shows("`ImagePullBackOff`", again[0])


def test_list_shows_every_job_in_its_state(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settles("done", "is done")
    plain = stage.namespaces["plain"]
    table = launcher(capsys, monkeypatch, "list", "-n", plain)
    rows = {row.split()[0]: row.split() for row in table.out.splitlines()}
    assert rows["NAME"] == ["NAME", "STATE", "HOSTS", "STEP", "RESTARTS", "AGE"]
    assert rows["no-image"][1:5] == ["Starting", "0/1", "-", "0"]
    assert rows["done"][1] == "Done"
    assert "another" not in rows, "it was not submitted by the launcher"
    everywhere = launcher(capsys, monkeypatch, "list", "-A", "-o", "json")
    assert {"no-image", "never", "quota"} <= {job["name"] for job in json.loads(everywhere.out)}
    assert plain in launcher(capsys, monkeypatch, "list", "-A", "-o", "wide").out


def test_status_and_explain_write_json_and_yaml(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.settles("bad-spec", "failed: bad_spec")
    where = "bad-spec", "-n", stage.namespaces["plain"]
    for command, key in (("status", "state"), ("explain", "situation")):
        as_json = launcher(capsys, monkeypatch, command, *where, "-o", "json")
        as_yaml = launcher(capsys, monkeypatch, command, *where, "-o", "yaml")
        assert (
            json.loads(as_json.out)[key].lower()
            == yaml.safe_load(as_yaml.out)[key].lower()
            == "failed"
        )
    screen = launcher(capsys, monkeypatch, "status", *where, "-o", "wide")
    assert screen.out.startswith("bad_spec (64): ")
    assert "POD" in screen.out

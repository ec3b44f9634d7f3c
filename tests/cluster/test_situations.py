"""`launcher explain` and `status` name real situations in their first line.

Every job is submitted at once; each is then watched until it has settled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.access import Access
from tests.cluster.gangs import wait_for
from tests.cluster.harness import kwok
from tests.cluster.proposals import check_proposals
from tests.cluster.situations import POOL, PREPARED, SITUATIONS
from tests.cluster.stage import Stage, make_stage
from tests.found import shows
from tests.launcher.invoke import launcher


@pytest.fixture(scope="module")
def stage(cluster: Access, base_image: str) -> Iterator[Stage]:
    """Begin every situation."""
    with (
        make_stage(cluster, base_image) as stage,
        kwok.fake_nodes(cluster.api, 2, {POOL: stage.words["{pool}"]}, {}),
    ):
        stage.prepare(PREPARED)
        for name, situation in SITUATIONS.items():
            stage.start(name, situation)
        yield stage


@pytest.mark.parametrize("name", SITUATIONS)
def test_first_line_names_the_situation(stage: Stage, name: str) -> None:
    situation = SITUATIONS[name]
    result = stage.wait_for_explanation(name, situation.first_line, situation.namespace)
    assert result.next_move or result.situation in ("running", "restarted")
    check_proposals(stage.access, result, stage.folder)
    stage.wait_for_entry(name, situation.namespace)


def test_image_pull_back_off_is_recognized(stage: Stage) -> None:
    result = wait_for(
        "it waits",
        lambda: [message for message in stage.messages("no-image") if "Back-off" in message],
    )
    shows("`ImagePullBackOff`", result[0])


def test_list_shows_every_job_in_its_state(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.wait_for_explanation("done", "is done")
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
    stage.wait_for_explanation("bad-spec", "failed: bad_spec")
    arguments = "bad-spec", "-n", stage.namespaces["plain"]
    for command, key in (("status", "state"), ("explain", "situation")):
        as_json = launcher(capsys, monkeypatch, command, *arguments, "-o", "json")
        as_yaml = launcher(capsys, monkeypatch, command, *arguments, "-o", "yaml")
        assert (
            json.loads(as_json.out)[key].lower()
            == yaml.safe_load(as_yaml.out)[key].lower()
            == "failed"
        )
    screen = launcher(capsys, monkeypatch, "status", *arguments, "-o", "wide")
    assert screen.out.startswith("bad_spec (64): ")
    assert "POD" in screen.out

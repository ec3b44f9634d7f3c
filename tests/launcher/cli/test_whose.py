"""Whether a name is a run's on this machine or a job's on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import Left, launcher
from tests.launcher.report import made_runs

Call = Callable[..., Left]


@pytest.fixture
def call(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    """A folder with the run lm, and a cluster with a job of that name and job other."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "lm").mkdir(parents=True)
    (tmp_path / "runs" / "lm" / ".lock").touch()
    for name in ("lm", "other"):
        found = apiserver.merge_patch(
            objects.jobset(), {"metadata": {"name": name, "namespace": "team"}}
        )
        server.put(JOBSETS.path("team", name), found)
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments)


def test_a_name_that_is_both_needs_a_word_and_no_other_does(call: Call) -> None:
    for verb in ("status", "explain", "logs", "stop"):
        both = call(verb, "lm")
        assert (
            both.code == 2
            and "lm is both a run on this machine and a job in namespace team." in both.err
        )
    folder = str(Path("runs/lm").absolute())
    for which, found in (
        (("lm", "--local"), folder),
        (("runs/lm",), folder),
        (("lm", "--cluster"), None),
        (("lm", "-n", "team"), None),
        (("other",), None),
    ):
        assert json.loads(call("status", *which, "-o", "json").out)["folder"] == found, which
    assert call("status", "lm", "--local", "-n", "team").code == 2


def test_a_list_has_both_unless_one_is_asked_for(call: Call) -> None:
    assert [line.split()[:2] for line in call("list").out.splitlines()[1:]] == [
        ["(here)", "lm"],
        ["team", "lm"],
        ["team", "other"],
    ]
    assert [line.split()[0] for line in call("list", "--local").out.splitlines()] == ["NAME", "lm"]
    assert [line.split()[0] for line in call("list", "--cluster").out.splitlines()] == [
        "NAME",
        "lm",
        "other",
    ]
    assert call("list", "runs", "-A").code == 0 and call("list", ".", "-A").code == 2


def test_a_run_is_shown_though_the_cluster_refuses(call: Call, server: Server) -> None:
    server.on("GET", "jobsets", *[lambda handler: handler.fail(403, "Forbidden", "no") or True] * 9)
    shown = call("list")
    assert shown.code == 3 and shown.out.splitlines()[1].split()[:2] == ["lm", "Failed"]


def test_a_sweep_has_one_row_and_each_of_its_runs_another_where_it_is_named(
    call: Call, tmp_path: Path
) -> None:
    for name, codes in (("lr-0", (0,)), ("lr-1", (137, 0)), ("lr-2", (83,))):
        made_runs.run(tmp_path / "runs" / "lr" / name, codes, points=1)
    (tmp_path / "runs" / "lr" / "sweep.jsonl").touch()
    rows = [line.split()[:5] for line in call("list", "--local").out.splitlines()[1:]]
    assert rows[0][:2] == ["lm", "Failed"]
    assert rows[1] == ["lr", "Done:2,Failed:1", "2", "3000/3000", "0"]
    assert len(call("list", "--local", "-o", "wide").out.splitlines()) == 3
    assert [line.split()[0] for line in call("list", "lr").out.splitlines()[1:]] == [
        "lr-0",
        "lr-1",
        "lr-2",
    ]
    assert [one["name"] for one in json.loads(call("list", "--local", "-o", "json").out)][1:] == [
        "lr-0",
        "lr-1",
        "lr-2",
    ]


@pytest.mark.parametrize(
    "link", ["starts/1/logs/rank-0.log", "starts/1/logs", "starts/1", "starts"]
)
def test_no_link_in_a_run_leads_to_what_only_who_looks_can_read(
    call: Call, tmp_path: Path, link: str
) -> None:
    run = tmp_path / "runs" / "made"
    made_runs.run(run, points=1)
    (run / "starts" / "1" / "logs").mkdir(parents=True)
    (run / "starts" / "1" / "logs" / "rank-0.log").write_text("a line of the run\n")
    (run / "starts" / "1" / "job.yaml").write_text("name: made\nhosts: 2\n")
    assert "a line of the run" in call("logs", "made", "--local").out

    (run / link).rename(tmp_path / "elsewhere")
    (run / link).symlink_to(tmp_path / "elsewhere")
    for arguments in (
        ("logs", "made", "--rank", "0"),
        ("logs", "made", "-f"),
        ("list",),
        ("explain", "made"),
    ):
        told = call(*arguments, "--local")
        assert "a line of the run" not in told.out + told.err, arguments

    (tmp_path / "lock").write_text("kept")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "lock")
    assert "cannot be read: is a link." in call("status", "made", "--local").err

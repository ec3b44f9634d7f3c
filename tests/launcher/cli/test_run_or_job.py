"""The choice between a run on this machine and a job on a cluster."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from jaxlaunch.launcher.cli import output
from jaxlaunch.launcher.client import ending
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from jaxlaunch.runs import layout
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import CommandResult, launcher
from tests.launcher.report import made_runs

Call = Callable[..., CommandResult]


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
        jobset = apiserver.merge_patch(
            objects.jobset(), {"metadata": {"name": name, "namespace": "team"}}
        )
        server.put(JOBSETS.path("team", name), jobset)
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments)


def test_ambiguous_name_needs_a_location(call: Call) -> None:
    for verb in ("status", "explain", "logs", "stop"):
        result = call(verb, "lm")
        assert result.code == 2
        assert "lm is both a run on this machine and a job in namespace team." in result.err
    folder = str(Path("runs/lm").absolute())
    for arguments, folder_of_run in (
        (("lm", "--local"), folder),
        (("runs/lm",), folder),
        (("lm", "--cluster"), None),
        (("lm", "-n", "team"), None),
        (("other",), None),
    ):
        assert (
            json.loads(call("status", *arguments, "-o", "json").out)["folder"] == folder_of_run
        ), arguments
    assert call("status", "lm", "--local", "-n", "team").code == 2


def test_unreadable_kubeconfig_leaves_the_run_and_is_reported(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_text("clusters: [")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "broken"))
    shown = call("status", "lm", "-o", "json")
    assert json.loads(shown.out)["folder"] == str(Path("runs/lm").absolute())
    assert "lm is the run here" in shown.err and str(tmp_path / "broken") in shown.err


def test_list_shows_runs_and_jobs(call: Call) -> None:
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


def test_runs_are_listed_if_the_cluster_fails(call: Call, server: Server) -> None:
    server.on("GET", "jobsets", *[lambda handler: handler.fail(403, "Forbidden", "no") or True] * 9)
    shown = call("list")
    assert shown.code == 3 and shown.out.splitlines()[1].split()[:2] == ["lm", "Failed"]


def test_output_is_repeated_until_interrupted(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses = iter((None, None, KeyboardInterrupt()))

    def sleep(_: float) -> None:
        if (pause := next(pauses)) is not None:
            raise pause

    monkeypatch.setattr(output, "time", SimpleNamespace(sleep=sleep))
    assert call("list", "--local", "--watch").out.count("NAME") == 3
    pauses = iter((KeyboardInterrupt(),))
    shown = call("status", "lm", "--local", "-w", "-o", "json")
    assert (shown.code, json.loads(shown.out)["name"]) == (130, "lm")


def test_names_are_those_that_other_commands_take(call: Call) -> None:
    assert call("list", "-o", "name").out.splitlines() == ["runs/lm", "lm", "other"]
    assert json.loads(call("status", "runs/lm", "-o=json").out)["name"] == "lm"


def test_several_jobs_are_deleted_whatever_becomes_of_the_first(call: Call, server: Server) -> None:
    shown = call("delete", "nothing", "jobset.jobset.x-k8s.io/other", "--yes", "--no-wait")
    assert shown.code == 2 and "nothing" in shown.err
    assert JOBSETS.path("team", "other") not in server.objects
    assert call("stop", "runs/lm", "nothing", "--no-wait").code == 2


def test_job_is_deleted_although_a_run_has_its_name(call: Call, server: Server) -> None:
    assert call("delete", "runs/lm").code == 2 and Path("runs/lm").is_dir()
    assert call("delete", "lm", "--yes", "--no-wait").code == 0
    assert JOBSETS.path("team", "lm") not in server.objects
    # A script that deletes the job again does not delete the run.
    shown = call("delete", "lm", "--yes")
    assert shown.code == 2 and "`launcher delete runs/lm --yes` deletes the run" in shown.err
    assert call("delete", "runs/lm", "--yes").out == "run/lm deleted\n"
    assert not Path("runs/lm").exists()


def test_run_is_deleted_only_if_it_has_ended_and_lies_below_runs(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with layout.hold_lock(tmp_path / "runs" / "lm"):
        shown = call("delete", "runs/lm", "--yes")
        assert shown.code == 2 and "Run lm is running." in shown.err
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / ".lock").touch()
    for folder in ("project", "runs/../project"):
        shown = call("delete", folder, "--yes")
        assert shown.code == 2 and "outside of runs/" in shown.err
    texts = list[str]()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr(click, "confirm", lambda text, **_: texts.append(text))
    assert call("delete", "runs/lm").code == 0
    assert texts == ["runs/lm is a run on this machine, with its checkpoints and logs. Delete it?"]
    assert (tmp_path / "project" / ".lock").exists()


def test_sweep_is_deleted_only_if_none_of_its_runs_is_running(call: Call, tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "lr"
    with layout.hold_lock(sweep / "lr-0"):
        (sweep / layout.SWEEP).touch()
        assert "Sweep lr is running." in call("delete", "runs/lr", "--yes").err
    assert call("delete", "runs/lr", "--yes").out == "sweep/lr deleted\n"
    assert not sweep.exists()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_rest_of_a_deletion_is_no_run(
    call: Call, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def delete(folder: Path) -> None:
        assert layout.find_holder(folder) is not None and not Path("runs/lm").exists()
        raise error

    monkeypatch.setattr(shutil, "rmtree", delete)
    shown = call("delete", "runs/lm", "--yes")
    assert shown.code == (2 if isinstance(error, OSError) else 130)
    (rest,) = Path("runs").iterdir()
    assert f"`rm -r {rest}` deletes the rest of lm" in shown.err
    assert call("list", "--local", "-o", "name").out == ""


def test_run_that_starts_in_a_sweep_that_is_deleted_keeps_its_files(tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "lr"
    with layout.hold_lock(sweep / "lr-0"):
        (sweep / layout.SWEEP).touch()
        with pytest.raises(UserError, match="Sweep lr is running"):
            ending.delete_folder(sweep)
    assert (sweep / "lr-0" / ".lock").exists()


def test_run_is_not_deleted_instead_of_a_job_of_a_broken_kubeconfig(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken").write_text("contexts: [")
    for path in (tmp_path / "broken", tmp_path / "nothing"):
        monkeypatch.setenv("KUBECONFIG", str(path))
        shown = call("delete", "lm", "--yes")
        assert shown.code == 2 and "`launcher delete runs/lm --yes` deletes the run" in shown.err
    assert Path("runs/lm").is_dir()


def test_sweep_is_not_stopped_instead_of_a_job_of_a_namespace(call: Call, tmp_path: Path) -> None:
    (tmp_path / "runs" / "digits").mkdir()
    (tmp_path / "runs" / "digits" / layout.SWEEP).touch()
    assert "Sweep digits is not running" in call("stop", "digits").err
    for option in (("-n", "team-a"), ("--context", "other")):
        shown = call("stop", "digits", *option)
        assert shown.code != 0 and "Sweep" not in shown.err


def test_runs_are_listed_by_a_python_without_ssl(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ssl", None)
    shown = call("list")
    assert shown.code == 3 and shown.out.splitlines()[1].split()[:2] == ["lm", "Failed"]
    assert f"The Python at {sys.executable} has no module ssl" in shown.err


def test_sweep_is_listed_in_one_row(call: Call, tmp_path: Path) -> None:
    for name, codes in (("lr-0", (0,)), ("lr-1", (137, 0)), ("lr-2", (83,))):
        made_runs.run(tmp_path / "runs" / "lr" / name, codes, points=1)
    (tmp_path / "runs" / "lr" / "sweep.jsonl").touch()
    rows = [line.split()[:5] for line in call("list", "--local").out.splitlines()[1:]]
    assert rows[0][:2] == ["lm", "Failed"]
    assert rows[1] == ["lr", "Done:2,Failed:1", "2", "3000/3000", "1"]
    assert len(call("list", "--local", "-o", "wide").out.splitlines()) == 3
    assert [line.split()[0] for line in call("list", "lr").out.splitlines()[1:]] == [
        "lr-0",
        "lr-1",
        "lr-2",
    ]
    assert [row["name"] for row in json.loads(call("list", "--local", "-o", "json").out)][1:] == [
        "lr-0",
        "lr-1",
        "lr-2",
    ]


@pytest.mark.parametrize(("mode", "order"), [("min", [1, 0, 3, 2]), ("max", [0, 1, 3, 2])])
def test_runs_of_a_sweep_are_listed_with_the_best_first(
    call: Call, tmp_path: Path, mode: str, order: list[int]
) -> None:
    folder = tmp_path / "runs" / "lr"
    for number, (code, loss) in enumerate([(0, 0.5), (0, 0.25), (83, 0.1), (0, None)]):
        made_runs.run(folder / f"lr-{number}", (code,), points=1)
        path = folder / f"lr-{number}" / "summary.json"
        summary = json.loads(path.read_text())
        path.write_text(json.dumps(summary | {"metrics": {"loss": 1.0, "eval_loss": loss}}))
    settings = {"sweep": "lr", "metric": "eval/loss", "mode": mode}
    (folder / "sweep.jsonl").write_text(json.dumps(settings) + "\n")
    rows = [line.split() for line in call("list", "lr").out.splitlines()]
    assert rows[0][-1] == "EVAL/LOSS"
    assert [row[0] for row in rows[1:]] == [f"lr-{number}" for number in order]
    values = {0: "0.5", 1: "0.25", 2: "0.1", 3: "-"}
    assert [row[-1] for row in rows[1:]] == [values[number] for number in order]


@pytest.mark.parametrize(
    "link", ["starts/1/logs/rank-0.log", "starts/1/logs", "starts/1", "starts"]
)
def test_links_in_run_folders_are_not_followed(call: Call, tmp_path: Path, link: str) -> None:
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
        result = call(*arguments, "--local")
        assert "a line of the run" not in result.out + result.err, arguments

    (tmp_path / "lock").write_text("kept")
    (run / ".lock").unlink()
    (run / ".lock").symlink_to(tmp_path / "lock")
    assert "cannot be read: is a link." in call("status", "made", "--local").err

"""Roles of a job on this machine, without their processes."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.load import JobFile
from jaxlaunch.launcher.jobs.logs.lines import Line, Selection
from jaxlaunch.launcher.local import agents, logs, roles
from jaxlaunch.launcher.local.roles import RoleBoard
from jaxlaunch.launcher.local.run import LocalRun
from jaxlaunch.launcher.local.run_folders import open_run
from jaxlaunch.launcher.report.server import RunCatalog
from jaxlaunch.runs import layout
from tests.launcher.invoke import CommandResult, launcher

JOB = """
name: t
accelerator: {type: cpu, per_host: 1}
command: ["true"]
volumes: [{claim: data, path: /data}]
jobs:
  trainer: {ends: true, needs: {sampler: started}}
  sampler: {}
  evaluator: {may_fail: true}
"""


def read_roles(text: str = JOB, folder: Path = Path()) -> JobFile:
    return jobs.read_job_text(text, folder=folder, may_have_roles=True)


def make_board() -> RoleBoard:
    return RoleBoard(read_roles().roles, "trainer")


def test_role_starts_once_after_those_that_it_needs() -> None:
    board = make_board()
    assert {role.name for role in board.find_startable()} == {"sampler", "evaluator"}
    board.begun |= {"sampler", "evaluator"}
    assert not board.find_startable()
    board.started.add("sampler")
    assert [role.name for role in board.find_startable()] == ["trainer"]


@pytest.mark.parametrize(
    ("codes", "decisive"),
    [
        ({}, None),
        ({"sampler": 0}, None),
        ({"evaluator": 83}, None),
        ({"evaluator": 83, "trainer": 0}, "trainer"),
        ({"sampler": 70, "trainer": 0}, "sampler"),
        ({"trainer": 80}, "trainer"),
    ],
)
def test_job_ends_with_its_lead_or_a_failure(codes: dict[str, int], decisive: str | None) -> None:
    board = make_board()
    board.codes = codes
    assert board.find_decisive_role() == decisive


def test_job_waits_for_all_roles_that_end_it() -> None:
    text = JOB.replace("sampler: {}", "sampler: {ends: true}")
    board = RoleBoard(read_roles(text).roles, "trainer")
    board.codes = {"sampler": 0}
    assert board.find_decisive_role() is None
    board.codes["trainer"] = 0
    assert board.find_decisive_role() == "trainer"


GPUS = """
name: t
command: ["true"]
jobs:
  trainer: {ends: true, accelerator: {type: h100, per_host: 4}}
  sampler: {accelerator: {type: h100, per_host: 2}}
  evaluator: {accelerator: {type: cpu}}
"""


def test_roles_share_the_gpus_of_this_machine() -> None:
    shares = roles.share_devices(read_roles(GPUS).roles, {})
    devices = [shares[name]["CUDA_VISIBLE_DEVICES"].split(",") for name in ("trainer", "sampler")]
    assert (len(devices[0]), len(devices[1])) == (4, 2) and len(set(sum(devices, []))) == 6
    assert "evaluator" not in shares
    with pytest.raises(UserError, match="trainer, sampler use 6 GPUs, and CUDA_VISIBLE_DEVICES"):
        roles.share_devices(read_roles(GPUS).roles, {"CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    tpus = GPUS.replace("type: h100, per_host: 4", "type: v5e, topology: 2x2").replace(
        "type: h100, per_host: 2", "type: v5e, topology: 2x2"
    )
    with pytest.raises(UserError, match="one process takes all chips"):
        roles.share_devices(read_roles(tpus).roles, {})


@pytest.mark.parametrize(
    ("old", "new", "volumes", "message"),
    [
        ("sampler", "starts", {}, "cannot be called starts here"),
        ("sampler", "sampler", {"dota": Path("d")}, "--volume dota: no role has a volume"),
        ("sampler: {}", "sampler: {workdir: none}", {}, "workdir: .*none does not exist"),
    ],
)
def test_errors_of_any_role_leave_no_run_folder(
    tmp_path: Path, old: str, new: str, volumes: dict[str, Path], message: str
) -> None:
    file = read_roles(JOB.replace(old, new), tmp_path)
    local = LocalRun(tmp_path / "run", tmp_path, volumes)
    with pytest.raises(UserError, match=message):
        roles.run_roles(file, local, print, print)
    assert not (tmp_path / "run").exists()


def replace_agents(folder: Path, monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Replace the agents of all roles by a program."""
    agent = folder / "agent.py"
    agent.write_text(program)
    monkeypatch.setattr(agents, "pack_agent", lambda otherwise: agent)


def test_role_that_cannot_start_ends_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_agents(tmp_path, monkeypatch, "import signal; signal.pause()")
    with layout.hold_lock(tmp_path / "run" / "evaluator"):
        file = read_roles(folder=tmp_path)
        local = LocalRun(tmp_path / "run", tmp_path)
        with pytest.raises(UserError, match="evaluator is in use by the run with pid"):
            roles.run_roles(file, local, lambda line: None, lambda message: None)
    assert not any(layout.find_holder(tmp_path / "run" / name) for name in ("", "sampler"))


# The trainer ends after the others, of which it would otherwise stop those that still run.
LAST_TRAINER = """
import json, os, pathlib, sys, time
role, job = os.environ["JAXLAUNCH_ROLE"], pathlib.Path(os.environ["JAXLAUNCH_RUN_DIR"]).parent
def has_ended(name):
    try:
        return json.loads((job / name / "summary.json").read_text())["verdict"] is not None
    except FileNotFoundError:
        return False
while role == "trainer" and not (has_ended("sampler") and has_ended("evaluator")):
    time.sleep(0.01)
sys.exit(70 if role == "evaluator" else 0)
"""


def test_run_folder_may_not_be_that_of_the_job_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    words = ["run", str(tmp_path / "job.yaml"), "--run-dir", str(tmp_path)]
    shown = launcher(capsys, monkeypatch, *words)
    assert shown.code == 2 and "the run would overwrite" in shown.err
    assert (tmp_path / "job.yaml").read_text() == JOB


def test_commands_show_a_job_and_its_roles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_agents(tmp_path, monkeypatch, LAST_TRAINER)
    monkeypatch.chdir(tmp_path)
    end = roles.run_roles(
        read_roles(folder=tmp_path),
        LocalRun(tmp_path / "runs" / "t", tmp_path),
        lambda line: None,
        lambda message: None,
    )
    assert (end.code, end.role) == (contract.DONE, "trainer")
    for name in ("trainer", "sampler"):
        log = layout.log_path(layout.start_folder(tmp_path / "runs" / "t" / name, 1), 0)
        log.parent.mkdir()
        log.write_text(f"{name} up\n")

    def run_command(*words: str) -> CommandResult:
        return launcher(capsys, monkeypatch, *words)

    assert run_command("logs", "runs/t").out == "[sampler 0] sampler up\n[trainer 0] trainer up\n"
    # The job may continue for long after the role has ended.
    with layout.hold_lock(tmp_path / "runs" / "t"):
        followed = list[Line]()
        begun = threading.Thread(
            target=logs.follow_roles,
            args=(
                open_run(tmp_path / "runs" / "t"),
                ["sampler"],
                Selection(),
                None,
                followed.append,
            ),
        )
        begun.start()
        begun.join(60)
        assert [line.text for line in followed] == ["sampler up"] and not begun.is_alive()
    role_log = run_command("logs", "runs/t", "--role", "sampler", "-o", "json")
    assert json.loads(role_log.out) | {"text": "sampler up", "role": "sampler"} == json.loads(
        role_log.out
    )
    unknown = run_command("logs", "runs/t", "--role", "other")
    assert unknown.code == 2 and "its roles: " in unknown.err
    status = json.loads(run_command("status", "runs/t", "-o", "json").out)
    states = {name: role["state"] for name, role in status["roles"].items()}
    assert states == {"trainer": "Done", "sampler": "Done", "evaluator": "Failed"}
    table = run_command("status", "runs/t").out
    assert "t: Done, by role trainer" in table and "\nevaluator   Failed" in table
    assert "role evaluator failed" in run_command("explain", "runs/t").out
    assert "sampler is done" in run_command("explain", "runs/t/sampler").out
    assert run_command("list").out.splitlines()[1].split()[:3] == ["t", "Done", "3"]
    assert "is a role of t" in run_command("stop", "runs/t/sampler").err
    assert run_command("report", "runs/t").code == 0
    assert "role evaluator" in (tmp_path / "t.html").read_text()
    rows = RunCatalog(tmp_path / "runs", None, ()).read_table()["runs"]
    assert [row["name"] for row in rows] == ["t", "t/evaluator", "t/sampler", "t/trainer"]
    assert run_command("delete", "runs/t", "--yes").code == 0 and not list(
        (tmp_path / "runs").iterdir()
    )

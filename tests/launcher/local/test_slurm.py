"""The batch script for Slurm, as text and with an `srun` and a `scontrol` that only record."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.local import run_explanation, run_folders, slurm, slurm_job, status
from jaxlaunch.launcher.local.run import LocalRun
from jaxlaunch.runs import layout
from tests.launcher.report import made_runs

GOLDEN = Path(__file__).parent / "golden" / "slurm.sh"
JOB = """\
name: first
hosts: 2
slices: 2
accelerator: {type: h100, per_host: 4}
resources: {cpu: 31500m, memory: 200G}
grace: 90s
deadline: 1h
queue: research
restarts: {crash: 1}
env: {GREETING: it's}
secrets: {WANDB_API_KEY: {name: wandb, key: api-key}}
volumes: [{claim: runs, path: /runs}]
command: [python, train.py, --out=/runs/x]
"""
SMALL_JOB = (
    "name: x\naccelerator: {type: cpu}\nrestarts: {crash: 1}\ncommand: [python, -c, 'pass']\n"
)


def render(folder: Path, text: str, *overrides: str) -> str:
    job_file = folder / "job.yaml"
    job_file.write_text(text)
    job = jobs.load_job(job_file, overrides)
    words = ["it's.yaml", "hosts=1"]
    return slurm.render_script(job, LocalRun(folder / "runs" / job.name, folder, words=words))


def test_script_is_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/opt/venv/bin/python")
    script = render(tmp_path, JOB).replace(str(tmp_path), "/home/me/job")
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(script)
    assert script == GOLDEN.read_text()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["accelerator={type: v5e, topology: 2x2}"], "not for v5e"),
        (["accelerator={type: h100, resource: nvidia.com/mig-1g.10gb}"], "mig-1g.10gb"),
        (["hosts=2", "spares=1"], "replaces no single node"),
    ],
)
def test_job_without_counterpart_is_refused(
    tmp_path: Path, overrides: list[str], text: str
) -> None:
    with pytest.raises(UserError, match=text):
        render(tmp_path, SMALL_JOB, *overrides)


class FakeSlurm:
    """A folder of programs in place of Slurm's, and the batch job that runs with them."""

    def __init__(self, folder: Path, script: str) -> None:
        self.folder, self.script, self.requeued = folder, script, folder / "requeued"
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.add_program(
            "scontrol", f"[ $1 = show ] && echo n7 || {{ touch {self.requeued}; false; }}"
        )
        self.add_program("srun", "exit $CODE")

    def add_program(self, name: str, text: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{text}\n")
        program.chmod(0o755)

    def run_script(self, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the script; srun ends with `code`."""
        self.requeued.unlink(missing_ok=True)
        path = f"{self.bin}:{os.environ['PATH']}"
        slurm_variables = {
            "SLURM_JOB_ID": "12345",
            "SLURM_JOB_NODELIST": "n[7-8]",
            "SLURM_CLUSTER_NAME": "lab",
        }
        return subprocess.run(
            ["bash", "-c", self.script],
            env={"PATH": path, **slurm_variables, "CODE": str(code), **variables},
            cwd=self.folder,
            capture_output=True,
            text=True,
        )


@pytest.fixture
def fake_slurm(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path, render(tmp_path, SMALL_JOB))


def test_script_starts_agent_with_place_in_gang(fake_slurm: FakeSlurm) -> None:
    names = "JOB_COMPLETION_INDEX JAXLAUNCH_LEADER JAXLAUNCH_UID JAXLAUNCH_GENERATION"
    fake_slurm.add_program(
        "python",
        f"for name in {names}; do printenv $name; done >place; "
        'stat --format="%s %a" "$JAXLAUNCH_GANG_SECRET" >>place',
    )
    fake_slurm.add_program("srun", 'while [ "$1" != sh ]; do shift; done; exec "$@"')
    fake_slurm.script = fake_slurm.script.replace(sys.executable, str(fake_slurm.bin / "python"))
    end = fake_slurm.run_script(SLURM_NODEID="0", SLURM_RESTART_COUNT="2")
    assert (end.returncode, end.stderr) == (0, "")
    place = (fake_slurm.folder / "place").read_text().split()
    assert place == ["0", "n7:12345", "lab-12345", "2", "32", "600"]
    assert not list(fake_slurm.folder.glob("runs/x/*.key"))


@pytest.mark.parametrize("code", [0, 64, 79])
def test_final_code_ends_job(fake_slurm: FakeSlurm, code: int) -> None:
    assert fake_slurm.run_script(code).returncode == code
    assert not fake_slurm.requeued.exists()


def test_job_is_requeued_within_limit_of_crashes(fake_slurm: FakeSlurm) -> None:
    for code, is_requeued in ((80, True), (83, True), (80, True), (1, False)):
        assert fake_slurm.run_script(code).returncode == code
        assert fake_slurm.requeued.exists() == is_requeued


def test_script_records_its_job_and_that_it_is_requeued(fake_slurm: FakeSlurm) -> None:
    record = {
        "id": "12345",
        "uid": "lab-12345",
        "is_requeued": False,
        "folder": os.getcwd(),
        "words": ["it's.yaml", "hosts=1"],
    }
    file = fake_slurm.folder / "runs" / "x" / layout.SLURM
    fake_slurm.run_script(0)
    assert json.loads(file.read_text()) == record
    # The requeue is refused, and then it ends the script, and first what runs in it.
    fake_slurm.run_script(83)
    assert json.loads(file.read_text()) == record
    fake_slurm.add_program("scontrol", "[ $1 = requeue ] || echo n7")
    fake_slurm.add_program("sleep", "kill -TERM $PPID; exit 143")
    assert fake_slurm.run_script(80).returncode == 80
    assert json.loads(file.read_text()) == record | {"is_requeued": True}


def test_explanation_of_slurm_run_names_its_commands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, squeue = tmp_path / "runs" / "x", tmp_path / "squeue"
    made_runs.run(folder, codes=(contract.CRASH,), points=1)
    words = ["job.yaml", "hosts=1"]
    record = {"id": "7", "uid": "uid", "folder": str(tmp_path), "words": words}

    def explain(answer: str, **fields: bool) -> tuple[State, Explanation]:
        (folder / layout.SLURM).write_text(json.dumps(record | fields))
        squeue.write_text(f"#!/bin/sh\n{answer}\n")
        squeue.chmod(0o755)
        run = run_folders.open_run(folder)
        return status.run_status(run).state, run_explanation.explain_run(run, None)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    # A busy machine may delay the stub for long, and no answer means that the job is queued.
    monkeypatch.setattr(slurm_job, "TIMEOUT_S", 600.0)
    state, answer = explain("echo PENDING", is_requeued=True)
    assert (state, answer.headline) == (State.RESTARTING, "x waits until Slurm starts job 7 again")
    assert answer.commands == (("squeue", "--jobs=7"),)
    pipeline = "launcher render --slurm job.yaml hosts=1 | sbatch"
    for squeue_answer, is_requeued in (
        ("echo PENDING", False),
        ("true", True),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", True),
    ):
        state, answer = explain(squeue_answer, is_requeued=is_requeued)
        assert state is State.FAILED
        assert f"`{pipeline}`" in (answer.next_move or "")
        assert ("sh", "-c", pipeline) in answer.commands
    state, _ = explain("echo 'Unable to contact slurm controller' >&2; exit 1", is_requeued=True)
    assert state is State.RESTARTING


def test_code_of_killed_agent_is_that_of_verdict(fake_slurm: FakeSlurm) -> None:
    assert fake_slurm.run_script(137).returncode == 81
    summary = fake_slurm.folder / "runs/x/summary.json"
    summary.write_text('{"verdict": {"code": 82}}')
    assert fake_slurm.run_script(137).returncode == 82
    summary.write_text('{"verdict": null}')
    assert fake_slurm.run_script(137).returncode == 81


def test_cancelled_job_is_not_requeued(fake_slurm: FakeSlurm) -> None:
    fake_slurm.add_program("srun", "kill -TERM $PPID; exit 80")
    assert fake_slurm.run_script().returncode == 80
    assert not fake_slurm.requeued.exists()


def test_missing_secret_and_used_folder_are_refused(tmp_path: Path) -> None:
    secrets = "secrets={TOKEN: {name: a, key: b}}"
    fake = FakeSlurm(tmp_path, render(tmp_path, SMALL_JOB, secrets))
    assert fake.run_script().returncode == 64
    fake.add_program("flock", "exit 9")
    end = fake.run_script(TOKEN="")
    assert end.returncode == 64
    assert end.stderr == f"{tmp_path}/runs/x is in use by another run\n"

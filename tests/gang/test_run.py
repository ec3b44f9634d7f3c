"""`launcher run` itself: the run folder, volumes, simulation, Ctrl-C, and refusals."""

from __future__ import annotations

import json
import platform
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxlaunch.contract import MANIFEST
from jaxlaunch.launcher.jobs.status.job_status import State
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local import status as local_status
from jaxlaunch.launcher.report.run import RunReader
from tests.gang.agents import write_program
from tests.gang.run_files import read_json_lines
from tests.gang.runs import (
    Running,
    digits_block,
    kill_processes,
    make_job,
    run_job,
    wait_until_gone,
)


def test_run_folder_holds_the_documented_files_and_the_volumes(tmp_path: Path) -> None:
    train = digits_block(steps=6, eval={"every": 3}, checkpoint={"path": "/ckpt/here"})
    volumes = [{"claim": "ckpt", "path": "/ckpt"}]
    result = run_job(tmp_path, make_job(train, hosts=2, per_host=1, volumes=volumes))
    assert result.code == 0, result.stderr[-3000:]
    summary = result.summary
    assert (summary["status"], summary["step"], summary["verdict"]["cause"]) == ("done", 6, "done")
    assert set(summary) >= {"status", "step", "verdict", "metrics", "goodput", "restarts"}
    assert set(summary["verdict"]) >= {"cause", "code", "rank", "step", "message", "traceback"}
    assert 0 < summary["goodput"]["ratio"] < 1
    assert [
        agent["ranks"] for agent in json.loads((result.folder / "agents.json").read_text())
    ] == [[0], [1]]
    assert yaml.safe_load((result.folder / "job.yaml").read_text())["train"]["steps"] == 6
    assert "step 6/6" in (result.folder / "starts" / "1" / "logs" / "rank-0.log").read_text()
    assert [line["step"] for line in result.metrics] == list(range(1, 7))
    assert len((result.folder / "attempts.jsonl").read_text().splitlines()) == 1
    assert "[0] step 6/6" in result.stdout
    assert (result.folder / "volumes/ckpt/here/6").is_dir()
    assert f"/ckpt is {result.folder}/volumes/ckpt" in result.stderr


def test_finished_run_started_again_trains_nothing(tmp_path: Path) -> None:
    first = run_job(tmp_path, make_job(digits_block(steps=6)))
    first_start = first.folder / "starts" / "1"
    initial_files = {
        path: path.read_bytes()
        for path in (first.folder / "job.yaml", *first_start.rglob("*"))
        if path.is_file()
    }
    second = run_job(tmp_path, make_job(digits_block(steps=6, log_every=2)))
    assert (first.code, second.code) == (0, 0) and second.losses == first.losses
    assert "nothing to do: the run finished at step 6" in second.stdout
    assert "nothing to do; the run is at step 6: " in second.stderr
    other_rate = run_job(
        tmp_path,
        make_job(digits_block(steps=6, optimizer={"lr": 0.5, "schedule": {"name": "constant"}})),
    )
    refusal = json.loads((first.folder / "starts/3/summary.json").read_text())["verdict"]
    assert other_rate.code == refusal["code"] == 64
    message = (
        "finished at step 6 with train.optimizer.lr = 0.01; this job says 0.5: use another "
        "name, or raise train.steps"
    )
    assert message in refusal["message"]
    words = "start 3 was refused, and the run stays done at step 6: "
    assert words in other_rate.stderr and "starts/3/summary.json" in other_rate.stderr
    # The run keeps its result everywhere, and the refused start is named.
    assert other_rate.summary["metrics"] == first.summary["metrics"]
    assert (other_rate.summary["status"], other_rate.summary["step"]) == ("done", 6)
    status = local_status.run_status(run_folders.open_run(first.folder))
    assert (status.state, status.step, status.code) == (State.DONE, 6, 0)
    assert status.refused_start is not None and status.refused_start["code"] == 64
    assert message in status.refused_start["message"]
    page = RunReader(first.folder).read_report().to_json()
    assert (page["sentence"]["state"], page["starts"][-1]["code"]) == ("done", 64)
    assert "Start 3 was refused (exit 64)" in page["sentence"]["todo"]
    assert {path: path.read_bytes() for path in initial_files} == initial_files
    rows = [
        (row["start"], row["code"], row["first_step"], row["last_step"])
        for row in other_rate.summary["starts"]
    ]
    assert rows == [(1, 0, 1, 6), (2, 0, None, 6), (3, 64, None, None)]
    assert other_rate.summary["starts"][2]["changed"] == {"train.optimizer.lr": [0.01, 0.5]}


@pytest.mark.parametrize(
    "prefix", [[], ["bash", "-o", "pipefail", "-c", '"$@" | cat', "-"]], ids=["file", "pipe"]
)
def test_every_line_of_a_verbose_program_is_printed(prefix: list[str], tmp_path: Path) -> None:
    count = 20_000
    text = (
        "sys.stdout.buffer.write(b''.join(b'%d %s\\n' % (number, b'x' * 200) for number in "
        f"range({count})))"
    )
    document = make_job(
        command=list(write_program(tmp_path, text)), per_host=2, processes_per_host=2
    )
    with Running(tmp_path, document, prefix=prefix) as running:
        result = running.wait()
    assert result.code == 0, result.stderr
    for rank in range(2):
        lines = [
            line.split()[1] for line in result.stdout.splitlines() if line.startswith(f"[{rank}] ")
        ]
        assert lines == [str(number) for number in range(count)]


JOINS = """
import jax
jax.distributed.initialize()
print(jax.default_backend(), jax.local_device_count(), jax.device_count())
"""


def test_gpu_job_is_simulated_on_cpu_devices(tmp_path: Path) -> None:
    (tmp_path / "joins.py").write_text(JOINS)
    gpus = {"accelerator": {"type": "h100", "per_host": 8}, "processes_per_host": 2}
    document = make_job(command=["python", str(tmp_path / "joins.py")]) | gpus
    result = run_job(tmp_path, document, "--simulate")
    assert result.code == 0, result.stderr[-3000:]
    assert result.stdout.count("cpu 4 8\n") == 2
    assert [
        agent["ranks"] for agent in json.loads((result.folder / "agents.json").read_text())
    ] == [[0, 1]]


def test_several_gpu_hosts_are_refused_unless_simulated(tmp_path: Path) -> None:
    document = make_job(digits_block(), hosts=2) | {"accelerator": {"type": "h100", "per_host": 8}}
    result = run_job(tmp_path, document)
    assert result.code == 2
    assert "--simulate" in result.stderr and "Traceback" not in result.stderr


COMMITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(phase="step", step=43)
say(committed=40)
mark("up")
time.sleep(3600)
"""


def test_second_interrupt_kills_and_names_the_saved_step(tmp_path: Path) -> None:
    command = list(write_program(tmp_path, COMMITS))
    with Running(tmp_path, make_job(command=command), env={"MARKS": str(tmp_path)}) as running:
        running.wait_for_file(tmp_path / "up-0")
        running.wait_until(
            "the state on disk",
            lambda: '"saved": 40' in (running.folder / "summary.json").read_text(),
        )
        pids = running.pids()
        running.signal(signal.SIGINT)
        running.wait_until(
            "its answer", lambda: "a second signal kills" in running.read_output()[1]
        )
        running.signal(signal.SIGINT)
        result = running.wait()
        wait_until_gone(pids)
    assert result.code == result.verdict["code"] == 80
    assert result.summary["status"] == "stopped"
    assert result.summary["step"] == 43
    assert result.summary["saved"] == 40
    assert result.verdict["cause"] == "interrupted"
    assert result.verdict["message"] == "stopped by Ctrl-C; step 40 is saved"
    ended = "interrupted at step 43: stopped by Ctrl-C; step 40 is saved (exit 80)"
    assert ended in result.stderr and "preempted" not in result.stderr


def test_passed_deadline_has_its_own_code_and_message(tmp_path: Path) -> None:
    result = run_job(tmp_path, make_job(command=["sleep", "1000"], deadline="3s"))
    assert result.code == result.verdict["code"] == 77
    assert (result.summary["status"], result.verdict["cause"]) == ("stopped", "deadline")
    assert result.verdict["message"].startswith("the job's deadline of 3 s passed")


def test_deadline_counts_every_generation(tmp_path: Path) -> None:
    command = write_program(
        tmp_path,
        "say(phase='step', step=ATTEMPT)\nsay(committed=ATTEMPT)\ntime.sleep(1)\nos._exit(3)",
    )
    document = make_job(command=list(command), deadline="6s", restarts={"crash": 50, "in_place": 0})
    result = run_job(tmp_path, document, env={"MARKS": str(tmp_path)})
    assert result.code == 77 and "deadline of 6 s passed" in result.verdict["message"]
    assert sum(result.summary["goodput"]["seconds"].values()) >= 6


@pytest.mark.extended
def test_repeatedly_killed_run_records_each_start_and_resumes(tmp_path: Path) -> None:
    """Kill launcher and agents at once: during a start, before the first step, and in the steps."""
    document = make_job(digits_block(steps=100_000, checkpoint={"every": 5}))
    waits: list[Callable[[Running], object]] = [
        lambda running: running.wait_until("its folder", (running.folder / "starts").exists),
        lambda running: running.wait_until("its processes", running.rank_pids),
        lambda running: running.wait_until(
            "a saved step", lambda: [*running.folder.glob(f"checkpoints/*/{MANIFEST}")]
        ),
    ]
    for wait in waits:
        with Running(tmp_path, document) as running:
            wait(running)
            running.signal(signal.SIGSTOP)  # it starts no agent that would not be among them
            running.kill()
    with Running(tmp_path, document) as running:
        running.wait_until(
            "its steps",
            lambda: (
                "resumed at step" in running.read_output()[0] and running.wait_for_step(20) is None
            ),
        )
        running.signal(signal.SIGINT)
        result = running.wait()
    rows = result.summary["starts"]
    trained = [row for row in rows if row["first_step"] is not None]
    assert [row["start"] for row in rows] == list(range(1, len(rows) + 1))
    assert rows[-1]["code"] == 80
    assert [row["code"] for row in trained] == [81, 80] and trained[0]["first_step"] == 1
    assert trained[1]["first_step"] <= trained[0]["last_step"] + 1
    assert trained[1]["last_step"] == result.summary["saved"]


def test_deleted_run_folder_is_written_again(tmp_path: Path) -> None:
    command = list(write_program(tmp_path, "mark('up')\nwait_for('go')"))
    with Running(tmp_path, make_job(command=command), env={"MARKS": str(tmp_path)}) as running:
        running.wait_for_file(tmp_path / "up-0")
        shutil.rmtree(running.folder, ignore_errors=True)
        (tmp_path / "go").touch()
        result = running.wait()
    assert result.code == 0 and result.summary["status"] == "done"
    assert "was deleted during the run" in result.stderr
    assert (result.folder / "job.yaml").exists()


@pytest.mark.extended
def test_repeatedly_killed_agents_end_as_no_progress(tmp_path: Path) -> None:
    command = write_program(
        tmp_path, "say(phase='step', step=ATTEMPT)\nmark(f'up{ATTEMPT}')\ntime.sleep(3600)"
    )
    with Running(
        tmp_path, make_job(command=list(command)), env={"MARKS": str(tmp_path)}
    ) as running:
        for attempt in (1, 2, 3):
            running.wait_for_file(tmp_path / f"up{attempt}-0")
            kill_processes(running.agent_pids().values())
        result = running.wait()
    assert result.code == result.verdict["code"] == 79
    assert "no newly committed step in 3 sets of pods" in result.verdict["message"]
    assert result.summary["restarts"] == {"lost": 2}
    records = read_json_lines(result.folder / "attempts.jsonl")
    assert [(record["attempt"], record["generation"], record["cause"]) for record in records] == [
        (1, 0, "lost"),
        (2, 1, "lost"),
        (3, 2, "lost"),
    ]


def test_command_gets_its_environment(tmp_path: Path) -> None:
    for module in ("src/mypkg.py", "lib/more/extra.py"):
        (tmp_path / "code" / module).parent.mkdir(parents=True)
        (tmp_path / "code" / module).touch()
    (tmp_path / "code" / "hello.py").write_text(
        "import os, mypkg, extra; print(os.environ['A'], os.getcwd(), os.environ['TOKEN'])\n"
        "print('path', os.environ['PYTHONPATH'])"
    )
    env = {"A": "b", "PYTHONPATH": "src:/code/lib/more"}
    document = make_job(command=["python", "hello.py"], env=env, code="code")
    document["secrets"] = {"TOKEN": {"name": "s", "key": "k"}}
    assert run_job(tmp_path, document).code == 2
    result = run_job(tmp_path, document, env={"TOKEN": "t"})
    assert result.code == 0, result.stderr
    assert f"[0] b {tmp_path}/code t" in result.stdout
    # As in a pod, the variable of the job replaces that of the shell.
    assert f"/site:{tmp_path}/code:src:{tmp_path}/code/lib/more\n" in result.stdout
    provenance = result.summary["of"]["made_of"]
    assert provenance["python"] == platform.python_version() and len(provenance["code"]) == 12

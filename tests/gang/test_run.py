"""`launcher run` itself: the run folder, volumes, simulation, Ctrl-C, and what it refuses."""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from jaxlaunch.contract import MANIFEST
from tests.gang.agents import program
from tests.gang.runs import Running, digits, job, launch, until_gone


def test_the_run_folder_holds_all_that_a_reader_needs(tmp_path: Path) -> None:
    result = launch(tmp_path, job(digits(steps=6, eval={"every": 3}), hosts=2, per_host=1))
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


def test_a_finished_run_started_again_trains_nothing_and_says_whether_it_would_have(
    tmp_path: Path,
) -> None:
    first = launch(tmp_path, job(digits(steps=6)))
    kept = first.folder / "starts" / "1"
    record = {
        path: path.read_bytes()
        for path in (first.folder / "job.yaml", *kept.rglob("*"))
        if path.is_file()
    }
    again = launch(tmp_path, job(digits(steps=6, log_every=2)))
    assert (first.code, again.code) == (0, 0) and again.losses == first.losses
    assert "nothing to do: the run finished at step 6" in again.stdout
    assert "nothing to do; the run is at step 6: " in again.stderr
    other = launch(
        tmp_path, job(digits(steps=6, optimizer={"lr": 0.5, "schedule": {"name": "constant"}}))
    )
    assert other.code == other.verdict["code"] == 64
    said = (
        "finished at step 6 with train.optimizer.lr = 0.01; this job says 0.5: use another "
        "name, or raise train.steps"
    )
    assert said in other.verdict["message"] and "failed; the run is at step 6: " in other.stderr
    model = launch(tmp_path, job(digits(steps=6, model={"kind": "mlp", "layers": 2, "width": 32})))
    assert (model.code, model.summary["status"]) == (78, "failed")
    assert {path: path.read_bytes() for path in record} == record
    rows = [
        (row["start"], row["code"], row["first_step"], row["last_step"])
        for row in model.summary["starts"]
    ]
    assert rows == [(1, 0, 1, 6), (2, 0, None, 6), (3, 64, None, None), (4, 78, None, None)]
    assert model.summary["starts"][2]["changed"] == {"train.optimizer.lr": [0.01, 0.5]}


@pytest.mark.parametrize(
    "prefix", [[], ["bash", "-o", "pipefail", "-c", '"$@" | cat', "-"]], ids=["file", "pipe"]
)
def test_no_line_of_a_chatty_program_is_missing_in_a_plain_file_or_behind_a_pipe(
    prefix: list[str], tmp_path: Path
) -> None:
    count = 50_000
    text = (
        "sys.stdout.buffer.write(b''.join(b'%d %s\\n' % (number, b'x' * 200) for number in "
        f"range({count})))"
    )
    document = job(command=list(program(tmp_path, text)), per_host=2, processes_per_host=2)
    with Running(tmp_path, document, prefix=prefix) as running:
        result = running.wait()
    assert result.code == 0, result.stderr
    for rank in range(2):
        said = [
            line.split()[1] for line in result.stdout.splitlines() if line.startswith(f"[{rank}] ")
        ]
        assert said == [str(number) for number in range(count)]


def test_a_gpu_job_is_simulated_on_as_many_cpu_devices(tmp_path: Path) -> None:
    document = job(digits(mesh={"dp": 4, "mp": 2}), hosts=1) | {
        "accelerator": {"type": "h100", "per_host": 8}
    }
    result = launch(tmp_path, document | {"processes_per_host": 2}, "--simulate")
    assert result.code == 0, result.stderr[-3000:]
    assert [
        agent["ranks"] for agent in json.loads((result.folder / "agents.json").read_text())
    ] == [[0, 1]]


def test_more_gpu_hosts_than_this_machine_are_refused_unless_simulated(tmp_path: Path) -> None:
    document = job(digits(), hosts=2) | {"accelerator": {"type": "h100", "per_host": 8}}
    result = launch(tmp_path, document)
    assert result.code == 2
    assert "--simulate" in result.stderr and "Traceback" not in result.stderr


def test_a_volume_s_paths_are_in_the_run_folder_and_that_is_said(tmp_path: Path) -> None:
    train = digits(steps=4, checkpoint={"path": "/ckpt/here"})
    result = launch(tmp_path, job(train, volumes=[{"claim": "ckpt", "path": "/ckpt"}]))
    assert result.code == 0, result.stderr[-3000:]
    assert (result.folder / "volumes/ckpt/here/4").is_dir()
    assert f"/ckpt is {result.folder}/volumes/ckpt" in result.stderr


COMMITS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
say(phase="step", step=43)
say(committed=40)
mark("up")
time.sleep(3600)
"""


def test_a_second_interrupt_kills_and_what_is_saved_is_said(tmp_path: Path) -> None:
    command = list(program(tmp_path, COMMITS))
    with Running(tmp_path, job(command=command), env={"MARKS": str(tmp_path)}) as running:
        running.until_file(tmp_path / "up-0")
        running.until(
            "the state on disk",
            lambda: '"saved": 40' in (running.folder / "summary.json").read_text(),
        )
        pids = running.tree()
        running.signal(signal.SIGINT)
        running.until("its answer", lambda: "a second signal kills" in running.text()[1])
        running.signal(signal.SIGINT)
        result = running.wait()
        until_gone(pids)
    assert result.code == result.verdict["code"] == 80
    assert (result.summary["status"], result.summary["step"], result.summary["saved"]) == (
        "stopped",
        43,
        40,
    )
    assert result.verdict["message"] == "stopped by you; step 40 is saved"
    assert "stopped at step 43: stopped by you; step 40 is saved (exit 80)" in result.stderr


def test_a_deadline_that_passes_has_a_code_and_words_of_its_own(tmp_path: Path) -> None:
    result = launch(tmp_path, job(command=["sleep", "1000"], deadline="3s"))
    assert result.code == result.verdict["code"] == 77
    assert (result.summary["status"], result.verdict["cause"]) == ("stopped", "deadline")
    assert result.verdict["message"].startswith("the job's deadline of 3 s passed")


def test_a_deadline_counts_every_generation(tmp_path: Path) -> None:
    command = program(
        tmp_path,
        "say(phase='step', step=ATTEMPT)\nsay(committed=ATTEMPT)\ntime.sleep(1)\nos._exit(3)",
    )
    document = job(command=list(command), deadline="6s", restarts={"crash": 50, "in_place": 0})
    result = launch(tmp_path, document, env={"MARKS": str(tmp_path)})
    assert result.code == 77 and "deadline of 6 s passed" in result.verdict["message"]
    assert sum(result.summary["goodput"]["seconds"].values()) >= 6


@pytest.mark.extended
def test_a_run_that_is_killed_whole_again_and_again_has_a_row_for_each_start_and_goes_on(
    tmp_path: Path,
) -> None:
    """Launcher and agents at once: while a start is made, before the first step, and in the steps."""
    document = job(digits(steps=100_000, checkpoint={"every": 5}))
    moments: list[Callable[[Running], object]] = [
        lambda running: running.until("its folder", (running.folder / "starts").exists),
        lambda running: running.until("its processes", running.children),
        lambda running: running.until(
            "a saved step", lambda: [*running.folder.glob(f"checkpoints/*/{MANIFEST}")]
        ),
    ]
    for comes in moments:
        with Running(tmp_path, document) as running:
            comes(running)
            running.signal(signal.SIGSTOP)  # it starts no agent that would not be among them
            pids = running.tree()
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            running.process.wait()
            until_gone(pids)
    with Running(tmp_path, document) as running:
        running.until(
            "its steps",
            lambda: "resumed at step" in running.text()[0] and running.until_step(20) is None,
        )
        running.signal(signal.SIGINT)
        result = running.wait()
    rows = result.summary["starts"]
    trained = [row for row in rows if row["first_step"] is not None]
    assert [row["start"] for row in rows] == list(range(1, len(rows) + 1)) and rows[-1][
        "code"
    ] == 80
    assert [row["code"] for row in trained] == [81, 80] and trained[0]["first_step"] == 1
    assert trained[1]["first_step"] <= trained[0]["last_step"] + 1
    assert trained[1]["last_step"] == result.summary["saved"]


def test_a_run_folder_deleted_while_running_has_a_summary_again_and_that_is_said(
    tmp_path: Path,
) -> None:
    command = list(program(tmp_path, "mark('up')\nwait_for('go')"))
    with Running(tmp_path, job(command=command), env={"MARKS": str(tmp_path)}) as running:
        running.until_file(tmp_path / "up-0")
        shutil.rmtree(running.folder, ignore_errors=True)
        (tmp_path / "go").touch()
        result = running.wait()
    assert result.code == 0 and result.summary["status"] == "done"
    assert "was deleted during the run" in result.stderr
    assert (result.folder / "job.yaml").exists()


@pytest.mark.extended
def test_agents_that_are_killed_again_and_again_end_as_no_progress(tmp_path: Path) -> None:
    command = program(
        tmp_path, "say(phase='step', step=ATTEMPT)\nmark(f'up{ATTEMPT}')\ntime.sleep(3600)"
    )
    with Running(tmp_path, job(command=list(command)), env={"MARKS": str(tmp_path)}) as running:
        for attempt in (1, 2, 3):
            running.until_file(tmp_path / f"up{attempt}-0")
            for pid in running.agents().values():
                os.kill(pid, signal.SIGKILL)
        result = running.wait()
    assert result.code == result.verdict["code"] == 79
    assert "no newly committed step in 3 sets of pods" in result.verdict["message"]
    assert result.summary["restarts"] == {"lost": 2}
    records = [
        json.loads(line) for line in (result.folder / "attempts.jsonl").read_text().splitlines()
    ]
    assert [(record["attempt"], record["generation"], record["cause"]) for record in records] == [
        (1, 0, "lost"),
        (2, 1, "lost"),
        (3, 2, "lost"),
    ]


def test_a_job_s_own_program_gets_its_environment(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "hello.py").write_text(
        "import os; print(os.environ['A'], os.getcwd(), os.environ['TOKEN'])"
    )
    document = job(command=["python", "hello.py"], env={"A": "b"}, code="code")
    document["secrets"] = {"TOKEN": {"name": "s", "key": "k"}}
    assert launch(tmp_path, document).code == 2
    result = launch(tmp_path, document, env={"TOKEN": "t"})
    assert result.code == 0, result.stderr
    assert f"[0] b {tmp_path}/code t" in result.stdout
    made_of = result.summary["of"]["made_of"]
    assert made_of["python"] == platform.python_version() and len(made_of["code"]) == 12

"""`launcher logs` against real pods: merged, filtered, followed over a restart, and what came before."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launcher.profile import Profile
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, ROOT, Gang, Place, place, program, until
from tests.cluster.proxy import Proxy
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler

SAVED = Profile.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
TALKS = """
import json, os, time
rank, generation = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAXLAUNCH_GENERATION"])
for number in range(5):
    print(f"generation {generation} line {number}", flush=True)
    time.sleep(0.1)
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
say(phase="step", step=7)
if generation == 0 and rank == 1:
    raise ValueError("a bad batch")
time.sleep(3600 if generation == 0 else 0.5)
say(phase="done", step=9)
"""


@pytest.fixture(scope="module")
def here(cluster: Access, base_image: str) -> Iterator[Place]:
    with place(cluster, base_image) as found:
        preparations.make_claim(cluster, found.namespace)
        yield found


@pytest.fixture(scope="module")
def followed(here: Place) -> tuple[Gang, str, str]:
    """A gang that crashed once and is done, and what `logs -f` said on stdout and stderr from its start on."""
    restarts = {"restarts": {"in_place": 0, "crash": 1}, "resources": {"cpu": "10m"}, "processes_per_host": 2}
    command = ["python", "-c", TALKS]
    accelerator = {"type": "cpu", "per_host": 2}
    gang = here.start("talks", SAVED, hosts=2, command=command, accelerator=accelerator, **restarts)
    argv = [sys.executable, "-m", "launcher.cli.main", "logs", "-f", gang.name, "-n", here.namespace]
    done = subprocess.run(argv, capture_output=True, text=True, env=here.access.env, cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return gang, done.stdout, done.stderr


def test_following_lives_through_a_restart(followed: tuple[Gang, str, str]) -> None:
    gang, out, err = followed
    assert gang.ended() == "Completed"
    lines = out.splitlines()
    for generation in range(2):
        for rank in range(4):
            own = [line for line in lines if line.startswith(f"[{rank}] generation {generation} line")]
            assert own == [f"[{rank}] generation {generation} line {number}" for number in range(5)]
    said = [line for line in err.splitlines() if line.startswith("launcher: generation")]
    assert said[:2] == [
        "launcher: generation 0 ended: rank 1 raised at step 7: ValueError: a bad batch",
        "launcher: generation 1 begins",
    ]
    assert "jaxlaunch: " not in out + err


def test_lines_come_by_time_each_after_its_rank(here: Place, followed: tuple[Gang, str, str]) -> None:
    done = here.launcher("logs", followed[0].name)
    assert sorted(done.stdout.splitlines()) == sorted(
        f"[{rank}] generation 1 line {number}" for rank in range(4) for number in range(5)
    )
    assert "every process finished" in done.stderr.splitlines()[0]
    said = [json.loads(line) for line in here.launcher("logs", followed[0].name, "-o", "json").stdout.splitlines()]
    assert [line["time"] for line in said] == sorted(line["time"] for line in said)
    assert {(line["host"], line["rank"]) for line in said if line["rank"] is not None} == {
        (0, 0),
        (0, 1),
        (1, 2),
        (1, 3),
    }
    assert {line["generation"] for line in said} == {1}


def test_lines_are_chosen_by_rank_text_and_number(here: Place, followed: tuple[Gang, str, str]) -> None:
    name = followed[0].name
    assert here.launcher("logs", name, "--rank", "2").stdout.splitlines() == [
        f"generation 1 line {number}" for number in range(5)
    ]
    assert len(here.launcher("logs", name, "--rank", "0,2-3").stdout.splitlines()) == 15
    assert here.launcher("logs", name, "--rank", "3", "--grep", "line [34]").stdout.splitlines() == [
        "generation 1 line 3",
        "generation 1 line 4",
    ]
    assert here.launcher("logs", name, "--rank", "3", "--tail", "1").stdout == "generation 1 line 4\n"
    assert (
        here.launcher("logs", name, "--rank", "3", "--grep", "line 0", "--tail", "1").stdout == "generation 1 line 0\n"
    )
    assert here.launcher("logs", name, "--rank", "3", "--tail", "0").stdout == ""
    assert len(here.launcher("logs", name, "--since", "1h").stdout.splitlines()) == 20
    assert here.launcher("logs", name, "--since", "soon").returncode == 2


def test_the_generation_before_is_told_by_the_next(here: Place, followed: tuple[Gang, str, str]) -> None:
    done = here.launcher("logs", followed[0].name, "--previous")
    assert "attempt 1 of generation 0: crash (83): rank 1 raised at step 7: ValueError: a bad batch" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "[1] generation 0 line 0"  # the failing rank's come first
    assert "[1] ValueError: a bad batch" in lines
    assert {f"[{rank}] generation 0 line 4" for rank in range(4)} <= set(lines)
    assert here.launcher("logs", followed[0].name, "--previous", "--rank", "2", "--tail", "1").stdout == (
        "generation 0 line 4\n"
    )


def test_what_cannot_be_known_is_said(here: Place) -> None:
    common = {"hosts": 1, "resources": {"cpu": "10m"}, "restarts": {"in_place": 0, "crash": 1}}
    gang = here.start("forgets", Profile(), command=program("ends.py", "83"), **common)
    assert gang.ended() == "Failed"
    done = here.launcher("logs", gang.name, "--previous")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "launcher: what came before is not known: the job has no folder that outlives its pods\n"


def test_a_name_that_is_not_there_is_refused(here: Place) -> None:
    done = here.launcher("logs", "nobody")
    assert (done.returncode, done.stdout) == (2, "")
    assert "There is no job nobody in namespace" in done.stderr


def test_a_job_without_pods_says_where_to_look(here: Place) -> None:
    gang = here.start("large", Profile(), command=["true"], resources={"cpu": 500})
    until("its pod is there", lambda: gang.pods)
    done = here.launcher("logs", gang.name)
    assert (done.returncode, done.stdout) == (0, "")
    assert "1 of 1 hosts have no log yet" in done.stderr


def broken_off(handler: Handler) -> bool:
    """A log that is followed begins, and its connection breaks."""
    if not handler.query.get("follow"):
        return False
    connection, answer = handler._ask()  # type: ignore[attr-defined]
    handler.begin_stream()
    handler.raw_chunk(answer.read1(65536))
    handler.wfile.flush()
    handler.close_connection = True
    handler.connection.close()
    connection.close()
    return True


def test_a_stream_that_breaks_is_taken_up_where_it_broke(here: Place, tmp_path: Path) -> None:
    counts = ["python", "-u", "-c", "import time\nfor n in range(60): print('line', n); time.sleep(0.1)"]
    gang = here.start("broken", Profile(), command=counts, resources={"cpu": "10m"})
    with apiserver.serving(Proxy(here.access.api)) as proxy:
        proxy.on("GET", "/log", *[broken_off] * 6)
        env = here.access.env | {"KUBECONFIG": str(proxy.kubeconfig(tmp_path, here.namespace))}
        argv = [sys.executable, "-m", "launcher.cli.main", "logs", "-f", gang.name]
        done = subprocess.run(argv, capture_output=True, text=True, env=env, cwd=ROOT, timeout=PATIENCE_S)
        asked = [query for method, path, query in proxy.requests if path.endswith("/log") and "follow" in query]
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert done.stdout.splitlines() == [f"[0] line {number}" for number in range(60)]
    assert len(asked) > 2 and "sinceTime" in asked[-1]

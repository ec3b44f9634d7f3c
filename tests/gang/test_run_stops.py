"""What ends a `launcher run`: the user, its deadline, a full disk, the program's own request."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import yaml

from tests.gang.runs import Running, living_pids, make_job, run_job

EXAMPLES = Path(__file__).parents[2] / "examples"
SAVES = """
import json, os, signal, sys, time
def stop(*_):
    mark("told")
    while not os.path.exists("saved"): time.sleep(0.02)
    sys.exit(0)
def mark(name):
    open(name, "w").close()
signal.signal(signal.SIGTERM, stop)
mark("up")
while True: time.sleep(0.02)
"""


DEADLINE_S = 20


def test_interrupt_shortly_before_the_deadline_does_not_kill(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(SAVES)
    document = make_job(
        command=["python", "saves.py"], workdir=".", deadline=f"{DEADLINE_S}s", grace="100s"
    )
    with Running(tmp_path, document) as running:
        started_at = time.monotonic()  # the deadline counts from a moment before
        running.wait_for_file(tmp_path / "up")
        running.signal(signal.SIGINT)
        running.wait_until("the deadline", lambda: time.monotonic() - started_at > DEADLINE_S + 1)
        running.wait_for_file(tmp_path / "told")
        (tmp_path / "saved").touch()
        result = running.wait()
    assert result.code != 137 and "killing" not in result.stderr
    assert "SIGKILL" not in result.verdict["message"]


DISK_FULL = """
import json, os
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
say(hello="trainer")
say(phase="save", step=5)
say(committed=4)
message = "No space left on device: saving step 5 in /ckpt failed"
say(error={"type": "StorageError", "message": message, "traceback": "", "code": 84})
os._exit(84)
"""


def test_full_disk_is_not_retried_by_new_agents(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(DISK_FULL)
    result = run_job(tmp_path, make_job(command=["python", "full.py"], workdir="."))
    assert result.code == 84
    assert len((result.folder / "attempts.jsonl").read_text().splitlines()) == 1
    assert "No space left on device: saving step 5" in result.verdict["message"]


IGNORES_SIGNALS = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
name = f"up{os.environ['JAXLAUNCH_ATTEMPT']}"
with open(name + ".draft", "w") as file:
    file.write(str(os.getpid()))
os.rename(name + ".draft", name)
time.sleep(3600)
"""


def test_program_behind_a_wrapper_ends_with_its_agent_and_its_run(tmp_path: Path) -> None:
    (tmp_path / "survives.py").write_text(IGNORES_SIGNALS)
    wrapped = make_job(command=["sh", "-c", "python survives.py; echo end"], workdir=".")
    with Running(tmp_path, wrapped) as running:
        running.wait_for_file(tmp_path / "up1")
        first = int((tmp_path / "up1").read_text())
        os.kill(running.agent_pids()[0], signal.SIGKILL)
        running.wait_for_file(tmp_path / "up2")
        second = int((tmp_path / "up2").read_text())
        assert not living_pids([first])
        running.signal(signal.SIGINT)
        running.wait_until(
            "the first signal", lambda: "a second signal kills" in running.read_output()[1]
        )
        running.signal(signal.SIGINT)
        running.wait()
        assert not living_pids([second])


def test_example_asks_for_a_restart_until_it_is_done(tmp_path: Path) -> None:
    (tmp_path / "requeue.py").write_text((EXAMPLES / "requeue.py").read_text())
    document = yaml.safe_load((EXAMPLES / "requeue.yaml").read_text())
    document["command"][-1] = "3"
    result = run_job(tmp_path, document)
    assert result.code == 0, result.stderr[-3000:]
    assert result.summary["restarts"] == {"requeued": 1} and result.summary["saved"] == 6
    assert result.stdout.count("run me again") == 2
    assert "asks for another run (restarts.codes: free)" in result.stderr

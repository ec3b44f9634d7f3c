"""No message or output of a program ends an agent."""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from jaxlaunch import contract
from tests.gang.agents import Gang, make_job, run_gang, run_program, write_program

SURROGATE = """
    open(os.fsencode(MARKS := os.environ["MARKS"]) + b"/caf\\xe9.txt", "w").close()
    name = next(name for name in os.listdir(MARKS) if name.startswith("caf"))
    say(phase="step", step=20)
    if RANK == SIZE - 1:
        {fault}
    time.sleep(3600)
    """


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            "raise ValueError(f'bad file {name}')",
            "raised at step 20: ValueError: bad file caf\\udce9.txt",
        ),
        (
            "say(note=name, metrics={name: name}, phase=name); os._exit(3)",
            "ended with exit code 3 in caf\\udce9.txt",
        ),
        (
            "sys.stdout.buffer.write(os.fsencode(name) + b'\\\\n'); os._exit(3)",
            "ended with exit code 3 at step 20",
        ),
    ],
    ids=["raised", "said", "printed"],
)
def test_file_name_that_is_not_utf_8_is_in_the_verdict(
    tmp_path: Path, hosts: int, fault: str, words: str
) -> None:
    gang, codes = run_program(tmp_path, SURROGATE.format(fault=fault), hosts=hosts)
    assert codes == [83] * hosts, gang.stderr
    assert words in gang.verdict["message"] and gang.verdict["rank"] == hosts - 1
    assert "Traceback" not in gang.stderr and gang.summary["status"] == "failed"
    (gang.run_dir / "summary.json").read_bytes().decode("ascii")
    json.dumps([gang.summary, gang.attempts], ensure_ascii=False).encode()


def test_malformed_progress_lines_do_not_end_an_agent(tmp_path: Path) -> None:
    gang, codes = run_program(
        tmp_path,
        """
        fd = int(os.environ["JAXLAUNCH_PROGRESS_FD"])
        keys = (
            "error", "hello", "jax", "pid", "phase", "step", "committed", "metrics", "stopped",
            "profile", "note",
        )
        for key in keys:
            for value in (None, "boom", -1, 2**70, 1e999, [], [{}], {"step": "x"}):
                say(**{key: value}) if (key, type(value)) != ("error", dict) else None
        for line in (b"[" * 60000, b"boom", b"3", b"\\xff", b"{" * 3000):
            os.write(fd, line + b"\\n")
            time.sleep(0.05)
        say(phase="step", step=7)
        time.sleep(1.5)  # a beat carries it all
        """,
        hosts=2,
    )
    assert codes == [0, 0], gang.stderr
    assert gang.summary["step"] == 7
    assert "Traceback" not in gang.stderr
    assert "invalid" not in gang.stderr
    assert any(
        "wrote `error`: 'boom' to the progress pipe; it must be an object" in n
        for n in gang.summary["notes"]
    )


def test_failed_assertion_is_the_cause_without_the_hook(tmp_path: Path) -> None:
    interpreter, file = write_program(
        tmp_path,
        """
        import socket, threading
        path = f"{os.environ['MARKS']}/socket"
        if RANK == 0:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(path)
            listener.listen()
            mark("up")
            listener.accept()[0].recv(1)  # ends when the peer dies
            os._exit(1)
        wait_for("up-0")
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(path)
        print("loader.cc:12: Assertion `rows > 0' failed.", flush=True)
        os.abort()
        """,
    )
    gang, _ = run_gang(tmp_path, make_job((interpreter, "-I", file)), hosts=2)
    assert gang.verdict["rank"] == 1 and gang.verdict["code"] == 134, gang.verdict


def test_agent_raises_its_limit_of_open_files_but_not_that_of_programs(tmp_path: Path) -> None:
    command = write_program(
        tmp_path, "import resource; print('limit', resource.getrlimit(resource.RLIMIT_NOFILE)[0])"
    )
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    lowered = "import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {})); "
    script = lowered + "from jaxlaunch.launcher.agent.agent import run_agent; sys.exit(run_agent())"
    for most, warns in ((hard, False), (200, True)):
        folder = tmp_path / str(most)
        folder.mkdir()
        argv = (sys.executable, "-c", script.format(most))
        gang, codes = run_gang(folder, make_job(command), argv=argv)
        assert codes == [0], gang.stderr
        assert "limit 64" in gang.stdout
        assert (
            "a limit of 200 open files (ulimit -Hn) is too low for 1 hosts" in gang.stderr
        ) == warns


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared-folder", "folder-of-its-own"])
def test_seconds_of_a_run_outlive_its_leader(tmp_path: Path, is_shared: bool) -> None:
    command = write_program(
        tmp_path,
        """
        mark("up")
        for step in range(10_000):
            say(phase="step", step=step)
            if step == 20:
                say(committed=20)
            # 3 s later: the leader's next beat, and its summary, were after the commit.
            if step == 80:
                mark("later")
            time.sleep(0.05)
        """,
    )
    with Gang(tmp_path, make_job(command), hosts=2) as gang:
        env = {} if is_shared else {contract.RUN_DIR: str(tmp_path / "other")}
        started_at = time.monotonic()
        gang.start(0).start(1, env=env).wait_for_marks("up-0", "up-1")
        up_at = time.monotonic()
        gang.wait_for_marks("later-0", "later-1")
        gang.signal(0, signal.SIGKILL)
        killed_at = time.monotonic()
        codes = gang.wait()
        ended_at = time.monotonic()
    assert codes == [-9, 81]
    gang.run = "run" if is_shared else "other"
    gang.run_dir = tmp_path / gang.run
    seconds = gang.summary["goodput"]["seconds"]
    assert killed_at - up_at - 3.0 < sum(seconds.values()) < ended_at - started_at + 1.0, seconds
    assert seconds["step"] >= 0.5, seconds
    assert seconds["lost_work"] >= 1.0, seconds
    assert gang.summary["goodput"]["ratio"] > 0, seconds
    (attempt,) = gang.attempts
    assert attempt["seconds"]["step"] == pytest.approx(seconds["step"], abs=0.01)

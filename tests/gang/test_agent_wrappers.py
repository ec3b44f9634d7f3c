"""Which process of a rank joins, reports and is blamed, whatever the command starts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.host import process_tree
from tests import launch_commands
from tests.found import shows
from tests.gang.agents import Gang, make_job, run_gang, run_script, write_program, write_script
from tests.launch_commands import COMMANDS

# A wrapper in Python that hides signals, and a program that leaves its session, with the endings
# that these make hard. The script has the commands that are in neither list, and every ending.
QUICK_COMMANDS = {"accelerate launch": ("kill", "stop"), "nohup setsid &": ("hang", "stop")}
# Wrappers that hold the output back, that give it a terminal, and that start another session.
MORE_COMMANDS = ("conda run", "script", "torchrun")


def check_failures(folder: Path, name: str, endings: Sequence[str]) -> None:
    command = COMMANDS[name]
    said = launch_commands.try_failures(folder, command, endings)
    assert sorted(said) == sorted(endings)
    assert not launch_commands.find_faults(command, said)


@pytest.mark.parametrize("name", QUICK_COMMANDS)
def test_failures_behind_a_launch_command_are_those_of_the_program(
    tmp_path: Path, name: str
) -> None:
    check_failures(tmp_path, name, QUICK_COMMANDS[name])


@pytest.mark.extended
@pytest.mark.parametrize("name", MORE_COMMANDS)
def test_every_failure_behind_a_launch_command_is_that_of_the_program(
    tmp_path: Path, name: str
) -> None:
    check_failures(tmp_path, name, launch_commands.ENDINGS)


# A program that reports, and ends as its argument says.
ENDS = """
import os, signal, sys, time
import jaxlaunch
def train(ending):
    # The same failure at the same step would end the job.
    jaxlaunch.report(step=int(os.environ["JAXLAUNCH_ATTEMPT"]))
    if ending == "wait":
        print("up", flush=True)
        time.sleep(3600)
    if ending == "raise":
        raise ValueError("bad batch 17")
    if ending == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "os._exit 3":
        os._exit(3)
    if ending == "SystemExit 4":
        raise SystemExit(4)
    if ending == "sys.exit 5":
        sys.exit(5)
if __name__ == "__main__":
    train(sys.argv[1])
"""
HIDING = """
import concurrent.futures, multiprocessing, os, subprocess, sys
import ends
kind, ending = sys.argv[1:]
command = [sys.executable, ends.__file__, ending]
if __name__ == "__main__":
    if kind == "Popen":
        subprocess.Popen(command).wait()
    elif kind == "check":
        subprocess.run(command, check=True)
    elif kind == "terminate":
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        process.stdout.readline()
        process.terminate()
        process.wait()
    elif kind == "timeout":
        subprocess.run(command, timeout=1)
    elif kind == "joblib":
        import joblib
        joblib.Parallel(n_jobs=2)([joblib.delayed(ends.train)(ending)])
    elif kind == "os.fork":
        if (child := os.fork()) == 0:
            os.execv(command[0], command)
        os.waitpid(child, 0)
    elif kind == "Pool":
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            pool.map(ends.train, [ending])
    elif kind == "executor":
        with concurrent.futures.ProcessPoolExecutor(1) as executor:
            executor.submit(ends.train, ending).result()
    elif kind == "handles":
        with concurrent.futures.ProcessPoolExecutor(1) as executor:
            print("handled", executor.submit(ends.train, ending).exception())
    else:
        context = multiprocessing.get_context(kind)
        process = context.Process(target=ends.train, args=(ending,))
        process.start()
        process.join()
"""
# A compiled wrapper that ends with 0, as `script` does without -e.
PERL = "perl -e 'system(@ARGV)' "
RAISED = "raised at step {}: ValueError: bad batch 17"
SIGNALLED = "was killed by SIGKILL at step {}"
HIDDEN_ENDS = (
    ("Popen raise", RAISED),
    ("Popen kill", SIGNALLED),
    ("Popen 'SystemExit 4'", "exit code 4"),
    ("check 'os._exit 3'", "exit code 3"),
    ("os.fork 'sys.exit 5'", "exit code 5"),
    ("fork raise", RAISED),
    ("fork kill", SIGNALLED),
    ("spawn raise", RAISED),
    ("spawn 'sys.exit 5'", "exit code 5"),
    ("forkserver raise", RAISED),
    ("forkserver 'os._exit 3'", "exit code 3"),
    ("Pool raise", RAISED),
    ("executor raise", RAISED),
    ("executor kill", SIGNALLED),
    # Its parent kills the workers after a task has failed.
    ("joblib raise", RAISED),
    ("timeout wait", "TimeoutExpired"),
    ("perl raise", RAISED),
    ("perl 'sys.exit 5'", "exit code 5"),
    # A shell that knows the failure judges it, and one that does not know it cannot.
    ("bash Popen raise; true", RAISED),
    ("bash terminate wait", "the process finished"),
)


def test_end_of_the_program_decides_whatever_its_parent_says(tmp_path: Path) -> None:
    ends = write_script(tmp_path, ENDS, "ends.py")
    hiding = write_script(tmp_path, HIDING, "hiding.py")
    for attempt, (case, _) in enumerate(HIDDEN_ENDS, 1):
        line = f"exec {sys.executable} {hiding} {case}"
        if case.startswith("perl "):
            line = f"exec {PERL} {sys.executable} {ends} {case.removeprefix('perl ')}"
        elif case.startswith("bash "):
            line = f"{sys.executable} {hiding} {case.removeprefix('bash ')}"
        (tmp_path / f"{attempt}.sh").write_text(f"{line}\n")
    command = ("sh", "-c", f"exec bash {tmp_path}/$JAXLAUNCH_ATTEMPT.sh")
    gang, codes = run_gang(tmp_path, make_job(command, in_place_limit=len(HIDDEN_ENDS)))
    messages = [attempt["verdict"]["message"] for attempt in gang.attempts]
    assert len(messages) == len(HIDDEN_ENDS), (messages, gang.stdout)
    for attempt, ((case, words), message) in enumerate(zip(HIDDEN_ENDS, messages, strict=True), 1):
        assert words.format(attempt) in message, case


DIES_AT_ONCE = """
from tests.gang.agents import PRELUDE
exec(PRELUDE)
import jaxlaunch
with open(f"{os.environ['MARKS']}/pid", "w") as file:
    file.write(str(os.getpid()))
mark("up")
wait_for("frozen")
jaxlaunch.report(step=1)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_kill_right_after_the_first_report_is_that_of_the_program(tmp_path: Path) -> None:
    env = launch_commands.prepare_folder(tmp_path)
    command = COMMANDS["nsys-jax"].argv(str(write_script(tmp_path, DIES_AT_ONCE)))
    with Gang(tmp_path, make_job(command, workdir=str(tmp_path)), env=env) as gang:
        gang.start().wait_for_marks("up-0")
        # A busy agent reads the report after the program has ended.
        gang.signal(0, signal.SIGSTOP)
        gang.release("frozen")
        pid = int((gang.marks / "pid").read_text())
        gang.wait_until("the end of the program", lambda: not process_tree.is_running(pid))
        gang.signal(0, signal.SIGCONT)
        gang.wait()
    assert gang.verdict["message"].startswith("rank 0 was killed by SIGKILL at step 1 ")


def test_launch_commands_finish_when_their_programs_do(tmp_path: Path) -> None:
    names = ("conda run", "torchrun", "nsys", "> >(tee)")
    said = launch_commands.try_success(tmp_path, [COMMANDS[name] for name in names])
    assert said.startswith("[0]: every process finished"), said


# The main module joins when it is imported, as in google/grain#802. A worker imports it again.
WORKERS = """
import concurrent.futures, multiprocessing, sys
import jax
jax.distributed.initialize()
import jax.numpy as jnp
from jax.experimental import multihost_utils
def square(number):
    return number * number
if __name__ == "__main__":
    if jax.process_index() == 1:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            print("pool", sum(pool.map(square, range(8))))
        context = multiprocessing.get_context("forkserver")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            print("executor", sum(executor.map(square, range(9))))
    print("sums to", float(multihost_utils.process_allgather(jnp.ones(1)).sum()))
"""


def test_workers_that_import_the_main_module_do_not_join(tmp_path: Path) -> None:
    gang, codes = run_script(tmp_path, WORKERS, hosts=2)
    assert codes == [0, 0], gang.stdout
    assert "pool 140" in gang.stdout and "executor 204" in gang.stdout
    assert gang.stdout.count("sums to 2.0") == 2
    (note,) = gang.summary["notes"]
    shows(
        "a worker of multiprocessing called jax.distributed.initialize() as it imported the main "
        "module",
        note,
    )
    assert note.endswith("it did not join. Guard the call with `if __name__ == '__main__':`")


JOINS = """
import jax
jax.distributed.initialize()
import jax.numpy as jnp
from jax.experimental import multihost_utils
print("sums to", float(multihost_utils.process_allgather(jnp.ones(1)).sum()))
"""


def run_bash(
    folder: Path, line: str, *, hosts: int = 2, **fields: object
) -> tuple[Gang, Sequence[int]]:
    """Run a line of bash in which $train is a program that joins."""
    train = f"{sys.executable} {write_script(folder, JOINS, 'train.py')}"
    job = make_job(("bash", "-c", line.replace("$train", train)), **fields)
    return run_gang(folder, job, hosts=hosts)


def test_second_process_of_a_rank_is_refused_with_advice(tmp_path: Path) -> None:
    # As the first process of the rank waits for the others, the second ends.
    second = "for i in 0 1; do $train & done; wait -n; code=$?; wait; exit $code"
    line = f"if [ $JAX_PROCESS_ID = 1 ]; then exec sleep 3600; fi; {second}"
    gang, codes = run_bash(tmp_path, line, in_place_limit=3)
    assert codes == [64, 64], gang.stderr
    assert len(gang.attempts) == 1
    message = gang.verdict["message"]
    shows(
        "a second process of rank … called jax.distributed.initialize() while the first one runs",
        message,
    )
    assert "`processes_per_host`" in message and "`if __name__ == '__main__':`" in message


def test_programs_of_a_rank_join_in_turn(tmp_path: Path) -> None:
    gang, codes = run_bash(tmp_path, "$train && $train")
    assert codes == [0, 0], gang.stdout
    assert gang.stdout.count("sums to 2.0") == 4


FOR_OTHERS = """
import os, sys
import jax
from jax.experimental import multihost_utils
rank = int(os.environ["JAX_PROCESS_ID"])
arguments = {
    "mpi4py": {"cluster_detection_method": "mpi4py", "local_device_ids": [0]},
    "own": {"coordinator_address": "192.0.2.7:1234", "num_processes": 1, "process_id": 0},
}[sys.argv[1]]
jax.distributed.initialize(**arguments)
assert (jax.process_index(), jax.process_count()) == (rank, 2), jax.process_count()
"""


def test_values_of_the_launcher_win_over_other_clusters(tmp_path: Path) -> None:
    script = write_script(tmp_path, FOR_OTHERS)
    line = f"kinds=(mpi4py own); {sys.executable} {script} ${{kinds[$JAX_PROCESS_ID]}}"
    gang, codes = run_gang(tmp_path, make_job(("bash", "-c", line), processes_per_host=2))
    assert codes == [0], gang.stdout
    hint = "the job's own values are used, so leave these arguments out"
    shows("the job's own values are used, so leave these arguments out", gang.summary["notes"][0])
    names = [
        "cluster_detection_method='mpi4py'",
        "coordinator_address, num_processes, process_id",
    ]
    assert sorted(gang.summary["notes"]) == sorted(
        f"jax.distributed.initialize({name}): {hint}" for name in names
    )


PROBE = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "import jax; raise SystemExit(jax.__version__ == '')"])
subprocess.run([sys.executable, "-c", "import not_there"], stderr=subprocess.DEVNULL)
say(phase="step", step=3)
raise ValueError("of the program itself")
"""


def test_helpers_of_a_program_are_not_the_program(tmp_path: Path) -> None:
    job = make_job(write_program(tmp_path, PROBE))
    gang, codes = run_gang(tmp_path, job)
    assert codes == [83]
    assert gang.verdict["message"] == "rank 0 raised at step 3: ValueError: of the program itself"

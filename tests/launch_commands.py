"""Launch commands of public repositories, with five endings: `python -m tests.launch_commands`.

A command of a job often starts its program through something else: `conda run`, `nsys profile`,
`timeout`, a launch.py. Each command here runs a program that joins JAX on two ranks, and rank 1
raises, is killed, hangs or is stopped, or both ranks finish. The launcher has to say the same as
without the wrapper. What is installed is used as it is; for the other tools there are stand-ins,
which fork, change the session, pass on signals and translate exit codes as the tools do. Prints a
row for each command, with the wrong messages. WORDs choose among them, by name.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import sys
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gang.agents import Gang, make_job

# Both ranks do two steps together. The attempt decides how rank 1 continues.
PROGRAM = """
import os, signal, sys, time
import jax
jax.distributed.initialize()
import jax.numpy as jnp
from jax.experimental import multihost_utils
import jaxlaunch

rank = jax.process_index()
ending = sys.argv[int(os.environ["JAXLAUNCH_ATTEMPT"])]

def mark(name):
    open(f"{os.environ['MARKS']}/{name}-{rank}", "w").close()

def stand_still():
    time.sleep(3600)

def save_and_exit(*_):
    mark("saved")
    sys.exit(0)

for step in (1, 2):
    multihost_utils.process_allgather(jnp.ones(2))
    jaxlaunch.report(step=step, committed=step)
if ending == "stop":
    signal.signal(signal.SIGTERM, save_and_exit)
    mark("up")
    while True:
        time.sleep(0.05)
if rank == 1 and ending == "exception":
    raise ValueError("bad batch 17")
if rank == 1 and ending == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and ending == "hang":
    stand_still()
if ending != "success":
    multihost_utils.process_allgather(jnp.ones(2))
jaxlaunch.report(phase="done")
"""
# One gang tries the first three in turn, with restarts in place, and is stopped in the last
# attempt.
ENDINGS = ("exception", "kill", "hang", "stop")
STEP_TIMEOUT_S = 8.0

# A program in Perl stands for a compiled one, which has no site hook. It forks, may start a
# session, may pass SIGTERM on, and ends with the code of its child, 128 plus a signal.
_COMPILED = """#!/usr/bin/perl
use POSIX;
{skip}
my $child = fork();
if (!$child) {{ {in_child}; exec @ARGV or exit 127; }}
{handlers}
while (waitpid($child, 0) < 0) {{ last if !$!{{EINTR}}; }}
my $status = $?;
{finish}
exit(($status & 127) ? 128 + ($status & 127) : $status >> 8);
"""


def _compiled(
    skip: str = "", *, in_child: str = "", forwards: bool = False, finish: str = ""
) -> str:
    handlers = "$SIG{TERM} = sub { kill 'TERM', $child };" if forwards else ""
    return _COMPILED.format(skip=skip, in_child=in_child, handlers=handlers, finish=finish)


_SKIP_OPTIONS = "shift @ARGV while @ARGV && $ARGV[0] =~ /^-/;"
_SKIP_TO_PYTHON = "shift @ARGV while @ARGV && $ARGV[0] !~ /python/;"
# The Pythons among the wrappers begin in the same way.
_PYTHON = f"#!{sys.executable}\n" + textwrap.dedent(
    """
    import os, signal, subprocess, sys
    words = sys.argv[1:]
    """
)
STAND_INS: Mapping[str, str] = {
    # conda writes a script that activates the environment, runs it, and may capture its output
    # (conda/cli/main_run.py, conda/gateways/subprocess.py).
    "conda": _PYTHON
    + textwrap.dedent(
        """
        command = words[words.index("python"):]
        captures = "--no-capture-output" not in words
        name = f"conda-script-{os.getpid()}"
        with open(name, "w") as script:
            script.write('"$@"\\n')
        pipe = subprocess.PIPE if captures else None
        process = subprocess.Popen(["bash", name, *command], stdout=pipe, stderr=pipe)
        for text, stream in zip(process.communicate(), (sys.stdout, sys.stderr)):
            print((text or b"").decode(), end="", file=stream)
        if process.returncode:
            print("ERROR conda.cli.main_run:execute: failed. (See above for error)")
        sys.exit(process.returncode)
        """
    ),
    # simple_launcher of accelerate/commands/launch.py.
    "accelerate": _PYTHON
    + textwrap.dedent(
        """
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        process = subprocess.Popen([sys.executable, *words[script:]])
        process.wait()
        if process.returncode != 0:
            raise subprocess.CalledProcessError(returncode=process.returncode, cmd=process.args)
        """
    ),
    # deepspeed/launcher/launch.py ends with the code of its child.
    "deepspeed": _PYTHON
    + textwrap.dedent(
        """
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        process = subprocess.Popen([sys.executable, "-u", *words[script:]])
        def end(signal_number, frame):
            process.send_signal(signal_number)
            process.wait()
            sys.exit(1)
        signal.signal(signal.SIGTERM, end)
        sys.exit(process.wait())
        """
    ),
    # torch/distributed/elastic starts each worker in a session of its own, and raises when one
    # fails.
    "torchrun": _PYTHON
    + textwrap.dedent(
        """
        import time
        class ChildFailedError(Exception): pass
        script = next(index for index, word in enumerate(words) if word.endswith(".py"))
        worker = subprocess.Popen([sys.executable, "-u", *words[script:]], start_new_session=True)
        def end(signal_number, frame):
            os.killpg(worker.pid, signal.SIGTERM)
            raise SystemExit(1)
        signal.signal(signal.SIGTERM, end)
        while worker.poll() is None:
            time.sleep(0.1)
        if worker.returncode:
            raise ChildFailedError(f"{words[script]} FAILED, exitcode: {worker.returncode}")
        """
    ),
    # wandb/wandb_agent.py starts the run in a process group of its own, and looks at it every few
    # seconds. The agent ends with 0 after a run that failed.
    "wandb": _PYTHON
    + textwrap.dedent(
        """
        import time
        run = subprocess.Popen(words[words.index("python"):], preexec_fn=os.setpgrp)
        while run.poll() is None:
            time.sleep(1)
        print("wandb: Agent Finished")
        """
    ),
    # poetry replaces itself.
    "poetry": _PYTHON + "os.execvp(words[1], words[1:])\n",
    # nsys_jax of JAX-Toolbox runs nsys.
    "nsys-jax": _PYTHON
    + textwrap.dedent(
        """
        command = words[words.index("--") + 1:]
        result = subprocess.run(["nsys", "profile", "-o", "report", *command])
        sys.exit(result.returncode)
        """
    ),
    "micromamba": _compiled(_SKIP_TO_PYTHON, forwards=True),
    "uv": _compiled(_SKIP_TO_PYTHON, forwards=True),
    # It takes a while to write its report after the program has ended.
    "nsys": _compiled(
        _SKIP_TO_PYTHON, in_child="POSIX::setsid()", finish="print 'Generating report'; sleep 3;"
    ),
    "numactl": "#!/usr/bin/perl\n" + _SKIP_OPTIONS + "\nexec @ARGV;\n",
    "tini": _compiled(_SKIP_OPTIONS, in_child="POSIX::setpgid(0, 0)", forwards=True),
    "dumb-init": _compiled(_SKIP_OPTIONS, in_child="POSIX::setsid()", forwards=True),
    # srun's tasks are children of slurmstepd, in a session of their own. srun itself ends with
    # their highest code.
    "srun": _compiled(_SKIP_OPTIONS, in_child="POSIX::setsid()", forwards=True),
    "mpirun": _compiled(_SKIP_TO_PYTHON, in_child="POSIX::setpgid(0, 0)", forwards=True),
    # /usr/bin/xvfb-run of Debian is a shell script with a trap for the end.
    "xvfb-run": textwrap.dedent(
        """\
        #!/bin/sh
        clean_up () { kill $XVFBPID 2>/dev/null || true; }
        trap clean_up EXIT
        sleep 3600 & XVFBPID=$!
        shift
        set +e
        DISPLAY=:99 "$@" 2>&1
        RETVAL=$?
        set -e
        clean_up
        exit $RETVAL
        """
    ),
}
LAUNCH_PY = """
import subprocess, sys
sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)
"""
SPAWN_PY = """
import multiprocessing, runpy, sys
def run(arguments):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    process = context.Process(target=run, args=(sys.argv[2:],))
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""
FUTURES_PY = """
import concurrent.futures, runpy, sys
def run(arguments):
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
if __name__ == "__main__":
    with concurrent.futures.ProcessPoolExecutor(1) as executor:
        executor.submit(run, sys.argv[1:]).result()
"""


LOOP_SH = """#!/bin/bash
until python "$@"; do
  [ $((++tries)) -ge 2 ] && exit 1
  echo "--> Restarting script"
done
"""
SLURM_SH = """#!/bin/bash
echo "Launching distributed computation..."
srun --kill-on-bad-exit=1 --cpu-bind=cores python "$@"
EXITCODE=$?
echo "Exit code: $EXITCODE"
exit $EXITCODE
"""
TEE_SH = """#!/bin/bash
set -euo pipefail
exec > >(tee -a log-$JAX_PROCESS_ID) 2>&1
python "$@"
"""
FILES = {
    "train.py": PROGRAM,
    "prepare.py": "print('prepared')\n",
    "launch.py": LAUNCH_PY,
    "spawn.py": SPAWN_PY,
    "futures.py": FUTURES_PY,
    "loop.sh": LOOP_SH,
    "slurm.sh": SLURM_SH,
    "tee.sh": TEE_SH,
}
KILLED = "rank 1 was killed by SIGKILL"
GONE = "rank 1's program was killed"


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """A command and the line of a public repository that it stands for.

    Attributes:
        original: The line.
        words: The command, split at spaces unless it is an argv; {train} is the program.
        kill: The message about a killed program.
    """

    original: str
    words: str | Sequence[str]
    kill: str = KILLED

    def argv(self, train: str) -> list[str]:
        """Return the command that runs a program with its arguments."""
        if isinstance(self.words, str):
            return self.words.format(train=train).split()
        return [word.format(train=train) for word in self.words]


COMMANDS: Mapping[str, LaunchCommand] = {
    "python": LaunchCommand("python train.py", "python {train}"),
    "python -u": LaunchCommand("python -u -m pufferlib_market.train", "python -u {train}"),
    "launch.py": LaunchCommand(
        "subprocess.run([sys.executable, *sys.argv[1:]])", "python launch.py {train}"
    ),
    "multiprocessing": LaunchCommand(
        "mp.Process(target=train, args=(config,))", "python spawn.py spawn {train}"
    ),
    "multiprocessing, fork": LaunchCommand(
        "Process(target=main_worker, args=(gpu, args)).start()", "python spawn.py fork {train}"
    ),
    "forkserver": LaunchCommand(
        'mp.set_start_method("forkserver", force=True)', "python spawn.py forkserver {train}"
    ),
    "futures": LaunchCommand(
        "with ProcessPoolExecutor(max_workers=1) as pool: pool.submit(train, config).result()",
        "python futures.py {train}",
    ),
    "bash -lc": LaunchCommand(
        # A login shell replaces PATH.
        'bash -lc "python -m app.scripts.seed"',
        ("bash", "-lc", f"{sys.executable} {{train}}"),
    ),
    "exec": LaunchCommand("exec python -u main.py", ("sh", "-c", "exec python -u {train}")),
    "prepare && train": LaunchCommand(
        "python prepare.py && python train.py",
        ("bash", "-c", "python prepare.py && python {train}"),
    ),
    "until": LaunchCommand("until python train_concap.py; do …", "bash loop.sh {train}", kill=GONE),
    "| tee": LaunchCommand(
        "(date; stdbuf -oL python3 -u tiny-train; date) 2>&1 | tee train.log",
        ("bash", "-c", "set -o pipefail; stdbuf -oL python -u {train} 2>&1 | tee log"),
    ),
    "> >(tee)": LaunchCommand('exec > >(tee -a "$RUN_LOG") 2>&1', "bash tee.sh {train}"),
    "env -S": LaunchCommand(
        "#!/usr/bin/env -S uv run --script", ("env", "-S", "uv run --script python {train}")
    ),
    "uv run": LaunchCommand("uv run python cleanrl/ppo.py", "uv run python {train}"),
    "uv run accelerate": LaunchCommand(
        "uv run accelerate launch --config_file configs/fsdp.yaml train.py",
        "uv run python bin/accelerate launch --config_file fsdp.yaml {train}",
    ),
    "poetry run": LaunchCommand("poetry run python cleanrl/ppo.py", "poetry run python {train}"),
    "conda run": LaunchCommand(
        "conda run -n lerobot python scripts/eval.py", "conda run -n env python {train}"
    ),
    "conda run, live": LaunchCommand(
        "conda run --no-capture-output -n cmat python -m tools.diagnose",
        "conda run --no-capture-output -n env python {train}",
    ),
    "micromamba run": LaunchCommand(
        "micromamba run -n comfyui python main.py", "micromamba run -n env python {train}"
    ),
    "accelerate launch": LaunchCommand(
        "accelerate launch --num_processes 1 train.py",
        "accelerate launch --num_processes 1 {train}",
    ),
    "deepspeed": LaunchCommand("deepspeed --num_gpus 1 train.py", "deepspeed --num_gpus 1 {train}"),
    "torchrun": LaunchCommand(
        "python -m torch.distributed.run --nproc_per_node=1 train_vqa.py",
        "torchrun --nproc_per_node=1 {train}",
    ),
    "wandb agent": LaunchCommand(
        "wandb agent --count 1 SWEEP", "wandb agent --count 1 python {train}"
    ),
    "nsys": LaunchCommand(
        "nsys profile --trace=cuda --sample=process-tree -o report python -m bench",
        "nsys profile --trace=cuda --sample=process-tree -o report python {train}",
    ),
    "nsys-jax": LaunchCommand(
        "nsys-jax -o /out/rank%q{SLURM_PROCID} -- python my_program.py",
        "nsys-jax -o report -- python {train}",
    ),
    "strace": LaunchCommand(
        'strace -f -o "$tmp/trace" "$BIN"', "strace -f -e trace=none -o trace python {train}"
    ),
    "numactl": LaunchCommand(
        "numactl --cpunodebind=0 --membind=0 uv run bench.py",
        "numactl --cpunodebind=0 --membind=0 uv run python {train}",
    ),
    "taskset": LaunchCommand(
        "taskset -c 0-15 python main_train.py", "taskset -c 0-1 python {train}"
    ),
    "ionice nice": LaunchCommand(
        "ionice -c 3 nice -n 10 python -B -", "ionice -c 3 nice -n 10 python -B {train}"
    ),
    "timeout": LaunchCommand(
        'timeout --signal=TERM --kill-after=30 "${cap}s"',
        "timeout --signal=TERM --kill-after=30 600s python {train}",
    ),
    "setsid": LaunchCommand("setsid python3 -u app.py", "setsid python -u {train}"),
    "setsid --wait": LaunchCommand("setsid --wait python app.py", "setsid --wait python {train}"),
    "nohup &": LaunchCommand(
        "nohup python -u -m romp.train > log/$TAB.log 2>&1 &",
        ("sh", "-c", "nohup python -u {train} > log 2>&1 &"),
    ),
    "nohup setsid &": LaunchCommand(
        "nohup setsid python3 run_full_ablation.py > log 2>&1 < /dev/null &",
        ("sh", "-c", "nohup setsid python {train} > log 2>&1 < /dev/null &"),
    ),
    "script": LaunchCommand(
        'exec script -qec "python -u main.py" /dev/null',
        ("script", "-qec", "python -u {train}", "/dev/null"),
    ),
    "flock": LaunchCommand(
        "flock -n /tmp/coco-iou-15.lockfile -c 'python scripts/coco_all_map.py'",
        ("sh", "-c", "exec flock -n lock-$JAX_PROCESS_ID -c 'python {train}'"),
    ),
    "tini": LaunchCommand('ENTRYPOINT ["tini", "--", "entrypoint.sh"]', "tini -- python {train}"),
    "dumb-init": LaunchCommand(
        "exec dumb-init -- python -u /app/flaresolverr.py", "dumb-init -- python -u {train}"
    ),
    "xvfb-run": LaunchCommand(
        "xvfb-run -a python -m cleanrl_utils.benchmark", "xvfb-run -a python {train}"
    ),
    "srun": LaunchCommand(
        "srun --kill-on-bad-exit=1 --cpu-bind=cores python examples/slurm.py; EXITCODE=$?",
        "bash slurm.sh {train}",
    ),
    "mpirun": LaunchCommand("mpirun -np 2 python test_script.py", "mpirun -np 1 python {train}"),
}


def prepare_folder(folder: Path) -> dict[str, str]:
    """Write the programs and the stand-ins, and return the variables that find them."""
    tools = folder / "bin"
    tools.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    for name, text in STAND_INS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    return {"PATH": f"{tools}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}


def try_failures(
    folder: Path, command: LaunchCommand, endings: Sequence[str] = ENDINGS
) -> dict[str, str]:
    """Run a gang of two ranks through endings, of which "stop" is the last one.

    Returns the message about each.
    """
    env = prepare_folder(folder)
    argv = command.argv(f"{folder}/train.py {' '.join(endings)}")
    options = {"in_place_limit": len(endings), "timeouts_s": {"step": STEP_TIMEOUT_S}}
    job = make_job(argv, workdir=str(folder), **options)
    with Gang(folder, job, hosts=2, env=env) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        gang.signal(0)
        codes = gang.wait()
        messages = [attempt["verdict"]["message"] for attempt in gang.attempts]
        has_saved = [(gang.marks / f"saved-{rank}").exists() for rank in (0, 1)]
    said = dict(zip(endings, messages, strict=False))
    said["stop"] = f"{codes} saved {has_saved}: {messages[-1]}"
    return said


def try_success(folder: Path, commands: Sequence[LaunchCommand]) -> str:
    """Run a gang with one rank for each command to its end, and return the message."""
    env = prepare_folder(folder)
    for rank, command in enumerate(commands):
        words = " ".join(f"'{word}'" for word in command.argv(f"{folder}/train.py success"))
        (folder / f"rank-{rank}.sh").write_text(f"exec {words}\n")
    argv = ("sh", "-c", "exec sh rank-$JAX_PROCESS_ID.sh")
    job = make_job(argv, workdir=str(folder), processes_per_host=len(commands))
    with Gang(folder, job, env=env) as gang:
        codes = gang.start().wait()
        return f"{codes}: {gang.verdict['message']}"


def find_faults(command: LaunchCommand, said: Mapping[str, str]) -> dict[str, str]:
    """Return the wrong messages, by ending."""
    expected = {
        "exception": ("rank 1 raised at step 2: ValueError: bad batch 17",),
        "kill": (command.kill,),
        "hang": ("rank 1 makes no progress at step 2", "stand_still (train.py:"),
        "stop": ("[80, 80] saved [True, True]: stopped from outside",),
        "success": ("[0]: every process finished",),
    }
    return {
        ending: text
        for ending, text in said.items()
        if not all(part in text for part in expected[ending])
    }


def main(words: Sequence[str]) -> int:
    """Try the commands, and return 1 if a message is wrong."""
    names = [name for name in COMMANDS if not words or any(word in name for word in words)]
    folder = Path(tempfile.mkdtemp(prefix="launch-commands-"))
    wrong = 0
    for index, name in enumerate(names):
        command = COMMANDS[name]
        started_at = time.monotonic()
        try:
            said = try_failures(folder / str(index), command)
            said["success"] = try_success(folder / f"{index}-success", [command] * 2)
            faults = find_faults(command, said)
        except AssertionError as error:
            faults = {"gang": str(error)[-3000:]}
        wrong += bool(faults)
        took_s = time.monotonic() - started_at
        print(f"{name:18} {'wrong' if faults else 'as without it':14} {took_s:4.0f} s", flush=True)
        for ending, text in faults.items():
            print(f"    {ending}: {text}", flush=True)
        if not faults:
            shutil.rmtree(folder / str(index))
            shutil.rmtree(folder / f"{index}-success")
    print(f"{len(names)} commands, {wrong} wrong; {folder}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

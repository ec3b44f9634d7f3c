"""What users of other tools type: each line ends in the right place in one step."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest

from jaxlaunch.launcher.cli import foreign_words, habits
from jaxlaunch.launcher.cli.main import COMMANDS
from jaxlaunch.launcher.kubernetes import kubeconfig
from tests.launcher.invoke import Launcher
from tests.launcher.report import made_runs

JOB = "name: digits\naccelerator: {type: cpu, per_host: 1}\ncommand: [python, train.py]\n"

# What the command `list`, `status`, … prints about the run of the fixture.
LISTED, STATUS, EXPLAINED, LOGGED = (
    "NAME     STATE",
    "digits: Done",
    "digits is done",
    "a line of it",
)
STOP, DELETE = "`launcher stop digits` saves and ends it", "`launcher delete digits` deletes a job"
SUBMIT, RUN = "`launcher submit digits.yaml` runs it on", "`launcher run digits.yaml` trains"
RESUME, PROGRAM = "`launcher submit digits.yaml`, or", "`command: [python, train.py]`"

# Line -> a part of the answer.
HABITS = {
    # --- Kubernetes ---
    "version": "launcher, version",
    "-V": "launcher, version",
    "get jobs": LISTED,
    "get job digits": STATUS,
    "get": LISTED,
    "get pods": "`launcher status NAME -o wide` names the pod",
    "get nodes": "`kubectl get nodes` lists them",
    "get events": "`launcher list` shows the names.",
    "describe digits": EXPLAINED,
    "describe job digits": EXPLAINED,
    "describe job/digits": EXPLAINED,
    "describe": "`launcher list` shows the names.",
    "events digits": EXPLAINED,
    "apply -f digits.yaml": SUBMIT,
    "create -f digits.yaml": SUBMIT,
    "create digits.yaml": SUBMIT,
    "delete digits": "stdin is not a terminal.\n  hint: add --yes",
    "delete job digits": "stdin is not a terminal.\n  hint: add --yes",
    "delete runs/digits --yes": "run/digits deleted",
    "delete jobset/digits --yes": "run/digits deleted",
    "delete -f digits.yaml": "takes the name of the job",
    "delete digits.yaml": "`launcher delete digits`",
    "delete --all": "xargs launcher delete",
    "delete -l app=x": "xargs launcher delete",
    "delete digits --force": "`launcher delete digits --yes`",
    "delete nothing digits --yes": "run/digits deleted",
    "exec -it digits -- bash": "Rank 0 of digits has no process on this machine now",
    "cp digits:/checkpoints .": "`launcher copy NAME:PATH .` copies from a pod",
    "copy digits:/checkpoints .": "`cp` copies its files",
    "kubectl get pods": "`launcher status NAME -o wide` names the pod",
    "kubectl get jobs": LISTED,
    "kubectl logs digits": "leave the word out: `launcher logs digits`",
    "kubectl": "type it without `launcher`",
    "logs job digits": LOGGED,
    "helm install x": "`helm install TEAM helm/launcher",
    "gcloud container clusters create x": "`launcher help first-cluster-job`",
    "gcloud auth login": "write the kubeconfig",
    "eksctl create cluster": "`launcher help first-cluster-job`",
    "aws eks update-kubeconfig": "write the kubeconfig",
    "git clone x": "code: . in a job ships its folder",
    "list --state running": "`jq`",
    "list --limit 3": "`jq`",
    "status digits --refresh": "-w repeats it",
    "pip install x": "type it without `launcher`",
    "checkpoint list digits": "`launcher status digits` names the newest checkpoint",
    "status --all": "`launcher list` shows every run and job",
    "logs digits --all": "-r all shows every process",
    "delete digits --wait=false": "unless --no-wait is given",
    "convert digits": "`launcher export digits --to DIR`",
    "top": "`launcher status NAME` shows the step",
    "top digits": "`launcher status digits` shows the step",
    "edit digits": "`launcher stop digits`",
    "scale digits --replicas 4": "`launcher stop digits`",
    "rollout restart digits": "`launcher submit JOB_FILE`",
    "port-forward digits 8080": "connect to 127.0.0.1:8080",
    "tunnel digits 8080": "`launcher port-forward digits PORT`",
    "config use-context other": "`kubectl config use-context CONTEXT`",
    "completion bash": "_LAUNCHER_COMPLETE=bash_source launcher",
    "explain": "`launcher list` shows the names.",
    "diff digits digits": "digits",
    "-n team-a list": "`launcher list -n team-a`",
    "--context kind list": "`launcher list --context kind`",
    "list -w -n": "requires an argument",
    "list -a": "obs in every state are listed",
    "list -l app=x": "`kubectl get jobsets -l KEY=VALUE`",
    "list -o name": "runs/digits\n",
    "list -o=name": "runs/digits\n",
    "list --no-headers": "-o name prints the names alone",
    "list nothing": "`launcher status nothing` shows one",
    "status -o=json digits": '"name": "digits"',
    "status job/digits": STATUS,
    "status jobset/digits": STATUS,
    "status run/digits": STATUS,
    "status": "`launcher list` shows the names.",
    "status digits digits": "`launcher status digits`, `launcher status digits`",
    "status digits.yaml": "`launcher status digits`",
    "stop digits other": "Run digits is not running",
    "stop digits -y": "It does not ask",
    "logs digits --timestamps": "-o json prints the time of each line",
    "logs digits -t": "-o json prints the time of each line",
    "logs digits -r 0": LOGGED,
    "logs digits -p": "there is no earlier start",
    "logs digits -n 20": "--tail 20",
    "logs digits -c main": "--rank N shows one process",
    "logs a b": "`launcher logs a`, `launcher logs b`",
    "logs": "`launcher list` shows the names.",
    "submit -f": "`launcher init` writes a first one.",
    "submit --filename digits.yaml": "`launcher submit digits.yaml`",
    "submit digits.yaml --dry-run": "jobset.x-k8s.io/v1alpha2",
    "submit digits.yaml --dry-run=client": "jobset.x-k8s.io/v1alpha2",
    "render digits.yaml -o json": '"kind": "List"',
    "render digits.yaml -o=json": '"kind": "List"',
    "validate digits.yml": "did you mean digits.yaml?",
    "validate digits": "did you mean digits.yaml?",
    "validate -": "-: ok",
    "validate env.yaml": "env.CACHE holds $HOME, which is not expanded",
    # --- Slurm, SkyPilot, xpk, Ray and Docker ---
    "ps": LISTED,
    "ps -a": "obs in every state are listed",
    "ls": LISTED,
    "ls .": "There are no runs in the folder .",
    "ls runs": LISTED,
    "ls runs/digits": STATUS,
    "squeue --me": "obs in every state are listed",
    "jobs": LISTED,
    "queue": LISTED,
    "squeue": LISTED,
    "squeue -u me": "obs in every state are listed",
    "sacct": LISTED,
    "scontrol show job digits": STATUS,
    "sinfo": "`launcher doctor JOB_FILE` checks",
    "sbatch digits.yaml": "`launcher render --slurm digits.yaml | sbatch` under",
    "sbatch --array=0-9 digits.yaml": "`launcher sweep digits.yaml train.seed=0..9`",
    "srun digits.yaml": RUN,
    "scancel digits": STOP,
    "cancel digits": STOP,
    "cancel -n team-a digits": STOP,
    "kill digits": STOP,
    "rm digits": DELETE,
    "down digits": DELETE,
    "up digits.yaml": SUBMIT,
    "launch digits.yaml": SUBMIT,
    "jobs launch digits.yaml": SUBMIT,
    "job submit digits.yaml": SUBMIT,
    "workload create digits.yaml": SUBMIT,
    "workload list": LISTED,
    "workload delete digits": DELETE,
    "cluster create": "launcher uses a cluster that exists",
    "cost": "launcher knows no prices",
    "cost-report": "launcher knows no prices",
    "autostop": "write deadline: 12h in the job",
    "ssh digits": "`launcher shell digits --rank N`",
    "attach digits": LOGGED,
    "history": LISTED,
    "inspect digits": EXPLAINED,
    "stats digits": "`launcher status digits` shows the step",
    "build .": "`docker build -t IMAGE .",
    "docker ps": LISTED,
    "docker logs digits": "leave the word out: `launcher logs digits`",
    "docker run image": "starts processes without a container",
    "docker build .": "`docker build -t IMAGE .",
    "run -it digits.yaml": "starts processes without a container",
    "run --rm digits.yaml": "starts processes without a container",
    "sky launch digits.yaml": SUBMIT,
    "exec mycluster digits.yaml": SUBMIT,
    "spot launch digits.yaml": "write capacity: spot",
    "xpk workload list": LISTED,
    "sacct -j digits": "`launcher status digits`",
    "sbatch --nodes=2 train.sh": "`command: [bash, train.sh]`",
    "srun -N 2 python train.py": PROGRAM,
    "run train.sh": "`command: [bash, train.sh]`",
    "run digits.yaml --array=0-9": "`launcher sweep digits.yaml",
    "submit digits.yaml --dependency=afterok:1": "submit A.yaml --wait",
    "wait digits": "`launcher logs -f digits`",
    "submit digits.yaml --gpus 8": "accelerator.per_host=VALUE",
    "submit digits.yaml --partition a": "queue=VALUE",
    "submit digits.yaml --job-name a": "name=VALUE",
    "submit digits.yaml --num-slices 2": "slices=VALUE",
    "submit digits.yaml --detach": "It returns at once",
    "submit digits.yaml --env A=b": "Write env.NAME=VALUE",
    # --- torchrun, trainers and trackers ---
    "train digits.yaml": RUN,
    "start digits.yaml": RUN,
    "digits.yaml": RUN,
    "train.py": PROGRAM,
    "python train.py": PROGRAM,
    "torchrun train.py": PROGRAM,
    "run train.py": PROGRAM,
    "run python train.py": PROGRAM,
    "run --nproc-per-node 2 train.py": PROGRAM,
    "run digits.yaml --nproc-per-node 2": "processes_per_host=VALUE",
    "run digits.yaml --nnodes=2": "hosts=VALUE",
    "run digits.yaml --master-addr a": "the launcher connects the hosts by itself",
    "run -m train": "`command: [python, -m, MODULE]`",
    "run --config digits.yaml": "`launcher run digits.yaml`",
    "run --config_file=digits.yaml": "The file has no option",
    "sweep digits.yaml --count 5": "--random N draws N",
    "tensorboard --logdir runs": "mlflow, tensorboard or trackio",
    "wandb sync digits": "write tracker: wandb in the job",
    "wandb agent x": "--random N draws",
    "run -f digits.yaml": "`launcher run digits.yaml`",
    "run digits.yaml --dry-run": "`launcher validate digits.yaml` checks it",
    "run digits.yaml -o yaml": "`launcher validate digits.yaml -o yaml`",
    "run digits.yaml --set hosts=2": "`launcher run digits.yaml KEY=VALUE`",
    "run digits.yaml --train.steps=3": "train.steps=VALUE",
    "run digits.yaml --batch-size 3": "train.batch=VALUE",
    "run digits.yaml --learning_rate 1": "train.optimizer.lr=VALUE",
    "run digits.yaml --lr 1": "train.optimizer.lr=VALUE",
    "run digits.yaml --detach": "`nohup launcher run digits.yaml &`",
    "run digits.yaml --resume": "`launcher run digits.yaml` of the same file resumes",
    "run": "`launcher init` writes a first one.",
    "resume digits.yaml": RESUME,
    "restart digits.yaml": RESUME,
    "check": "`launcher run JOB_FILE` trains on this machine without a cluster",
    "check digits.yaml": "digits.yaml: ok",
    "lint digits.yaml": "digits.yaml: ok",
    "test digits.yaml": "`launcher validate digits.yaml` checks a job",
    "doctor -v": "doctor, explain and logs show all that they know",
    "init --kind llm": "--kind lm",
    "init --kind pytorch": "--kind command",
    "new": "`launcher init NAME` writes a first job",
    "report digits.yaml": "`launcher report digits`",
    "doctor train.py": PROGRAM,
    "report digits --open": "It writes digits.html",
    "ui": "`launcher dashboard` serves the pages",
    "wandb": "write tracker: wandb in the job",
    "login": "write tracker: wandb in the job",
    "upload digits": "`launcher export digits --to DIR`",
    "agent": "--random N draws",
    "stat digits": STATUS,
    "status digits --json": "-o json prints JSON",
    "list --kubeconfig a": "KUBECONFIG=FILE launcher",
    "help OOM": "troubleshooting#out-of-memory",
    "help 'out of memory'": "troubleshooting#out-of-memory",
    "docs OOM": "troubleshooting#out-of-memory",
    "help wandb": "wandb",
    "upgrade": "`git pull && make venv` in a clone",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a job and its run, on a machine without a cluster."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    assert not kubeconfig.has_kubeconfig()
    (tmp_path / "digits.yaml").write_text(JOB + "image: registry.example/none\n")
    (tmp_path / "env.yaml").write_text(JOB + "env: {CACHE: $HOME/cache}\n")
    made_runs.run(tmp_path / "runs" / "digits", (0,), points=1)
    (tmp_path / "runs" / "digits" / ".lock").touch()
    logs = tmp_path / "runs" / "digits" / "starts" / "1" / "logs"
    logs.mkdir(parents=True)
    (logs / "rank-0.log").write_text("a line of it\n")
    return tmp_path


@contextlib.contextmanager
def redirect_stdin(file: IO[str]) -> Iterator[None]:
    """Give this process another stdin, also by the path /dev/stdin."""
    stdin = os.dup(0)
    try:
        os.dup2(file.fileno(), 0)
        yield
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)


def test_most_habits_are_tested() -> None:
    assert len(HABITS) >= 120
    assert not foreign_words.WORDS.keys() & COMMANDS.keys()


@pytest.mark.parametrize("line", HABITS)
def test_habit_is_answered(run_launcher: Launcher, folder: Path, line: str) -> None:
    with (folder / "digits.yaml").open() as file, redirect_stdin(file):
        result = run_launcher(*shlex.split(line))
    assert HABITS[line] in result.out + result.err
    assert "Did you mean" not in result.err and "Traceback" not in result.err


def test_every_answer_can_be_filled_in() -> None:
    answers = [*foreign_words.WORDS.values(), *foreign_words.OPTIONS.values()]
    for answer in answers:
        if isinstance(answer, foreign_words.Advice):
            text = habits._fill_in(answer, ["a b"], "run")
            assert "{name}" not in text and "{file}" not in text
        else:
            for words in filter(None, (answer.words, answer.with_name, answer.with_file)):
                assert words.split()[0] in {*COMMANDS, "--version"}


def test_second_words_of_commands_are_not_taken_for_habits() -> None:
    assert not [words for words in foreign_words.WORDS if words.split()[0] in COMMANDS]

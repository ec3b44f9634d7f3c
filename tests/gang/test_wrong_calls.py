"""Wrong calls of `launcher run` next to a finished run: one sentence, an exit code, no change.

What the launcher refuses is called in this process. What only the trainer can find is found by
wrong_specs.py, all in one process. Two of these are started as a user would, to see that a
refusal is printed once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.local import run as local
from tests.compiled import QUICK_COMPILES
from tests.found import shows
from tests.gang import wrong_specs
from tests.gang.runs import HERE, assert_success, digits_block, make_job, run_job
from tests.launcher.invoke import CommandResult, launcher

FileTree = dict[str, tuple[str, int]]

# Arguments behind `launcher run job.yaml --run-dir RUN`, and a part of the message. HERE stands for
# the job's folder.
LAUNCHER_REFUSALS: dict[str, tuple[list[str], str]] = {
    "an argument that is no key": (["job2.yaml"], "is not of the form key=value"),
    "a key without a name": (["=3"], "is not of the form key=value"),
    "a key with a hole": (["train..steps=3"], "is not of the form key=value"),
    "a key with dashes": (["--", "--steps=3"], "begins with a dash"),
    "an option that does not exist": (["--steps", "3"], "A key of the job has no dashes"),
    "an option without its value": (["--rank"], "requires an argument"),
    "bytes that are no text": (["name=\udcff"], "is not UTF-8"),
    "a control character": (["train.data.name=\x07"], "contains the control character 0x07"),
    "a bracket never closed": (["train.mesh={dp: 1"], "a bracket that is never closed"),
    "a key of another block": (["steps=3"], 'Did you mean "train.steps"?'),
    "a mistyped key": (["train.optimzer.lr=1"], 'Did you mean "optimizer"?'),
    "an entry of no list": (["volumes.0.path=/x"], "volumes has no entry 0."),
    "an entry of a text": (["name.first=x"], "name has no entry first."),
    "not a number": (
        ["train.optimizer.lr=.nan"],
        "train.optimizer.lr = .nan is not a finite number above 0.",
    ),
    "words for a number": (
        ["hosts=two"],
        "hosts = two is not a whole number above 0, or a block with the keys min, max.",
    ),
    "nothing for a block": (["accelerator="], "accelerator is empty"),
    "no program": (["train="], "neither train nor command is set"),
    "two programs": (["command=[python, train.py]"], "command and train are both set."),
    "two lengths": (["train.epochs=1"], "steps and epochs are both set"),
    "a name that is none": (["name=My_Run"], "write my-run."),
    "a schema of the future": (["schema=2"], "schema = 2 is not 1"),
    "a mesh of other devices": (["train.mesh.dp=3"], "train.mesh.dp = 3 does not divide 2 devices"),
    "a negative axis": (["train.mesh.mp=-2"], "an axis is a positive number of devices"),
    "a batch that does not divide": (["train.batch=7"], "train.batch = 7 is not divisible by dp 2"),
    "processes that do not divide": (
        ["processes_per_host=3"],
        "does not divide accelerator.per_host = 2",
    ),
    "a topology of a CPU": (["accelerator.topology=2x2"], "does not apply to cpu"),
    "hosts of GPUs": (["accelerator={type: h100}", "hosts=2"], "this machine is one host"),
    "a task without a colon": (["train.task=mine.tasks.Mine"], "write mine.tasks:Mine."),
    "a preset that does not exist": (
        ["train.model={kind: decoder, preset: lama-8b}"],
        'Did you mean "llama-8b"?',
    ),
    "a source that does not exist": (
        ["train.data={source: csv}"],
        "train.data.source = csv is not one of",
    ),
    "a source without its data": (["train.data={source: torch}"], "train.data.dataset is missing."),
    "an optimizer's key of another": (["train.optimizer.momentum=0.9"], "does not apply to adamw"),
    "an optimizer that does not exist": (["train.optimizer.name=adamx"], 'did you mean "adam"?'),
    "a schedule that does not exist": (
        ["train.optimizer.schedule=cosin"],
        'did you mean "cosine"?',
    ),
    "a group without a pattern": (
        ["train.optimizer.groups=[{freeze: true}]"],
        "groups.0.match is missing.",
    ),
    "a metric of training": (
        ["train.checkpoint.best={metric: loss}"],
        "is not a metric of an evaluation",
    ),
    "a metric of either way": (
        ["train.stop_early={metric: eval/accuracy, patience: 2}"],
        "needs mode for metric =",
    ),
    "a precision that does not exist": (
        ["train.precision=half"],
        "train.precision = half is not one of",
    ),
    "checkpoints over http": (
        ["train.checkpoint.path=http://host/x"],
        "is not a folder or a gs:// or s3:// URL.",
    ),
    "checkpoints nowhere": (
        ['train.checkpoint.path=""'],
        "is not a folder or a gs:// or s3:// URL.",
    ),
    "weights over http": (
        ["train.model={kind: gpt2, init_from: 'http://host/x'}"],
        "is not a folder or a gs:// or s3://",
    ),
    "a profile behind the end": (["train.profile.at=6"], "at = 6 is not below the 6 steps"),
    "no restarts as a word": (
        ["restarts.crash=none"],
        "restarts.crash = none is not a whole number",
    ),
    "a deadline that is no time": (["deadline=soon"], "deadline = soon is not a duration"),
    "a variable of ours": (["env.JAX_PROCESS_ID=1"], "env.JAX_PROCESS_ID is set by the launcher"),
    "a secret that is not set": (
        ["secrets={WRONG: {name: s, key: k}}"],
        "not set in the environment: WRONG",
    ),
    "code that is not there": (["code=nowhere"], "code: HERE/nowhere does not exist."),
    "a working folder that is not there": (
        ["workdir=nowhere"],
        "workdir: HERE/nowhere does not exist.",
    ),
    "a volume that is none": (["--volume", "data"], "--volume data is not NAME=DIR."),
    "a volume that the job has not": (
        ["--volume", "data=x"],
        "the job has no volume of that name.",
    ),
    "a volume that is a file": (
        ["volumes=[{claim: c, path: /c}]", "--volume", "c=HERE/job.yaml"],
        "is a file, not a",
    ),
    "a run folder that is a file": (["--run-dir", "HERE/job.yaml"], "it is a file, not a folder"),
    "a run folder below a file": (
        ["--run-dir", "HERE/job.yaml/run"],
        "HERE/job.yaml is a file, not a folder",
    ),
    "a run folder of the kernel's": (
        ["--run-dir", "/proc/run"],
        "The run folder /proc/run cannot be used: ",
    ),
    "a run folder over the job": (["--run-dir", "HERE"], "the run would overwrite job.yaml"),
    "the folder of another job": (["name=other"], "/run is that of job t, this job is other."),
    "the folder of a training for a program": (
        ["train=", "command=[ls]"],
        "with train:, this job has command:.",
    ),
    "a rank that is none": (["--rank", "first"], "--rank first is not a list of ranks."),
    "a rank that the job has not": (
        ["--rank", "7"],
        "--rank 7 does not exist: the only rank is 0.",
    ),
    "one of two ranks that the job has not": (
        ["--rank", "0,7"],
        "--rank 7 does not exist: the only rank is 0.",
    ),
    "ranks from right to left": (["--rank", "3-1"], "--rank 3-1 is not a list of ranks."),
}

# Files in place of the job's.
FILE_REFUSALS: dict[str, tuple[bytes | None, str]] = {
    "no file": (None, "no such file."),
    "an empty file": (b"", "is empty, not a block of keys."),
    "prose": (b"train the model\n", "is plain text, not a block of keys."),
    "another encoding": ("name: größe\n".encode("latin-1"), "is not UTF-8"),
    "keys deeper than a value": (b"name: t\n  hosts: 2\n", "look at this line's indentation"),
}

# What the trainer says of tests/gang/wrong_specs.py's.
TRAINER_REFUSALS: dict[str, tuple[int, str]] = {
    "another width": (
        78,
        "train.model.width was 32, the job says 9; change it back, or set checkpoint.path",
    ),
    "more layers": (78, "train.model.layers was 1, the job says 2"),
    "another kind of model": (78, "train.model.kind was mlp, the job says vit"),
    "another optimizer": (78, "was trained with adamw, the job says sgd"),
    "another group frozen": (78, "train.optimizer.groups was [], the job says"),
    "an average": (78, "train.optimizer.ema was null, the job says 0.9"),
    "half precision": (78, "train.precision was fp32, the job says fp16"),
    "another batch": (78, "train.batch is 32, but the checkpoints in"),
    "another seed": (78, "train.seed is 1, but the checkpoints in"),
    "no shuffling": (78, "train.data.shuffle is false, but the checkpoints in"),
    "fewer steps": (64, "train.steps = 3; step 6 is already saved in"),
    "other data": (65, "the training data changed"),
    "adapters of nothing": (
        64,
        "train.lora.targets: wq matches no linear layer of train.model.kind = gpt2; there are c_",
    ),
    "adapters for images": (
        64,
        "train.lora: applies to a decoder, gpt2 or transformers, and train.model.kind = mlp",
    ),
    "a task of no module": (
        64,
        "No module named 'nowhere'. `code: .` in job.yaml ships and imports",
    ),
    "a task that the module lacks": (64, "has no 'Clasify'. It defines Classify"),
    "a dataset of no module": (64, "importing no.where failed"),
    "a dataset that raises": (65, "cannot be built: KeyError: 'no such share'"),
    "a dataset with arguments it does not take": (65, "with args path cannot be built"),
    "items of two shapes": (65, "pad to one shape"),
    "text that no file matches": (65, "data.path 'nowhere/*.txt' matches no file"),
    "text files that are empty": (65, "every file that matches is empty"),
    "text with too small a vocabulary": (64, "train.model.vocab = 100 is less than the 256"),
    "text for images": (64, "texts without a label; give format: label"),
    "a csv as array_record": (65, "data.csv is not an array_record file"),
    "a mistyped dataset": (65, "did you mean digits?"),
    "a model of no module": (64, "importing nowhere failed"),
    "a model for other images": (64, "train.model takes images of image = [16, 16]"),
    "a language model for images": (64, "train.model.kind = gpt2 does not classify images"),
    "weights that are not there": (
        64,
        "train.model.init_from = nowhere: config.json cannot be read",
    ),
    "weights with half a config": (64, "train.model.init_from = half: config.json cannot be read"),
    "checkpoints in a file": (64, "train.checkpoint.path = data.csv cannot be written"),
    "checkpoints below a file": (
        64,
        "train.checkpoint.path = data.csv/checkpoints cannot be written",
    ),
    "a cache that is a file": (64, "train.compile_cache = data.csv is a file"),
    "a decay longer than the epochs": (64, "decay = 1000 do not fit in 32 steps"),
    "a profile behind the end": (64, "train.profile.at = 1000 is not below the 32 steps"),
    "a mesh of other devices": (64, "asks for 3 devices, there is 1"),
    "an optimizer that cannot be made": (64, "optax:adamw(learning_rate, b9) failed: TypeError"),
    "a best of no evaluation": (
        64,
        "no held-out data to evaluate; leave train.checkpoint.best out",
    ),
    "an end without evaluations": (
        64,
        "train.stop_early: needs evaluations during the run; set eval.every",
    ),
}


def read_tree(folder: Path) -> FileTree:
    """Return digest and modification time of every file below a folder, without locks."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
        )
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="module")
def finished_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a job with its finished run in `run`."""
    folder = tmp_path_factory.mktemp("finished")
    assert_success(run_job(folder, make_job(digits_block(steps=6))))
    return folder


@pytest.fixture
def assert_refused(
    finished_job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """Call `launcher run`, which must print one sentence, exit with 2, and change nothing."""

    def forbid_gang(*_: object, **__: object) -> None:
        raise AssertionError("it was not refused: its agents are started")

    monkeypatch.setattr(local, "Gang", forbid_gang)
    monkeypatch.chdir(finished_job)
    initial_tree = read_tree(finished_job)

    def call_run(*arguments: str, message: str) -> CommandResult:
        result = launcher(capsys, monkeypatch, "run", *arguments)
        assert (result.code, result.out) == (2, "")
        assert result.err.count(message.splitlines()[0]) == 1, result.err
        assert "Traceback" not in result.err
        assert read_tree(finished_job) == initial_tree
        return result

    return call_run


def test_every_wrong_spec_has_an_expected_refusal() -> None:
    assert len(LAUNCHER_REFUSALS) + len(FILE_REFUSALS) + len(TRAINER_REFUSALS) >= 60
    assert TRAINER_REFUSALS.keys() == (wrong_specs.RESUMED | wrong_specs.FRESH).keys()


@pytest.mark.parametrize("name", LAUNCHER_REFUSALS)
def test_wrong_call_is_refused(name: str, assert_refused: Any, finished_job: Path) -> None:
    arguments, message = LAUNCHER_REFUSALS[name]
    arguments_of_call = [argument.replace("HERE", str(finished_job)) for argument in arguments]
    assert_refused(
        "job.yaml",
        "--run-dir",
        "run",
        *arguments_of_call,
        message=message.replace("HERE", str(finished_job)),
    )


@pytest.mark.parametrize("name", FILE_REFUSALS)
def test_wrong_file_is_refused(name: str, assert_refused: Any, tmp_path: Path) -> None:
    content, message = FILE_REFUSALS[name]
    if content is not None:
        (tmp_path / "job.yaml").write_bytes(content)
    assert_refused(str(tmp_path / "job.yaml"), "--run-dir", "run", message=message)


def test_run_folder_in_use_is_refused(assert_refused: Any, finished_job: Path) -> None:
    with (finished_job / "run" / ".lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused("job.yaml", "--run-dir", "run", message="is in use by the run with pid")


@pytest.fixture(scope="module")
def refusals(finished_job: Path) -> dict[str, dict[str, Any]]:
    """Return what the trainer said of each wrong train block."""
    spec = digits_block(steps=6) | {"compile_cache": None}  # which may grow, whatever is refused
    environ = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent.parent)]),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        **QUICK_COMPILES,
    }
    initial_tree = read_tree(finished_job)
    result = subprocess.run(
        [sys.executable, HERE / "wrong_specs.py", finished_job / "run", json.dumps(spec)],
        env=environ,
        capture_output=True,
        text=True,
    )
    answers = [
        json.loads(line) for line in result.stdout.splitlines() if line.startswith('{"name"')
    ]
    assert len(answers) == len(TRAINER_REFUSALS), result.stderr[-2000:]
    assert read_tree(finished_job) == initial_tree
    return {answer["name"]: answer for answer in answers}


@pytest.mark.parametrize("name", TRAINER_REFUSALS)
def test_trainer_refusal_is_one_sentence_with_its_code(
    name: str, refusals: dict[str, dict[str, Any]]
) -> None:
    code, message = TRAINER_REFUSALS[name]
    assert (refusals[name]["code"], refusals[name]["traceback"]) == (code, False), refusals[name]
    assert message in refusals[name]["says"] and len(refusals[name]["says"].splitlines()) == 1


def test_trainer_refusals_are_on_the_troubleshooting_page(
    refusals: dict[str, dict[str, Any]],
) -> None:
    shows("the training data changed", refusals["other data"]["says"])
    shows("train.checkpoint.path = … cannot be written", refusals["checkpoints in a file"]["says"])
    shows("ModuleNotFoundError: No module named", refusals["a task of no module"]["says"])


# What the newest start writes, whatever comes of it.
FILES_OF_EVERY_START = {"summary.json", "agents.json", "attempts.jsonl", "ranks.json"}


@pytest.mark.parametrize("name", ["another optimizer", "GPUs that are not here"])
def test_refusal_is_printed_once_and_changes_no_other_file(
    name: str, finished_job: Path, tmp_path: Path
) -> None:
    """Start the job as a user does; the job, checkpoints, metrics and earlier starts must stay."""
    document = make_job(digits_block(steps=6, **wrong_specs.RESUMED.get(name, {})))
    code, message = TRAINER_REFUSALS.get(name) or (64, "the job asks for 8 GPUs, this machine")
    if name not in TRAINER_REFUSALS:
        document |= {"accelerator": {"type": "h100"}}
    (tmp_path / "run").symlink_to(finished_job / "run")
    initial_tree = read_tree(finished_job / "run")
    result = run_job(tmp_path, document)
    if name not in TRAINER_REFUSALS:
        shows("the job asks for 8 GPUs, this machine (…) has", result.stderr)
    output = result.stdout + result.stderr
    assert result.code == code, output
    assert output.count(message) == 1 and "Traceback" not in output and "Error" not in output, (
        output
    )
    final_tree = read_tree(finished_job / "run")
    own_folder = f"starts/{result.summary['starts'][-1]['start']}/"
    assert result.summary["starts"][-1]["last_step"] is None
    new = {
        path for path in final_tree if path.startswith(own_folder) or path in FILES_OF_EVERY_START
    }
    assert {path: final_tree[path] for path in final_tree.keys() - new} == {
        path: initial_tree[path] for path in initial_tree.keys() - FILES_OF_EVERY_START
    }

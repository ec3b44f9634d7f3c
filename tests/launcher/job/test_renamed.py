"""Names of version 0.1 are read, and a sentence gives the new one."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaults
from jaxlaunch.launcher.job import load
from jaxlaunch.launcher.job.load import JobSpec

HEAD = "name: x\naccelerator: {type: cpu}\n"
PROGRAM = HEAD + "command: [python, train.py]\n"
OLD_KEY = "budgets is now timeouts; the old name is read until version 0.3."
OLD_TASK = "train.task = trainer.tasks.lm:NextToken is now lm; the old name is read until version 0.3."


def read(folder: Path, text: str, *overrides: str) -> tuple[JobSpec, list[str]]:
    """The job, and what is said of its names."""
    path, said = folder / "job.yaml", list[str]()
    path.write_text(text)
    job = load.load(path, overrides, said.append)
    return job, [sentence.removeprefix(f"{folder}/") for sentence in said]


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (PROGRAM + "budgets: {step: 1m}\n", (), [f"job.yaml:4: {OLD_KEY}"]),
        (PROGRAM + "budgets: {step: 5m}\n", ("timeouts.step=1m",), [f"job.yaml:4: {OLD_KEY}"]),
        (PROGRAM, ("budgets={step: 1m}",), [f"budgets={{step: 1m}} (override): {OLD_KEY}"]),
        (
            PROGRAM + "timeouts: {step: 5m}\n",
            ("budgets.step=1m",),
            ["budgets.step=1m (override): budgets.step is now timeouts.step; the old name is read until version 0.3."],
        ),
        (PROGRAM + "timeouts: {step: 1m}\n", (), []),
    ],
)
def test_an_old_key_is_read_as_the_new_one(
    tmp_path: Path, text: str, overrides: tuple[str, ...], said: list[str]
) -> None:
    job, found = read(tmp_path, text, *overrides)
    assert (job.timeouts.step, found) == (60.0, said)
    assert "budgets" not in load.dump(job)


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        (HEAD + "train: {task: trainer.tasks.lm:NextToken}\n", (), [f"job.yaml:3: {OLD_TASK}"]),
        (
            HEAD + "train: {task: classify}\n",
            ("train.task=trainer.tasks.lm:NextToken",),
            [f"train.task=trainer.tasks.lm:NextToken (override): {OLD_TASK}"],
        ),
        (HEAD + "train: {task: lm}\n", (), []),
    ],
)
def test_an_old_value_is_read_as_the_new_one(
    tmp_path: Path, text: str, overrides: tuple[str, ...], said: list[str]
) -> None:
    job, found = read(tmp_path, text, *overrides)
    assert job.train is not None and (job.train.task, found) == ("lm", said)
    assert "task: lm\n" in load.dump(job)


def test_an_old_and_a_new_key_together_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JobFaults) as refused:
        read(tmp_path, PROGRAM + "timeouts: {step: 1m}\nbudgets: {step: 5m}\n")
    told = "budgets and timeouts are both given.\n  hint: keep timeouts, which is the new name of budgets."
    assert str(refused.value) == f"{tmp_path}/job.yaml:5: {told}"


def test_what_is_wrong_below_an_old_key_has_its_line_and_follows_the_sentence(tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "job.yaml").write_text(PROGRAM + "budgets:\n  step: fast\n  evaluation: 5m\n")
    with pytest.raises(JobFaults) as refused:
        load.load(tmp_path / "job.yaml", (), said.append)
    assert said == [f"{tmp_path}/job.yaml:4: {OLD_KEY}"]
    first, second = (fault.where for fault in refused.value.faults)
    assert (first, second) == (f"{tmp_path}/job.yaml:5", f"{tmp_path}/job.yaml:6")
    assert "timeouts.step = fast is not a duration" in str(refused.value)

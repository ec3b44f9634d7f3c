"""Where a shell of `command:` hides that a program failed."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.job.shell_notes import find_exit_code_notes, split_commands

PIPELINE, ALTERNATIVE = "because a pipeline", "counts as success"
BACKGROUND, SEQUENCE = "because `&` starts it", "the shell continues with"
LOOP = "for i in 0 1; do python train.py $i & done\nwait -n; code=$?; wait; exit $code"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("python train.py 2>&1 | tee log", PIPELINE),
        ("python train.py |& tee log", PIPELINE),
        ("(cd x; python train.py) 2>&1 | tee log", PIPELINE),
        ("A=1 exec python train.py \\\n --x | tee log", PIPELINE),
        ("for i in 1 2; do python train.py $i | tee log; done", PIPELINE),
        ("python train.py || true", ALTERNATIVE),
        ("python train.py || echo 'it failed'; exit 0", ALTERNATIVE),
        ("python train.py > log 2>&1 & wait", BACKGROUND),
        ("python train.py; echo done", SEQUENCE),
        ("python train.py &>log\nnvidia-smi", SEQUENCE),
        ("set -o pipefail; python train.py | tee log", None),
        ("set -euo pipefail; python train.py | tee log; date", None),
        ("python train.py > >(tee log) 2>&1", None),
        ("nvidia-smi | head -3 && exec python train.py", None),
        ("python train.py || python fallback.py", None),
        ("python train.py || exit 1", None),
        ("python train.py || { echo failed; exit 1; }", None),
        ("python train.py; code=$?; cp log /x; exit $code", None),
        ("python train.py & pid=$!; wait $pid", None),
        ("tensorboard --logdir x & python train.py", None),
        ("source venv/bin/activate; export A=1; ulimit -n 99; python train.py", None),
        ("echo 'a | b; c || true'; python train.py \"x | y\" `date` # | tee", None),
        (LOOP, None),
    ],
)
def test_lost_exit_codes_are_named(text: str, words: str | None) -> None:
    notes = list(find_exit_code_notes(["bash", "-c", text], lambda name: None))
    assert len(notes) == (words is not None)
    assert words is None or words in notes[0]


@pytest.mark.parametrize(
    ("command", "is_noted"),
    [
        (["python", "train.py | tee log"], False),
        (["sh", "-c", "python train.py | tee log"], True),
        (["/bin/bash", "-lc", "python train.py | tee log"], True),
        (["timeout", "60", "bash", "-c", "python train.py | tee log"], True),
        (["bash", "-o", "pipefail", "-c", "python train.py | tee log"], False),
        (["bash", "-ec", "python prepare.py; python train.py"], False),
        (["bash", "-c"], False),
        (["bash", "run.sh"], True),
        (["bash", "-e", "run.sh", "-c"], False),
        (["./run.sh"], True),
        (["bash", "absent.sh"], False),
        (["./program"], False),
    ],
)
def test_shell_is_recognized_by_its_arguments(command: list[str], is_noted: bool) -> None:
    files = {
        "run.sh": "#!/usr/bin/env bash\npython train.py\necho done\n",
        "./run.sh": "#!/bin/sh\npython train.py\necho done\n",
        "./program": "\x7fELF",
    }
    assert bool(list(find_exit_code_notes(command, files.get))) is is_noted


def test_text_is_split_at_operators_outside_of_quotes() -> None:
    text = 'a "b | c" && d $(e; f) | g & # h\n i || j ${k:-l;m}'
    assert split_commands(text) == [
        ('a "b | c"', "&&"),
        ("d $(e; f)", "|"),
        ("g", "&"),
        ("i", "||"),
        ("j ${k:-l;m}", ""),
    ]

"""`launcher sample --chat` on a terminal: each answer sees the previous turns."""

import json
import os
import pty
import re
import select
import subprocess
import time
from pathlib import Path

import pytest

from tests.compiled import QUICK_COMPILES
from tests.gang.runs import LAUNCHER, ROOT, digits_block, make_job, run_job, run_launcher
from tests.trainer.text import chat_corpora

pytestmark = [pytest.mark.computes, pytest.mark.extended]

LETTERS = "abcd"
DECODER = {
    "kind": "decoder",
    "layers": 2,
    "width": 32,
    "heads": 2,
    "hidden": 64,
    "length": 63,
    "vocab": 512,
}


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train on chats whose second answer repeats the first, which only both turns reveal."""
    folder = tmp_path_factory.mktemp("chat")
    # Turns end by another.
    path = folder / "tokenizer"
    tokenizer = chat_corpora.save_chat_tokenizer(path, chat_corpora.CHATML, eos_token="<|begin|>")
    turns = [("user", "{}"), ("assistant", "{0}{0}"), ("user", "again"), ("assistant", "{0}{0}")]
    chats = [
        [{"role": role, "content": text.format(letter)} for role, text in turns]
        for letter in LETTERS
    ] * 16
    data = {
        "source": "text",
        "format": "chat",
        "path": chat_corpora.write_lines(folder / "chats.jsonl", chats),
    }
    data |= {
        "tokenizer": tokenizer,
        "data_dir": str(folder / "prepared"),
        "packing": "none",
        "eval_split": 0,
    }
    train = digits_block(
        task="lm", model=DECODER, data=data, batch=16, steps=80, optimizer={"lr": 1e-2}
    )
    run = run_job(folder / "run", make_job(train, per_host=1))
    assert run.code == 0, run.stderr[-4000:]
    return run.folder


class Terminal:
    """A command on a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        ours, theirs = pty.openpty()
        environ = os.environ | QUICK_COMPILES | {"PYTHONPATH": str(ROOT), "TERM": "dumb"}
        self._ours, self.said = ours, ""
        self.process = subprocess.Popen(
            [*LAUNCHER, *arguments], env=environ, stdin=theirs, stdout=theirs, stderr=theirs
        )
        os.close(theirs)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def wait_until(self, pattern: str) -> str:
        """Return the output up to the pattern, since the last call."""
        deadline = time.monotonic() + 180
        while (match := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, self.said
            if select.select([self._ours], [], [], 1)[0]:
                try:
                    self.said += os.read(self._ours, 4096).decode(errors="replace")
                except OSError:  # the other end is closed
                    assert re.search(pattern, self.said), self.said
        text, self.said = self.said[: match.end()], self.said[match.end() :]
        return text.replace("\r\n", "\n")


def test_answers_see_the_previous_turns_until_ctrl_d(run_folder: Path) -> None:
    terminal = Terminal("sample", str(run_folder), "--chat", "--max-tokens", "16")
    terminal.wait_until("> $")
    for typed in ("c", "again"):
        terminal.type(f"{typed}\n")
        assert terminal.wait_until("\n> $").endswith("\ncc\n> ")
    terminal.type("\x04")
    assert "tokens of step 80 in" in terminal.wait_until(r"/s\r?\n")
    assert terminal.process.wait(60) == 0


def test_lines_of_a_file_are_answered_as_json(run_folder: Path) -> None:
    done = run_launcher(
        *("sample", run_folder, "--chat", "-o", "json", "--max-tokens", "8"), input="b\n\nagain\n"
    )
    assert done.returncode == 0, done.stderr
    messages = json.loads(done.stdout)["messages"]
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "b"),
        ("assistant", "bb"),
        ("user", "again"),
        ("assistant", "bb"),
    ]

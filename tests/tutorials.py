"""What a page of docs/ lets its reader do: files that it shows, commands, and their output."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK = re.compile(r"\n\n```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_NAMED = re.compile(r"[Ss]ave this\s+as\s+`([\w.-]+)`")
_NUMBER = re.compile(r"\b\d[\d.,]*(e[-+]\d+)?k?\b")


class Step(NamedTuple):
    """Save `text` as `file`, or run the commands `text`, which print `output` among other lines."""

    file: str | None
    text: str
    output: str = ""


def find_steps(page: str, shell: str = "sh") -> list[Step]:
    """Yield the steps of a page in order, and of its commands those in blocks of language `shell`.

    `sh` are those that any machine can run; `bash` (README: `sh cluster`) are for a cluster, or for
    reading alone. A block without a language is the output of the commands above it in its section,
    whatever else is between them.
    """
    done: list[Step] = []
    # Where the text after the last block begins; whether this section has run a command.
    paragraph, ran = (0, False)
    for block in _BLOCK.finditer(page):
        language, text = block["language"], block["text"]
        between = page[paragraph : block.start("language")]
        file_names, paragraph = _NAMED.findall(between), block.end()
        ran = ran and not _HEADING.search(between)
        if language == "" and ran and not done[-1].output:
            done[-1] = done[-1]._replace(output=text)
        elif language in ("sh", "bash"):
            done += [Step(None, text)] if language == shell else []
            ran = language == shell
        elif language in ("python", "yaml", "json") and file_names:
            done.append(Step(file_names[-1], text))
            ran = False
    return done


def missing_lines(shown: str, printed: str) -> Iterator[str]:
    """Yield lines of a page that a command did not print; numbers and folders may differ."""
    printed = _NUMBER.sub("0", printed)
    for line in shown.splitlines():
        if not all(_NUMBER.sub("0", part) in printed for part in line.split("…")):
            yield line

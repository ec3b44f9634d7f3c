"""What a page of docs/ has its reader do: files that it shows, commands, and the output that they have. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

_BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"[Ss]ave this\s+as\s+`([\w.-]+)`")
_NUMBER = re.compile(r"\b\d[\d.,]*(e[-+]\d+)?k?\b")


class Step(NamedTuple):
    """Something to do: save `text` as `file`, or run the commands `text`, which print `output` among other lines."""

    file: str | None
    text: str
    output: str = ""


def steps(page: str) -> list[Step]:
    """The steps of a page in their order. Blocks of other languages (`sh cluster`) are for reading alone."""
    done: list[Step] = []
    paragraph = 0
    for block in _BLOCK.finditer(page):
        language, text = block["language"], block["text"]
        named = _NAMED.findall(page[paragraph : block.start("language")])
        paragraph = block.end()
        if language == "" and done and done[-1].file is None and not done[-1].output and not block["before"].strip("`"):
            done[-1] = done[-1]._replace(output=text)
        elif language == "sh":
            done.append(Step(None, text))
        elif language in ("python", "yaml", "json") and named:
            done.append(Step(named[-1], text))
    return done


def missing(shown: str, printed: str) -> Iterator[str]:
    """The lines that a page shows and a command did not print; numbers and folders (…) may differ."""
    printed = _NUMBER.sub("0", printed)
    for line in shown.splitlines():
        if not all(_NUMBER.sub("0", part) in printed for part in line.split("…")):
            yield line

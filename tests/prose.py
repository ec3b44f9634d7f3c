"""Lint all that users read with proselint: `python -m tests.prose`, part of `make check`.

The texts are those of tests/messages.py without their code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator

from proselint.checks import __register__
from proselint.config import DEFAULT
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.messages import texts

# Not of technical text: curly quotes, accents of loanwords, advice on dates, legal and medical
# words.
LEFT_OUT = (
    "typography",
    "needless_variants",
    "dates_times",
    "psychology",
    "restricted",
    "lexical_illusions",
)
# Kubernetes' "allocatable", found in "for every", found in "multiply-add"
OURS = ("'allocable'", "'for ever'", "ending in -ly")
_TWICE = re.compile(
    r"\b(a|an|and|are|as|be|by|for|from|has|in|is|it|not|of|on|or|that|the|this|to|with)[ "
    r"\t]*\n?[ \t]*\b\1\b",
    re.I,
)


def find_faults(named_texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yield proselint's faults and repeated words as `NAME:LINE: …`, in one slow pass."""
    CheckRegistry().register_many(__register__)
    checks = {check: check not in LEFT_OUT for check in DEFAULT["checks"]}
    lines = [
        (f"{name}:{at}", line)
        for name, text in named_texts
        for at, line in enumerate((*text.splitlines(), ""), 1)
    ]
    whole = "\n".join(line for _, line in lines)
    for result in LintFile("texts", whole).lint(
        {**DEFAULT, "max_errors": sys.maxsize, "checks": checks}
    ):
        if not any(term in result.check_result.message for term in OURS):
            yield f"{lines[result.pos[0] - 1][0]}: {result.check_result.message}"
    for match in _TWICE.finditer(whole):
        yield f"{lines[whole.count(chr(10), 0, match.start())][0]}: {match[0]!r} is written twice"


if __name__ == "__main__":
    sys.exit("\n".join(find_faults(texts())) or 0)

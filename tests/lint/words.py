"""Words that users meet: plain technical English, and one word for one thing (docs/glossary.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

# A pattern -> what to write instead. Each is unusual English, or a second word for a term of the
# glossary.
FORBIDDEN: Mapping[str, str] = {
    r"mend(s|ed|ing)?": "fix",
    r"for want of": "because … is missing",
    r"(?<!there )(is|are) no (?!longer|more)": "is not a",
    r"go(es)? on|went on": "continue, resume",
    r"can(not)? be had": "is (not) available",
    r"look(s|ing)? on|onlooker": "view, viewer",
    r"(yours|theirs) to": "you (they) can, or must",
    r"stand(s|ing)? in|stand(s|ing)? "
    r"(above|below|beside|there|in the place)": "replaces, is, supplies defaults for",
    r"lie(s)?|lay": "is, is placed",
    r"(is|are|was|were|and) said": "is reported",
    r"in (one|a) sentence": "with an error",
    r"rehears\w*": "dry run",
    r"once more": "again",
    r"comes? by": "reaches, arrives",
    r"unasked": "by default, without being asked",
    r"anew": "again",
    r"talks? (to|by|between)": "connects to, communicates over, is between",
    r"shared out": "distributed",
    r"meant for": "designed for, for",
    r"beside": "next to (a place), in addition to",
    r"who(so)?ever": "anyone who, the user who",
    r"one's own": "your own",
    r"thereof|therein|whence|hence|hitherto|lest|ere": "plain words",
    r"(?<!virtual-time-)budgets?(?! is now timeouts)": "timeouts of phases, or restart limits",
    # It is a value of restarts.codes.
    r"(un)?charged(?!-new-pods|, free-|: like)": "(does not) count toward the limit",
    r"verdicts?": "job result; `verdict` only as the name of the field",
    r"(?<!TPU )(?<!Ada )generations?(?! of (TPU|text))": "JobSet restart; `generation` only as the "
    "name of the field",
}
PATTERNS = {
    re.compile(rf"\b({pattern})\b", re.IGNORECASE): instead
    for pattern, instead in FORBIDDEN.items()
}


def faults(name: str, text: str) -> Iterator[str]:
    """Yield the lines of a text that have a forbidden word."""
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, instead in PATTERNS.items():
            if (match := pattern.search(line)) is not None:
                yield f"{name}:{number}: {match[0]!r}: write {instead}: {line.strip()[:160]}"

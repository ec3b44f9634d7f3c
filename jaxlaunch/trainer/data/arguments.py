"""What is kept of the arguments of a user's dataset: a digest of each value, by its key. Pure.

A checkpoint, a log and a verdict have more readers than the job, and an argument may be a token.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

DIGITS = 12  # hexadecimal ones of a digest
_MARK = "args sha256 "
_KEPT = re.compile(rf"{_MARK}(\{{[^{{}}]*\}})")


def told(args: Mapping[str, Any]) -> str:
    """The arguments in a fingerprint: equal where all of them are, and without any of their values."""
    return f"{_MARK}{json.dumps(dict(_digests(args)), sort_keys=True)}" if args else "args {}"


def changed(then: Any, now: Any) -> list[str]:
    """The keys whose values differ between two fingerprints, nested ones dotted."""
    before, after = _kept(then), _kept(now)
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


def _kept(fingerprint: Any) -> dict[str, str]:
    found = _KEPT.search(fingerprint) if isinstance(fingerprint, str) else None
    return {} if found is None else json.loads(found[1])


def _digests(args: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    for key, value in args.items():
        if isinstance(value, Mapping) and value:
            yield from _digests(value, f"{above}{key}.")
        else:
            written = json.dumps([f"{above}{key}", value], sort_keys=True, default=repr)
            yield f"{above}{key}", hashlib.sha256(written.encode(errors="surrogatepass")).hexdigest()[:DIGITS]

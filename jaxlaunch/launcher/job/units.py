"""Amounts with a unit, as a job writes them.

Durations: `90s`, `10m`, `1h30m`, `3d`; a bare integer is seconds. Quantities are Kubernetes' own: `8`, `500m`, `32Gi`,
`1.5T`, kept as written, because the API server reads them itself. Source: kubernetes.io, "Quantity" in the API
conventions: suffixes n u m, k M G T P E, Ki Mi Gi Ti Pi Ei.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainSerializer, WithJsonSchema
from pydantic_core import PydanticCustomError

from jaxlaunch.launcher.job.introspection import Words
from jaxlaunch.launcher.kubernetes.resources import SUFFIXED, parse_quantity
from jaxlaunch.launcher.wording import duration

_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_SPELLED = r"s|secs?|seconds?|m|mins?|minutes?|h|hrs?|hours?|d|days?|w|wks?|weeks?"
_LONGEST_S = 2**31 - 1  # Kubernetes keeps some of them in 32 bits
_DURATION = re.compile(r"(?:([0-9]{1,6})d)?(?:([0-9]{1,6})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,9})s)?")


def seconds(value: Any) -> float:
    """The seconds of `90s`, `1h30m` or a bare integer. Raises ValueError for anything else, zero and less too."""
    total = 0
    if isinstance(value, int) and not isinstance(value, bool):
        total = value
    elif isinstance(value, str) and (match := _DURATION.fullmatch(value)):
        total = sum(int(count or 0) * unit for count, unit in zip(match.groups(), _SECONDS.values(), strict=True))
    if not 0 < total <= _LONGEST_S:
        raise PydanticCustomError("duration", "not a duration")
    return float(total)


def _meant_duration(written: str) -> str | None:
    """What `10 min` or `1.5h` means. Nothing is rounded, and a capital M may be of anything."""
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)\s*([a-z]+)", written.strip().lower())
    if match is None or not re.fullmatch(_SPELLED, match[2]) or written.strip().endswith("M"):
        return None
    total = Decimal(match[1]) * (_SECONDS | {"w": 604800})[match[2][0]]
    return f"write {duration(float(total))}." if total == int(total) and 0 < total <= _LONGEST_S else None


Duration = Annotated[
    float,
    BeforeValidator(seconds),
    Words("a duration above 0, such as 90s, 10m, 12h or 3d", _meant_duration),
    PlainSerializer(duration, return_type=str),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": r"^(\d+d)?(\d+h)?(\d+m)?(\d+s)?$"}, {"type": "integer"}]}),
]


def _written(value: Any) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not SUFFIXED.fullmatch(text) or parse_quantity(text) == 0:
        raise PydanticCustomError("quantity", "not a quantity")
    return text


def _meant_quantity(written: str) -> str | None:
    """What `32GB` or `32 gib` seems to mean."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*([kmgtp])(i?)b?", written.strip().lower())
    if match is None:
        return None
    letter = match[2].upper()
    if match[3]:
        return f"write {match[1]}{letter}i."
    return f"write {match[1]}{letter}i for 1024s, or {match[1]}{'k' if letter == 'K' else letter} for 1000s."


Quantity = Annotated[
    str,
    BeforeValidator(_written),
    Words("a Kubernetes quantity above 0, such as 8, 500m or 32Gi", _meant_quantity),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": rf"^{SUFFIXED.pattern}$"}, {"type": "number"}]}),
]

"""Scalars of YAML 1.2's core schema. YAML 1.1, which PyYAML implements, reads `no` as false and `12:30` as 750.

Source: yaml.org/spec/1.2.2, section 10.3.2.
"""

from __future__ import annotations

import math
import re

Scalar = str | int | float | bool | None

_CONSTANTS: dict[str, Scalar] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_TWO_READINGS = re.compile(r"[-+]?0[0-9]+")
_LONGEST_INTEGER = 40  # digits; int() takes quadratic time, and no value of a job is larger


def resolve(text: str) -> Scalar:
    """The value of a plain scalar. Raises ValueError for a number that is not finite or too long."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INTEGER.fullmatch(text):
        if len(text) > _LONGEST_INTEGER:
            raise ValueError(f"is a number of {len(text)} digits")
        return int(text, 0 if text.startswith(("0o", "0x")) else 10)
    if _NOT_FINITE.fullmatch(text):
        raise ValueError("is not a finite number")
    if _FLOAT.fullmatch(text):
        number = float(text)
        if not math.isfinite(number):
            raise ValueError("is too large for a number")
        return number
    return text


def is_not_finite(text: str) -> bool:
    """Whether it is one of YAML's numbers that no job may have: .inf, -.inf or .nan."""
    return _NOT_FINITE.fullmatch(text) is not None


def has_two_readings(text: str) -> bool:
    """Whether readers disagree: 010 is 10 in YAML 1.2, and 8 in YAML 1.1, which most Kubernetes tools use."""
    return _TWO_READINGS.fullmatch(text) is not None

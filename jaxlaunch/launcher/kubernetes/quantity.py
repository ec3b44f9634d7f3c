"""Quantities as numbers: 32Gi is 34359738368. Pure."""

from __future__ import annotations

import re
from decimal import Decimal

_SCALE = (
    {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
    | {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)}
    | {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
)
SUFFIXED = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(" + "|".join(_SCALE) + ")")  # all that a job may write
# What else the API server takes: signs, exponents, no digit before or after the point. The client's parser takes more,
# such as NaN and 1_000.
_QUANTITY = re.compile(r"[+-]?([0-9]{1,18}\.?[0-9]{0,9}|\.[0-9]{1,9})([eE][+-]?[0-9]{1,2}|" + "|".join(_SCALE) + ")")


def amount(text: str) -> Decimal:
    """The number that a quantity stands for, in any form that the API server takes: 32Gi, 500m, 1e12.

    Raises ValueError when it is none.
    """
    if match := SUFFIXED.fullmatch(text):
        return Decimal(match[1]) * _SCALE[match[2]]
    if not _QUANTITY.fullmatch(text):
        raise ValueError(f"{text} is not a quantity")
    from kubernetes.utils.quantity import parse_quantity  # imports the whole client, which `render` never needs

    return Decimal(parse_quantity(text))

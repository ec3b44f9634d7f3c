"""Kubernetes quantities: `8`, `500m`, `32Gi`, `1.5T`. Kept as written, because the API server reads them itself.

Source: kubernetes.io, "Quantity" in the API conventions: suffixes n u m, k M G T P E, Ki Mi Gi Ti Pi Ei.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from launcher.keys import Words

_SCALE = (
    {"n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"), "": Decimal(1)}
    | {letter: Decimal(1000) ** power for power, letter in enumerate("kMGTPE", start=1)}
    | {f"{letter}i": Decimal(1024) ** power for power, letter in enumerate("KMGTPE", start=1)}
)
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)(" + "|".join(_SCALE) + ")")


def amount(text: str) -> Decimal:
    """The number a quantity stands for: 32Gi is 34359738368. Raises ValueError when it is none."""
    match = _QUANTITY.fullmatch(text)
    if match is None:
        raise PydanticCustomError("quantity", "not a quantity")
    return Decimal(match[1]) * _SCALE[match[2]]


def _written(value: Any) -> str:
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or amount(text) == 0:
        raise PydanticCustomError("quantity", "not a quantity")
    return text


def _suggest(written: str) -> str | None:
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
    Words("a Kubernetes quantity above 0, such as 8, 500m or 32Gi", _suggest),
    WithJsonSchema({"anyOf": [{"type": "string", "pattern": rf"^{_QUANTITY.pattern}$"}, {"type": "number"}]}),
]

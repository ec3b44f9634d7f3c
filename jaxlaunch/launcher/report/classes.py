"""What an evaluation found out about the classes of a run, for the page: confusion, rates, calibration, the worst.

The training and `launcher eval` write the file, and others may. One that does not hold exactly what they write is left
out as a whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxlaunch import contract, regular_files
from jaxlaunch.launcher.wording import visible

FILE = contract.CLASSIFICATION
_MOST_BYTES = 4 << 20
_MOST_CLASSES, _MOST_SQUARE, _MOST_PAIRS, _MOST_BINS, _MOST_WORST = 1000, 50, 100, 100, 100
_LABEL, _WHERE = 120, 300  # characters
_RATES = ("precision", "recall", "f1")


def of(folder: Path) -> dict[str, Any] | None:
    """The file of a run as the page takes it; None where there is none, or none of this form."""
    try:
        text = regular_files.read(folder / FILE, _MOST_BYTES + 1, below=folder)
        return _checked(json.loads(text)) if len(text) <= _MOST_BYTES else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None


def _checked(found: Mapping[str, Any]) -> dict[str, Any]:
    classes = [_rates(one) for one in _list(found["per_class"], _MOST_CLASSES)]
    calibration = found["calibration"]
    return {
        "step": _count(found["step"]),
        "ema": found["ema"] is True,
        "examples": _count(found["examples"]),
        "top1": _share(found["top1"]),
        "top5": _share(found.get("top5")),
        "macro_f1": _share(found["macro"]["f1"]),
        "classes": _count(found["classes"]),
        "per_class": classes,
        "confusion": _square(found["confusion"], len(classes)) if "confusion" in found else None,
        "confused": [_pair(one) for one in _list(found.get("confused", []), _MOST_PAIRS)],
        "ece": _share(calibration["ece"]),
        "bins": [_bin(one) for one in _list(calibration["bins"], _MOST_BINS)],
        "worst": [_worst(one) for one in _list(found["worst"], _MOST_WORST)],
    }


def _rates(one: Mapping[str, Any]) -> dict[str, Any]:
    return {"label": _text(one["label"]), "examples": _count(one["examples"])} | {
        key: _share(one[key]) for key in _RATES
    }


def _square(found: Any, classes: int) -> list[list[int]]:
    """Examples by label (rows) and by what they are called."""
    square = [[_count(each) for each in _list(row, _MOST_SQUARE)] for row in _list(found, _MOST_SQUARE)]
    if {len(square), *map(len, square)} != {classes}:
        raise ValueError("a confusion matrix of other classes")
    return square


def _pair(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "label": _text(one["label"]),
        "predicted": _text(one["predicted"]),
        "examples": _count(one["examples"]),
    }


def _bin(one: Mapping[str, Any]) -> dict[str, Any]:
    shares = {key: _share(one[key]) for key in ("confidence", "accuracy")} if one["examples"] else {}
    return {"examples": _count(one["examples"]), **shares}


def _worst(one: Mapping[str, Any]) -> dict[str, Any]:
    where = one["where"]
    return {
        "where": f"example {_count(one['example'])}" if where is None else _text(where, _WHERE),
        "label": _text(one["label"]),
        "predicted": _text(one["predicted"]),
        "confidence": _share(one["confidence"]),
        "loss": None if one["loss"] is None else _number(one["loss"], 1e300),
    }


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"no list of at most {most}")
    return value


def _text(value: Any, most: int = _LABEL) -> str:
    if not isinstance(value, str):
        raise ValueError("no text")
    return visible(value[:most])


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**53:
        raise ValueError("no count")
    return value


def _share(value: Any) -> float | None:
    """A number from 0 to 1, as four digits; means of rounded numbers may be a little above 1."""
    return None if value is None else min(1.0, _number(value, 1.001))


def _number(value: Any, most: float) -> float:
    if type(value) not in (int, float) or not 0 <= value <= most:
        raise ValueError("no such number")
    return float(f"{value:.4g}")

"""Labels as people write them, as numbers: names of classes, and whole numbers from 0 on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.errors import DataError

Label = str | int
MOST_SAID = 5


def numbered(
    labels: Sequence[Label], classes: Sequence[Label] | None, where: str
) -> tuple[npt.NDArray[np.int32], tuple[str, ...]]:
    """Each label as its number, and the names of the classes in their order; whole numbers have no names.

    `classes` are those that there are to be. Raises DataError for others, for names that differ in case alone, and for
    numbers with gaps.
    """
    found = set(labels)
    if classes is None and all(isinstance(label, int) for label in found):
        _check_numbers({int(label) for label in found}, where)
        return np.asarray(labels, np.int32), ()
    if classes is None:
        classes = names = sorted(map(str, found))
        check_case(names, where)
    number = {str(name): at for at, name in enumerate(classes)}
    unknown = sorted({str(label) for label in found} - number.keys())
    if unknown:
        raise DataError(
            f"{where}: {said('label', unknown)} not among the {len(number)} classes ({listed(list(number))}); "
            "leave those out, or name them in data.classes"
        )
    return np.fromiter((number[str(label)] for label in labels), np.int32, len(labels)), tuple(number)


def whole(label: Label) -> Label:
    """A label that is a whole number by its digits, as that number."""
    digits = label.removeprefix("-") if isinstance(label, str) else ""
    return int(label) if digits.isascii() and digits.isdecimal() and len(digits) < 10 else label


def check_case(classes: Sequence[str], where: str) -> None:
    """Raises DataError for two names that differ in case or in white space alone."""
    known: dict[str, str] = {}
    for name in classes:
        other = known.setdefault(" ".join(name.casefold().split()), name)
        if other != name:
            raise DataError(f"{where}: the classes {other!r} and {name!r} differ only in case or spaces; use one name")


def _check_numbers(found: set[int], where: str) -> None:
    lacking = sorted(set(range(max(found) + 1)) - found)[:MOST_SAID] if found and max(found) < 2**24 else []
    if min(found, default=0) < 0 or max(found, default=0) >= 2**24:
        raise DataError(
            f"{where}: the label {min(found) if min(found) < 0 else max(found)} is not the number of a class"
        )
    if lacking:
        raise DataError(
            f"{where}: the labels are whole numbers up to {max(found)}, without {listed(lacking)}; number the classes "
            "from 0, or list the labels in data.classes"
        )


def said(what: str, names: Sequence[Label]) -> str:
    """`label 'a' is`, `labels 'a', 'b' are`."""
    return f"the {what} {listed(names)} is" if len(names) == 1 else f"the {what}s {listed(names)} are"


def listed(names: Sequence[Label]) -> str:
    """The first names."""
    more = f" and {len(names) - MOST_SAID} more" if len(names) > MOST_SAID else ""
    return ", ".join(map(repr, names[:MOST_SAID])) + more

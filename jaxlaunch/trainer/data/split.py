"""Which items are held out for evaluation: a seeded hash of the identity of each.

An item is held out if the hash of its identity is below a share of all 64-bit numbers. So its side
depends on itself, the share and the seed alone: it is the same on every host and after a resume,
and it stays where it is while others are added before or behind it. Items with one identity, such
as copies and the members of a group, are on the same side.

A rule for each item alone may leave nothing of a small class on one side. Therefore the item with
the highest hash is trained on where a class would have none to train on, and that with the lowest
is held out where the share of a class is one item or more and none was drawn. Only such items
change sides when others of their class are added.

N items, U units of one identity each, P pairs of a class and a unit, C classes.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data.order import hash_uint64
from jaxlaunch.trainer.errors import DataError

Keys = npt.NDArray[np.uint64]
Mask = npt.NDArray[np.bool_]

# The increment of splitmix64.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HASH_RANGE = 2**64
# Bytes at the beginning and the end of an image or a file that identify its content, together with
# its size.
SAMPLE_BYTES = 4096
# Number of classes that are named in a message.
MAX_NAMES = 5


class SplitPart(NamedTuple):
    """The items of a split: the k-th is item `index_K[k]` of all."""

    index_K: npt.NDArray[np.int64]
    label: str

    def pick(self, number: int) -> int:
        """Return the index of an item of the split among all."""
        return int(self.index_K[number])


def hash_bytes(data: bytes) -> int:
    """Return 64 bits of the BLAKE2 hash of the data."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_text(text: str) -> int:
    """Return the hash of a text, which need not be valid UTF-8."""
    return hash_bytes(text.encode(errors="surrogatepass"))


def hash_value(value: Any) -> int:
    """Return the hash of a value of JSON or of a table.

    7, 7.0 and "7" are equal, and so are a key without a value, as Parquet adds it, and no key.
    """
    if isinstance(value, bytes):
        return hash_bytes(value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list | dict):
        return hash_text(json.dumps(_drop_nulls(value), sort_keys=True, default=str))
    return hash_text(str(value))


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _drop_nulls(item) for key, item in value.items() if item is not None}
    return [*map(_drop_nulls, value)] if isinstance(value, list) else value


def rank_keys(key_N: Keys, seed: int) -> Keys:
    """Return the hash of seed and identity that decides on which side an item is."""
    seed_hash = hash_uint64(np.array([seed], np.uint64), GOLDEN)
    return hash_uint64(key_N ^ seed_hash, GOLDEN)


def held_out_limit(share: float, lowest: int, highest: int) -> int:
    """Return the limit below which a rank is held out, for items with ranks in this range.

    At least one item is on each side if there are two ranks; a single one is trained on.
    """
    if not share or lowest >= highest:
        return 0
    return min(max(int(share * HASH_RANGE), lowest + 1), highest)


def choose_held_out(
    key_N: Keys,
    share: float,
    seed: int,
    class_N: npt.NDArray[Any] | None = None,
    *,
    has_groups: bool = False,
    max_copies: int | None = None,
) -> Mask:
    """Return for each item whether it is held out, from the hashes of their identities.

    `class_N` are the classes of the items, if they are known. Items with one hash are on one side,
    except that copies are divided where a class has nothing else (unless `has_groups`), and beyond
    each `max_copies` of them.
    """
    if not share or not len(key_N):
        return np.zeros(len(key_N), bool)
    classes, number_N = np.unique(
        np.zeros(len(key_N)) if class_N is None else class_N, return_inverse=True
    )
    if not has_groups:
        key_N = _divide_copies(key_N, number_N, share, max_copies)
    unit_U, unit_N = np.unique(key_N, return_inverse=True)
    rank_U = rank_keys(unit_U, seed)
    if class_N is None:
        limit = held_out_limit(share, int(rank_U.min()), int(rank_U.max()))
        return np.asarray((rank_U < np.uint64(limit))[unit_N], bool)
    is_held_out_U = rank_U < np.uint64(int(share * HASH_RANGE))
    is_held_out_N = is_held_out_U[unit_N]
    held_out_C = np.bincount(number_N[is_held_out_N], minlength=len(classes))
    if not held_out_C.all() or (held_out_C == np.bincount(number_N)).any():
        _cover_classes(is_held_out_U, rank_U, number_N, unit_N, share)
    return np.asarray(is_held_out_U[unit_N], bool)


def _divide_copies(
    key_N: Keys, class_N: npt.NDArray[np.int64], share: float, max_copies: int | None
) -> Keys:
    """Return other hashes for copies that may be divided. The first ones keep theirs."""
    unit_U, unit_N, count_U = np.unique(key_N, return_inverse=True, return_counts=True)
    if len(unit_U) == len(key_N):
        return key_N
    order_N = np.argsort(unit_N, kind="stable")
    copy_N = np.empty(len(key_N), np.uint64)
    copy_N[order_N] = np.arange(len(key_N)) - (np.cumsum(count_U) - count_U)[unit_N[order_N]]
    classes = int(class_N.max()) + 1
    first_C = np.full(classes, -1)
    first_C[class_N] = unit_N
    is_single_C = np.ones(classes, bool)
    is_single_C[class_N[unit_N != first_C[class_N]]] = False
    is_single_C &= (np.bincount(class_N) * share >= 1) | (classes == 1)
    block_N = copy_N // np.uint64(max_copies or len(key_N))
    block_N = np.where(is_single_C[class_N], copy_N, block_N)
    return np.where(block_N > 0, hash_uint64(key_N ^ block_N, GOLDEN), key_N)


def _cover_classes(
    is_held_out_U: Mask,
    rank_U: Keys,
    class_N: npt.NDArray[np.int64],
    unit_N: npt.NDArray[np.int64],
    share: float,
) -> None:
    """Move units of classes that lack one on a side; in `is_held_out_U`."""
    units, classes = len(rank_U), int(class_N.max()) + 1
    class_P, unit_P = np.divmod(np.unique(class_N.astype(np.int64) * units + unit_N), units)
    class_starts = np.searchsorted(class_P, np.arange(classes + 1))
    by_unit_P = np.argsort(unit_P, kind="stable")
    unit_starts = np.searchsorted(unit_P[by_unit_P], np.arange(units + 1))
    is_held_out_P = is_held_out_U[unit_P]
    trained_C = np.bincount(class_P[~is_held_out_P], minlength=classes)
    held_out_C = np.bincount(class_P[is_held_out_P], minlength=classes)

    def ranked_units(number: int) -> npt.NDArray[np.int64]:
        members = unit_P[class_starts[number] : class_starts[number + 1]]
        return np.asarray(members[np.argsort(rank_U[members])])

    def unit_classes(unit: int) -> npt.NDArray[np.int64]:
        return np.asarray(class_P[by_unit_P[unit_starts[unit] : unit_starts[unit + 1]]])

    for number in np.flatnonzero(trained_C == 0).tolist():
        if not trained_C[number]:
            unit = int(ranked_units(number)[-1])
            is_held_out_U[unit] = False
            trained_C[unit_classes(unit)] += 1
            held_out_C[unit_classes(unit)] -= 1
    is_expected_C = np.bincount(class_N) * share >= 1
    for number in np.flatnonzero((held_out_C == 0) & is_expected_C).tolist():
        _hold_out_one(number, ranked_units, unit_classes, is_held_out_U, trained_C, held_out_C)
    # An evaluation needs one example, even of a small set.
    for number in np.argsort(-trained_C, kind="stable").tolist():
        if is_held_out_U.any():
            break
        _hold_out_one(number, ranked_units, unit_classes, is_held_out_U, trained_C, held_out_C)


def _hold_out_one(
    number: int,
    ranked_units: Callable[[int], npt.NDArray[np.int64]],
    unit_classes: Callable[[int], npt.NDArray[np.int64]],
    is_held_out_U: Mask,
    trained_C: npt.NDArray[np.int64],
    held_out_C: npt.NDArray[np.int64],
) -> None:
    """Hold out the first unit of a class without one, if every class keeps one to train on."""
    if held_out_C[number]:
        return
    for unit in ranked_units(number).tolist():
        members = unit_classes(unit)
        if (trained_C[members] > 1).all():
            is_held_out_U[unit] = True
            trained_C[members] -= 1
            held_out_C[members] += 1
            return


def split_part(
    is_held_out_N: Mask, split: str, *, share: float, seed: int, group: str | None = None
) -> SplitPart:
    """Return the items of a split, `train` or `eval`, with a label that identifies the rule."""
    digest = hashlib.sha256(np.packbits(is_held_out_N).tobytes()).hexdigest()[:8]
    by_group = "" if group is None else f" by {group}"
    label = f"{share} held out{by_group}, seed {seed}, {digest}"
    if split == "eval":
        return SplitPart(np.flatnonzero(is_held_out_N), label)
    return SplitPart(np.flatnonzero(~is_held_out_N), f"all but {label}")


def require_both(is_held_out_N: Mask, share: float, unit: str) -> None:
    """Raise DataError if a share holds out none or all of the items, which `unit` names."""
    count = len(is_held_out_N)
    if share and (is_held_out_N.all() or not is_held_out_N.any()):
        lacking = "to train on" if is_held_out_N.all() and count > 1 else "to evaluate on"
        hint = "add more, name data.eval_path, or leave data.eval_split out"
        raise DataError(
            f"data.eval_split = {share} of {count} {unit} leaves none {lacking}: copies and groups "
            f"are not divided, and each class keeps one to train on; {hint}"
        )


def divided_note(key_N: Keys, is_held_out_N: Mask) -> list[str]:
    """Return a warning for copies that are on both sides."""
    divided = np.intersect1d(key_N[is_held_out_N], key_N[~is_held_out_N])
    if not len(divided):
        return []
    count, held_out = (int(np.isin(keys, divided).sum()) for keys in (key_N, key_N[is_held_out_N]))
    return [
        f"{count} of {len(key_N)} examples are copies of {len(divided)}, so many that some are "
        f"trained on and {held_out} are held out: the metrics on these tell what is remembered"
    ]


def lost_class_notes(
    train_N: npt.NDArray[Any],
    held_out_N: npt.NDArray[Any] | None,
    names: Sequence[str],
    classes: int,
) -> list[str]:
    """Return warnings for classes without an example to train on, or none that is held out.

    The arguments are the classes of the examples on both sides, None if nothing is held out.
    """
    consequences = (
        (train_N, "to train on", "no model learns them"),
        (held_out_N, "held out", "no metric measures them"),
    )
    notes = []
    for class_N, side, consequence in consequences:
        if class_N is None:
            continue
        lost = np.flatnonzero(np.bincount(class_N, minlength=classes) == 0).tolist()
        if lost:
            listed = [names[number] if names else str(number) for number in lost[:MAX_NAMES]]
            more = f" and {len(lost) - MAX_NAMES} more" if len(lost) > MAX_NAMES else ""
            notes.append(
                f"{len(lost)} of {classes} classes have no example {side} "
                f"({', '.join(map(repr, listed))}{more}): {consequence}"
            )
    return notes


# --- identities -----------------------------------------------------------------------------------


def name_files(patterns: Sequence[str], paths: Sequence[str]) -> list[str]:
    """Return the names of files relative to the folder in which their pattern begins.

    A name stays the same when files are added, and when the folder is mounted elsewhere. Equal
    names of several folders are numbered.
    """
    roots = sorted({_pattern_root(pattern) for pattern in patterns}, key=len, reverse=True)
    counts: collections.Counter[str] = collections.Counter()
    names = []
    for path in paths:
        root = next((root for root in roots if path.startswith(root)), "")
        name = path[len(root) :].lstrip("/")
        counts[name] += 1
        names.append(name if counts[name] == 1 else f"{name}#{counts[name]}")
    return names


def _pattern_root(pattern: str) -> str:
    """Return the folder of a pattern up to the first part with a wildcard, with its slash."""
    expanded = files.expand_stdlib(pattern)
    is_folder = not remote.is_remote(expanded) and os.path.isdir(expanded)
    fixed = f"{expanded.rstrip('/')}/" if is_folder else files.WILDCARD.split(expanded)[0]
    return fixed[: fixed.rfind("/") + 1]


def file_keys(names: Sequence[str], paths: Sequence[str]) -> Keys:
    """Return the hash of each file's name; local files of equal content have one hash."""
    key_N = np.array([hash_text(name) for name in names], np.uint64)
    by_size: dict[int, list[int]] = {}
    for number, path in enumerate(paths):
        # A file that cannot be read is reported where it is read.
        with contextlib.suppress(OSError):
            if not remote.is_remote(path):
                by_size.setdefault(os.path.getsize(path), []).append(number)
    copies: dict[int, list[int]] = {}
    for size, numbers in by_size.items():
        for number in numbers if len(numbers) > 1 else ():
            with contextlib.suppress(OSError):
                copies.setdefault(sample_key(paths[number], 0, size), []).append(number)
    for numbers in copies.values():
        key_N[numbers] = key_N[numbers].min()
    return key_N


def sample_key(path: str, start: int, size: int) -> int:
    """Return the hash of a range of a file: of its size, its beginning and its end."""
    data = files.read_bytes(path, start, min(size, SAMPLE_BYTES))
    if size > SAMPLE_BYTES:
        data += files.read_bytes(path, start + size - SAMPLE_BYTES, SAMPLE_BYTES)
    return hash_bytes(b"%d " % size + data)

"""Chooses the items that are held out for evaluation, by a seeded hash of each item's identity.

An item is held out if its hash is below a share of all 64-bit numbers. Its split therefore depends
only on the item, the share and the seed: it is the same on every host and after a resume, and does
not change when other items are added. Items with the same identity, such as copies and the members
of a group, are in the same split.

This rule alone might leave a small class without items in one split. If a class has no item to
train on, its item with the highest hash is trained on. If the share of a class is one item or more
and none is held out, its item with the lowest hash is. Only such items may change splits when
others of their class are added.

N items, U units (the items of one identity), P pairs of a class and a unit, C classes.
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

# The increment of splitmix64, used as the key of hashes.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
HASH_RANGE = 2**64
# Bytes at the beginning and the end of an image or a file that identify its content, together with
# its size.
SAMPLE_BYTES = 4096
# Number of classes that are named in a message.
MAX_NAMES = 5


class SplitPart(NamedTuple):
    """The items of a split: item k of the split is item `index_K[k]` of the whole set."""

    index_K: npt.NDArray[np.int64]
    label: str

    def whole_index(self, index: int) -> int:
        """Return the index in the whole set of item `index` of the split."""
        return int(self.index_K[index])


def hash_bytes(data: bytes) -> int:
    """Return 64 bits of the BLAKE2 hash of the data."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hash_text(text: str) -> int:
    """Return the hash of a text, which need not be valid UTF-8."""
    return hash_bytes(text.encode(errors="surrogatepass"))


def hash_value(value: Any) -> int:
    """Return the hash of a value of JSON or of a table.

    7, 7.0 and "7" have the same hash. A key whose value is null, which Parquet adds, counts as a
    missing key.
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
    """Return the hash of seed and identity that determines the split of each item."""
    seed_hash = hash_uint64(np.array([seed], np.uint64), GOLDEN)
    return hash_uint64(key_N ^ seed_hash, GOLDEN)


def held_out_limit(share: float, lowest: int, highest: int) -> int:
    """Return the rank below which items are held out, for ranks from `lowest` to `highest`.

    Each split gets at least one item if the ranks differ; otherwise all items are trained on.
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
    """Return for each item whether it is held out.

    Args:
        key_N: Hashes of the identities. Items with the same hash are in the same split, except for
            copies in a class that has nothing else, and for more than `max_copies` copies.
        share: Share of the items to hold out.
        seed: Seed of the choice.
        class_N: Classes of the items, or None if they have none.
        has_groups: Whether the identities are groups, whose items are always in the same split.
        max_copies: Number of copies that are kept together; None for all.
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
    """Replace the hashes of those copies that may be in different splits, except the first ones."""
    unit_U, unit_N, count_U = np.unique(key_N, return_inverse=True, return_counts=True)
    if len(unit_U) == len(key_N):
        return key_N
    order_N = np.argsort(unit_N, kind="stable")
    copy_N = np.empty(len(key_N), np.uint64)
    copy_N[order_N] = np.arange(len(key_N)) - (np.cumsum(count_U) - count_U)[unit_N[order_N]]
    classes = int(class_N.max()) + 1
    some_unit_C = np.full(classes, -1)
    some_unit_C[class_N] = unit_N
    # Classes that have only copies of one item, and enough of them to be divided.
    is_divided_C = np.ones(classes, bool)
    is_divided_C[class_N[unit_N != some_unit_C[class_N]]] = False
    is_divided_C &= (np.bincount(class_N) * share >= 1) | (classes == 1)
    block_N = copy_N // np.uint64(max_copies or len(key_N))
    block_N = np.where(is_divided_C[class_N], copy_N, block_N)
    return np.where(block_N > 0, hash_uint64(key_N ^ block_N, GOLDEN), key_N)


def _cover_classes(
    is_held_out_U: Mask,
    rank_U: Keys,
    class_N: npt.NDArray[np.int64],
    unit_N: npt.NDArray[np.int64],
    share: float,
) -> None:
    """Update `is_held_out_U` so that each class has units in both splits, where possible."""
    units, classes = len(rank_U), int(class_N.max()) + 1
    class_P, unit_P = np.divmod(np.unique(class_N.astype(np.int64) * units + unit_N), units)
    class_starts = np.searchsorted(class_P, np.arange(classes + 1))
    by_unit_P = np.argsort(unit_P, kind="stable")
    unit_starts = np.searchsorted(unit_P[by_unit_P], np.arange(units + 1))
    is_held_out_P = is_held_out_U[unit_P]
    trained_C = np.bincount(class_P[~is_held_out_P], minlength=classes)
    held_out_C = np.bincount(class_P[is_held_out_P], minlength=classes)

    def ranked_units(label: int) -> npt.NDArray[np.int64]:
        units_of_class = unit_P[class_starts[label] : class_starts[label + 1]]
        return np.asarray(units_of_class[np.argsort(rank_U[units_of_class])])

    def unit_classes(unit: int) -> npt.NDArray[np.int64]:
        return np.asarray(class_P[by_unit_P[unit_starts[unit] : unit_starts[unit + 1]]])

    for label in np.flatnonzero(trained_C == 0).tolist():
        if not trained_C[label]:
            unit = int(ranked_units(label)[-1])
            is_held_out_U[unit] = False
            trained_C[unit_classes(unit)] += 1
            held_out_C[unit_classes(unit)] -= 1
    is_expected_C = np.bincount(class_N) * share >= 1
    for label in np.flatnonzero((held_out_C == 0) & is_expected_C).tolist():
        _hold_out_one(label, ranked_units, unit_classes, is_held_out_U, trained_C, held_out_C)
    # An evaluation needs at least one example, even of a small set.
    for label in np.argsort(-trained_C, kind="stable").tolist():
        if is_held_out_U.any():
            break
        _hold_out_one(label, ranked_units, unit_classes, is_held_out_U, trained_C, held_out_C)


def _hold_out_one(
    label: int,
    ranked_units: Callable[[int], npt.NDArray[np.int64]],
    unit_classes: Callable[[int], npt.NDArray[np.int64]],
    is_held_out_U: Mask,
    trained_C: npt.NDArray[np.int64],
    held_out_C: npt.NDArray[np.int64],
) -> None:
    """Hold out one unit of a class that has none, if its classes keep one to train on."""
    if held_out_C[label]:
        return
    for unit in ranked_units(label).tolist():
        labels = unit_classes(unit)
        if (trained_C[labels] > 1).all():
            is_held_out_U[unit] = True
            trained_C[labels] -= 1
            held_out_C[labels] += 1
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


def check_both_splits(is_held_out_N: Mask, share: float, unit: str) -> None:
    """Raise DataError if one split has no items. The message calls them `unit`."""
    count = len(is_held_out_N)
    if share and (is_held_out_N.all() or not is_held_out_N.any()):
        lacking = "to train on" if is_held_out_N.all() and count > 1 else "to evaluate on"
        hint = "add more, name data.eval_path, or leave data.eval_split out"
        raise DataError(
            f"data.eval_split = {share} of {count} {unit} leaves none {lacking}: copies and groups "
            f"are not divided, and each class keeps one to train on; {hint}"
        )


def divided_copies_notes(key_N: Keys, is_held_out_N: Mask) -> list[str]:
    """Return a warning if copies of an item are in both splits."""
    divided = np.intersect1d(key_N[is_held_out_N], key_N[~is_held_out_N])
    if not len(divided):
        return []
    count, held_out = (int(np.isin(keys, divided).sum()) for keys in (key_N, key_N[is_held_out_N]))
    return [
        f"{count} of {len(key_N)} examples are copies of {len(divided)}, so many that some are "
        f"trained on and {held_out} are held out: the metrics on these tell what is remembered"
    ]


def missing_class_notes(
    train_N: npt.NDArray[Any],
    held_out_N: npt.NDArray[Any] | None,
    names: Sequence[str],
    classes: int,
) -> list[str]:
    """Return warnings for classes without examples in a split.

    Args:
        train_N: Classes of the examples to train on.
        held_out_N: Classes of the held-out examples; None if nothing is held out.
        names: Names of the classes; empty if they have none.
        classes: Number of classes.
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
            lost_names = [names[number] if names else str(number) for number in lost[:MAX_NAMES]]
            more = f" and {len(lost) - MAX_NAMES} more" if len(lost) > MAX_NAMES else ""
            notes.append(
                f"{len(lost)} of {classes} classes have no example {side} "
                f"({', '.join(map(repr, lost_names))}{more}): {consequence}"
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
    """Return the folder of a pattern up to its first wildcard, with a trailing slash."""
    expanded = files.expand_stdlib(pattern)
    is_folder = not remote.is_remote(expanded) and os.path.isdir(expanded)
    prefix = f"{expanded.rstrip('/')}/" if is_folder else files.WILDCARD.split(expanded)[0]
    return prefix[: prefix.rfind("/") + 1]


def file_keys(names: Sequence[str], paths: Sequence[str]) -> Keys:
    """Return the hash of each file's name. Local files with equal content have the same hash."""
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
    """Return a hash of the size, the beginning and the end of a range of a file."""
    data = files.read_bytes(path, start, min(size, SAMPLE_BYTES))
    if size > SAMPLE_BYTES:
        data += files.read_bytes(path, start + size - SAMPLE_BYTES, SAMPLE_BYTES)
    return hash_bytes(b"%d " % size + data)

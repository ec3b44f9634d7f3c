"""Texts with a label, each of which is a row of its own for a classifier.

A text gets the special tokens that its tokenizer adds. A longer text than the row is cut at its
end, as transformers cuts it. Every process tokenizes all rows when a run starts and keeps them in
memory, with 4 bytes per token.

N rows, L length.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError, SpecError
from jaxlaunch.trainer.sources.images import build
from jaxlaunch.trainer.sources.images.index import Label, fold_name, list_names, number_labels
from jaxlaunch.trainer.spec import Text
from jaxlaunch.trainer.text import documents, recipe, tokenizer
from jaxlaunch.trainer.text.documents import UnfitRowError, Values, describe_value

# Version of the tokens. Increase it when the same files give different ones.
VERSION = 1


class LabeledRow(NamedTuple):
    """A row of a file, with the hash of its text or of its group."""

    text: str
    label: Label
    key: int


class LabeledTexts(DataSource):
    """A source of `tokens` int32 [L], their `length` int32 [], and `label` int32 []."""

    def __init__(
        self,
        tokens_N: Sequence[npt.NDArray[np.int32]],
        label_N: npt.NDArray[np.int32],
        classes: tuple[str, ...],
        length: int,
        identity: str,
    ) -> None:
        self.name, self.classes = "labeled texts", classes
        self._tokens_N, self.label_N = tokens_N, label_N
        self._length, self._identity = length, identity

    def __len__(self) -> int:
        return len(self.label_N)

    def __getitem__(self, index: int) -> dict[str, Any]:
        tokens, tokens_L = self._tokens_N[index], np.zeros(self._length, np.int32)
        tokens_L[: len(tokens)] = tokens
        return {"tokens": tokens_L, "length": np.int32(len(tokens)), "label": self.label_N[index]}

    def fingerprint(self) -> str:
        """Return the version, the split, digests of files and tokenizer, and the sizes of rows."""
        digest = hashlib.sha256(json.dumps(self.classes).encode()).hexdigest()[:8]
        sizes = f"{len(self)} texts of {self._length}, classes {digest}"
        return f"labeled texts, version {VERSION}, {self._identity}, {sizes}"


def open_source(
    data: Text,
    length: int,
    split: Split,
    class_count: int | None,
    folder_classes: Sequence[str] = (),
) -> LabeledTexts | None:
    """Open the texts of a split for rows of `length` tokens, None if nothing is held out.

    Labels that are names of `folder_classes`, the classes of the model's head, get their numbers;
    case and spaces do not matter.

    Raises DataError naming file and row, and SpecError if the tokenizer cannot be read or the model
    has fewer than the data's classes.
    """
    has_eval_files = data.eval_path is not None
    if split == "eval" and not has_eval_files and not data.eval_split:
        return None
    paths = documents.find_files(data.path)
    rows = _read_files(data, paths)
    labels = [row.label for row in rows]
    allowed: Sequence[Label] | None = data.classes
    # With other classes than those of the folder, the head is new.
    if allowed is None and class_count in (None, len(folder_classes)):
        labels = _rename_labels(labels, folder_classes)
        allowed = folder_classes if {*map(str, labels)} <= {*folder_classes} else None
    label_N, classes = number_labels(labels, allowed, f"data.path: {paths[0]}")
    data_classes = len(classes) or int(label_N.max()) + 1
    if class_count is not None and class_count < data_classes:
        raise SpecError(
            f"train.model.classes = {class_count}, and the labels of {paths[0]} are of "
            f"{data_classes} classes; make it {data_classes} or more"
        )
    part_label, is_selected_N = str(data.eval_split), np.ones(len(rows), bool)
    notes: list[str] = []
    if split == "train" and allowed is None:
        notes = _note_other_classes(paths[0], classes, folder_classes)
    if data.eval_path is not None and split == "eval":
        paths = documents.find_files(data.eval_path, "eval_path")
        rows = _read_files(data, paths)
        labels, place = [row.label for row in rows], f"data.eval_path: {paths[0]}"
        labels = _rename_labels(labels, classes if allowed is folder_classes else ())
        label_N, _ = number_labels(labels, classes or [*range(data_classes)], place)
        is_selected_N = np.ones(len(rows), bool)
    elif not has_eval_files and data.eval_split:
        key_N = np.array([row.key for row in rows], np.uint64)
        is_held_out_N = splits.choose_held_out(
            key_N,
            data.eval_split,
            data.split_seed,
            label_N,
            has_groups=data.group is not None,
        )
        splits.check_both_splits(is_held_out_N, data.eval_split, "texts")
        part = splits.split_part(
            is_held_out_N, split, share=data.eval_split, seed=data.split_seed, group=data.group
        )
        part_label = part.label
        is_selected_N = is_held_out_N if split == "eval" else ~is_held_out_N
        if split == "eval":
            notes = splits.missing_class_notes(
                label_N[~is_held_out_N], label_N[is_held_out_N], classes, data_classes
            )
    texts = [row.text for row in itertools.compress(rows, is_selected_N)]
    encoder = tokenizer.load_tokenizer(data.tokenizer)
    tokens_N, cut = encoder.encode_whole(texts, length)
    if cut:
        limit = f"train.model.length = {length}"
        print(f"texts: {cut} of {len(texts)} are cut at {limit}", file=sys.stderr)
    digest = recipe.digest_files(tuple(paths), Path(recipe.prepared_root(data)))
    identity = f"{split}, {part_label} of sha256 {digest}, tokenizer {encoder.digest}"
    source = LabeledTexts(tokens_N, label_N[is_selected_N], classes, length, identity)
    source.notes = notes
    return source


def _read_files(data: Text, paths: Sequence[str]) -> list[LabeledRow]:
    documents.check_rows(paths, "labeled texts")
    parts = list(itertools.chain.from_iterable(documents.split_units(paths)))
    columns: dict[str, str] = {}
    rows = [row for part in parts for row, _ in read_rows(part, data, columns)]
    if not rows:
        raise DataError(f"data.path: {paths[0]} and what else matches have no row")
    return rows


def _note_other_classes(
    path: str, classes: Sequence[str], folder_classes: Sequence[str]
) -> list[str]:
    """Return a note on a head that may have been trained on the same classes, by other names."""
    if not classes or len(classes) != len(folder_classes):
        return []
    return [
        f"the classes of {path} are {list_names(classes)}, and those of the model's folder "
        f"{list_names(folder_classes)}; if they are the same ones, list those of the data in "
        "data.classes in the folder's order"
    ]


def _rename_labels(labels: Sequence[Label], classes: Sequence[str]) -> list[Label]:
    """Return the labels with the names of `classes`, if they differ in nothing but case or spaces.

    Labels that are not among the classes stay as they are.
    """
    folded_names = {fold_name(name): name for name in classes}
    if len(folded_names) < len(classes):
        folded_names = {}
    names: dict[Label, Label] = {
        label: str(label)
        if str(label) in classes
        else folded_names.get(fold_name(str(label)), label)
        for label in set(labels)
    }
    return [names[label] for label in labels]


def read_rows(
    part: documents.Part, data: Text, columns: dict[str, str] | None = None
) -> Iterator[tuple[LabeledRow, int]]:
    """Yield the rows of a part of a file, as `documents.read_rows` does. Raises DataError.

    The column of the labels is that of `columns` by the file's path, or else the first usual one of
    the first row, which is added there.
    """
    columns = {} if columns is None else columns
    field = data.field or documents.DEFAULT_FIELD
    label_names = build.LABEL_NAMES if data.label is None else (data.label,)
    names = (*label_names, *([] if data.group is None else [data.group]))

    def make_row(values: Values) -> LabeledRow:
        text = read_text(values, field)
        names = label_names if part.path not in columns else (columns[part.path],)
        name = next((name for name in names if name in values), None)
        if name is None:
            present = ", ".join(key for key in values if values[key] is not None)
            raise UnfitRowError(
                f"it has the columns {present}, and no label ({', '.join(names)}); set data.label"
            )
        columns[part.path] = name
        label = values[name]
        if not isinstance(label, str | int):
            kind = describe_value(label)
            raise UnfitRowError(f"its {name!r} is {kind}, neither a name nor a whole number")
        if data.group is None:
            return LabeledRow(text, label, splits.hash_value(text))
        key, _ = documents.split_group(values, data.group, ())
        return LabeledRow(text, label, key)

    return documents.read_rows(part, field, make_row, names)


def read_text(values: Values, field: str) -> str:
    """Return the text of a row. Raises UnfitRowError if there is none."""
    text = values[field]
    if not isinstance(text, str) or not text.strip():
        kind = "empty" if isinstance(text, str) else f"{describe_value(text)}, not a text"
        raise UnfitRowError(f"its {field!r} is {kind}")
    return documents.replace_surrogates(text)[0]

"""Text sources: windows of a stream of bytes, or rows of a prepared corpus; and a bigram baseline.

Window k contains the bytes k × L to k × L + L of the concatenated files, so that each byte except
the first is a target exactly once. A row of a corpus is padded with zeros, which are segment 0 and
are not targets. A corpus is prepared when it is opened for the first time.

L length of a window or row in targets, T = L + 1 tokens, V vocabulary of bytes.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxlaunch import isolated
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError, SpecError, Stopped, StorageError, TrainerError
from jaxlaunch.trainer.huggingface.folder import class_names, has_tokenizer
from jaxlaunch.trainer.sources import labeled_texts
from jaxlaunch.trainer.sources.array_record import Records
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.sources.open import BYTE_VOCAB, token_sizes
from jaxlaunch.trainer.spec import REWARD, Text, TrainSpec, model_sizes
from jaxlaunch.trainer.spec import Mixture as MixtureBlock
from jaxlaunch.trainer.spec.data import BYTES_TOKENIZER, LABEL_FORMAT
from jaxlaunch.trainer.text import build, documents, preferences, recipe, shards, tokenizer
from jaxlaunch.trainer.text.recipe import INDEX_FILE, Recipe

# Number of bytes of which the bigram model counts the pairs at once.
CHUNK_BYTES = 16 * 2**20
ERRORS_BY_CODE: dict[int, type[TrainerError]] = {
    kind.code: kind for kind in TrainerError.__subclasses__()
}
POLL_S = 0.2

# Path, offset of the first byte, and offset after the last byte.
Piece = tuple[str, int, int]


def open_source(data: Text, split: Split, spec: TrainSpec) -> DataSource | None:
    """Open preference pairs, prepared rows, or a stream of bytes. Raises SpecError, DataError."""
    length, vocab = token_sizes(spec)
    folder = getattr(spec.model, "init_from", None)
    reads_whole_texts = data.format == LABEL_FORMAT or spec.task == REWARD
    if reads_whole_texts and data.tokenizer == BYTES_TOKENIZER and folder and has_tokenizer(folder):
        raise SpecError(
            f"data.tokenizer is {BYTES_TOKENIZER}, and {folder} has a tokenizer.json, whose tokens "
            f"its model reads; set data.tokenizer: {folder}"
        )
    tokenizer.check_vocab(tokenizer.load_tokenizer(data.tokenizer), vocab)
    if data.format == LABEL_FORMAT:
        folder_classes = class_names(folder) if folder else ()
        class_count = model_sizes(spec.model).classes
        return labeled_texts.open_source(data, length, split, class_count, folder_classes)
    if data.has_pairs:
        return preferences.open_source(data, length, split)
    return (open_rows if data.is_prepared else open_stream)(data, length, split)


def open_mixture(data: MixtureBlock, split: Split, spec: TrainSpec) -> Mixture | None:
    """Open the parts of a split. An evaluation reads every example of all parts once."""
    weights = {name: part.weight for name, part in data.parts.items()}
    parts: dict[str, DataSource] = {}
    for name, part in data.texts().items():
        if weights[name] or split == "eval":
            source = open_source(part, split, spec)
            parts |= {} if source is None else {name: source}
    if not parts:
        return None
    return Mixture(parts, weights if split == "train" else dict.fromkeys(parts, 1.0))


def open_stream(data: Text, length: int, split: Split) -> TextStream | None:
    """Open the files of `split`, or None if none are held out. Of a single file the end is."""
    pieces = [(path, 0, files.file_size(path)) for path in files.match_files(data.path)]
    for path, _, _ in pieces:
        documents.check_compression(path)
    if table := next((path for path, _, _ in pieces if documents.is_table(path)), None):
        raise DataError(
            f"{table} is not plain text; data.packing: concat reads its documents, data.field "
            "names their text"
        )
    pieces = [piece for piece in pieces if piece[2]]
    if not pieces:
        raise DataError(f"data.path {data.path!r}: every file that matches is empty")
    if not data.eval_split:
        return TextStream(data, pieces, length, "all") if split == "train" else None
    if len(pieces) == 1:
        path, _, size = pieces[0]
        middle = size - int(size * data.eval_split)
        pieces = [(path, 0, middle) if split == "train" else (path, middle, size)]
    else:
        paths = [path for path, _, _ in pieces]
        key_N = splits.file_keys(splits.name_files(files.as_list(data.path), paths), paths)
        is_held_out_N = splits.choose_held_out(key_N, data.eval_split, data.split_seed)
        splits.check_both_splits(is_held_out_N, data.eval_split, "files")
        is_in_split_N = is_held_out_N == (split == "eval")
        pieces = list(itertools.compress(pieces, is_in_split_N))
    try:
        return TextStream(data, pieces, length, split)
    except DataError as error:
        hint = f"data.eval_split = {data.eval_split} says how much either split has"
        raise DataError(f"{error}; {hint}") from None


class TextStream(DataSource):
    """A source of windows: `tokens` int32 [T], and `mask` float32 [L], which is 1 for targets.

    Only the last window may be short: it is padded with zeros, which the mask excludes. With
    `data.apart`, `segments` int32 [T] is the number of each token's file from 1, and 0 for padding.
    """

    def __init__(self, data: Text, pieces: list[Piece], length: int, label: str) -> None:
        more = f" and {len(pieces) - 1} more files" if len(pieces) > 1 else ""
        self.name = f"text {pieces[0][0]}{more}"
        self._data, self._pieces, self._length, self._label = data, pieces, length, label
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in pieces))
        # Number of bytes in the stream.
        self.bytes = self._ends[-1]
        if self.bytes < 2:
            problem = f"the {label} split has {self.bytes} bytes, which leaves nothing to predict"
            raise DataError(f"{self.name}: {problem}")

    def __len__(self) -> int:
        return -(-(self.bytes - 1) // self._length)

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = index * self._length
        window = self.read_stream(first, min(first + self._length + 1, self.bytes))
        tokens_T, mask_L = np.zeros(self._length + 1, np.int32), np.zeros(self._length, np.float32)
        tokens_T[: len(window)] = window
        mask_L[: len(window) - 1] = 1.0
        example = {"tokens": tokens_T, "mask": mask_L}
        if self._data.apart:
            position_T = np.arange(first, first + self._length + 1)
            low, high = (bisect.bisect_right(self._ends, int(position_T[end])) for end in (0, -1))
            segment_T = 1 + np.searchsorted(self._ends[low:high], position_T, side="right")
            example["segments"] = np.where(position_T < self.bytes, segment_T, 0).astype(np.int32)
        return example

    def read_stream(self, start: int, stop: int) -> npt.NDArray[np.uint8]:
        """Read the bytes `start` to `stop - 1` of the stream. Raises DataError if a file shrank."""
        parts = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            path, first, last = self._pieces[number]
            offset = first + start - (self._ends[number] - (last - first))
            piece_end = min(stop, self._ends[number])
            part = files.read_bytes(path, offset, piece_end - start)
            if len(part) < piece_end - start:
                size, end = files.file_size(path), offset + piece_end - start
                raise DataError(f"{path} ends at byte {size}; at the start of the run it had {end}")
            parts.append(part)
            start, number = piece_end, number + 1
        return np.frombuffer(b"".join(parts), np.uint8)

    def fingerprint(self) -> str:
        """Return the number of bytes and files, the window length, and a digest of the files."""
        digest = files.sample_digest([path for path, _, _ in self._pieces])
        return (
            f"text {self._label}, {self.bytes} bytes of {len(self._pieces)} files in windows of "
            f"{self._length}, {'apart, ' if self._data.apart else ''}sha256 {digest}"
        )

    def baseline_metrics(self, held_out: DataSource | None) -> dict[str, float]:
        """Return the bits per byte of a bigram model, if the job requests it."""
        if not self._data.bigram or not isinstance(held_out, TextStream):
            return {}
        return {"bigram_bits_per_byte": bigram_bits_per_byte(self, held_out)}


def bigram_bits_per_byte(train: TextStream, held_out: TextStream) -> float:
    """Return the bits per byte on `held_out`, without its first byte, of a bigram model of `train`.

    Smoothing is interpolated Witten-Bell: p(b|a) = (c(ab) + t(a) p(b)) / (c(a) + t(a)), where t(a)
    is how many different bytes follow a, over an add-one unigram p(b). Witten and Bell 1991; Chen
    and Goodman 1998, section 2.5.
    """
    count_VV = _count_pairs(train)
    unigram_V = (count_VV.sum(0) + 1.0) / (count_VV.sum() + BYTE_VOCAB)
    # After a byte that training never saw, the unigram alone predicts the next one.
    follow_V1 = np.maximum((count_VV > 0).sum(1, keepdims=True), 1)
    bigram_VV = (count_VV + follow_V1 * unigram_V) / (count_VV.sum(1, keepdims=True) + follow_V1)
    pair_count_VV = _count_pairs(held_out)
    return float(-(pair_count_VV * np.log2(bigram_VV)).sum() / pair_count_VV.sum())


def _count_pairs(stream: TextStream) -> npt.NDArray[np.int64]:
    """Count how often each byte (column) follows each other byte (row) in the stream."""
    count = np.zeros(BYTE_VOCAB * BYTE_VOCAB, np.int64)
    for start in range(0, stream.bytes - 1, CHUNK_BYTES):
        chunk = stream.read_stream(start, min(start + CHUNK_BYTES + 1, stream.bytes))
        pairs = chunk[:-1].astype(np.int64) * BYTE_VOCAB + chunk[1:]
        count += np.bincount(pairs, minlength=len(count))
    return count.reshape(BYTE_VOCAB, BYTE_VOCAB)


# --- prepared rows --------------------------------------------------------------------------------


def open_rows(data: Text, length: int, split: Split) -> PackedRows | None:
    """Open the rows of a split, preparing them if necessary; None if nothing is held out."""
    if split == "eval" and data.eval_path is not None:
        held_out = recipe.make_recipe(data, length, held_out=True)
        return PackedRows(prepare_rows(data, held_out), "train")
    row_recipe = recipe.make_recipe(data, length)
    if split == "train" or row_recipe.eval_split:
        return PackedRows(prepare_rows(data, row_recipe), split)
    return None


def prepare_rows(
    data: Text,
    row_recipe: Recipe,
    *,
    verify: bool = False,
    is_stopped: Callable[[], bool] = lambda: False,
) -> Path:
    """Prepare the rows of a recipe if necessary, and return their folder.

    `verify` also checks the digests of existing files, and `is_stopped` is polled. Raises the
    errors of the preparation, and Stopped.
    """
    folder = Path(recipe.prepared_root(data)).absolute() / row_recipe.address
    if not (folder / INDEX_FILE).exists():
        _run_build(row_recipe, folder, is_stopped)
    elif (folder / build.PARTS_FOLDER).exists():
        # A process was killed after it wrote the index.
        build.remove_leftovers(folder)
    build.check_folder(folder, verify=verify)
    _print_notes(folder)
    return folder


@functools.cache
def _print_notes(folder: Path) -> None:
    """Print once per process what the rows of chats leave out, also if they existed before."""
    for sentence in build.describe_notes(build.read_index(folder)):
        print(f"chats: {sentence}", file=sys.stderr, flush=True)


def _run_build(
    row_recipe: Recipe, folder: Path, is_stopped: Callable[[], bool] = lambda: False
) -> None:
    """Build the rows in a separate process without jax, which its workers do not need."""
    message = f"preparing text: {row_recipe.tokenizer}, packing {row_recipe.packing}, in {folder}"
    print(message, file=sys.stderr, flush=True)
    command = isolated.build_command("jaxlaunch.trainer.text.build", str(folder), str(os.getpid()))
    pipe = subprocess.PIPE
    recipe_text: str | None = row_recipe.to_json()
    output: str | None = None
    with subprocess.Popen(
        command, env=isolated.inherited_environ(os.environ), stdin=pipe, stdout=pipe, text=True
    ) as child:
        while output is None:
            try:
                output, _ = child.communicate(recipe_text, POLL_S)
            except subprocess.TimeoutExpired:
                # The input is already being written; communicate must not receive it twice.
                recipe_text = None
                if is_stopped():
                    child.terminate()
    code = child.returncode
    if code and is_stopped():
        raise Stopped(build.STOPPED.format(folder))
    if code in ERRORS_BY_CODE and output:
        raise ERRORS_BY_CODE[code](json.loads(output.splitlines()[-1])["message"])
    if code < 0:
        raise StorageError(
            f"preparing the text in {folder} was killed ({signal.Signals(-code).name}), "
            "probably because memory ran out: give it more memory, or fewer cores; what is "
            "complete is kept, and the next start resumes"
        )
    if code:
        raise RuntimeError(f"jaxlaunch.trainer.text.build ended with {code}; its output is above")


class PackedRows(DataSource):
    """A source of `tokens`, `segments` int32 [T], `mask` float32 [L], and `text_bytes` float32."""

    # Reading a row takes 0.2 ms, mostly in Python, so one thread reads twice as fast as four.
    is_light = True

    def __init__(self, folder: Path, split: str) -> None:
        index = build.read_index(folder)
        self.name, self._length = f"text {folder.name} {split}", index["length"]
        paths = [
            str(folder / name)
            for name, file in sorted(index["files"].items())
            if file["split"] == split and file["rows"]
        ]
        if not paths:
            raise DataError(
                f"the {split} split of {folder} has no rows: data.eval_split of "
                f"{index['documents']} documents leaves it none, and copies of a document or a "
                "group are not divided; change data.eval_split, or name data.eval_path"
            )
        self._records = Records(paths)
        digest = shards.file_digest(folder / INDEX_FILE)[:12]
        self._fingerprint = (
            f"text {split}, {len(self)} rows of {self._length}, tokenizer {index['tokenizer']}, "
            f"prepared as {index['address']}, sha256 {digest}"
        )

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return unpack_row(self._records[index], self._length)

    def fingerprint(self) -> str:
        """Return split, number and length of rows, and digests of the recipe and the rows."""
        return self._fingerprint


def unpack_row(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """Convert a stored row to an example, padded to `length`."""
    count = len(row["tokens"])
    tokens_T, segments_T = np.zeros(length + 1, np.int32), np.zeros(length + 1, np.int32)
    tokens_T[:count] = row["tokens"]
    segments_T[:count] = np.repeat(np.arange(1, len(row["lengths"]) + 1), row["lengths"])
    is_target_L = (segments_T[1:] == segments_T[:-1]) & (segments_T[1:] > 0)
    if "targets" in row:
        # In chats only the tokens of the assistant are targets.
        is_target_L[: count - 1] &= row["targets"][1:].astype(np.bool_)
    return {
        "tokens": tokens_T,
        "segments": segments_T,
        "mask": is_target_L.astype(np.float32),
        "text_bytes": np.float32(row["bytes"]),
    }

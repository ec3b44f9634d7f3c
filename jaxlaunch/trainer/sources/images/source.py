"""Sources of images that are read in place, and mixtures of images and records.

The parts of a mixture have the same class numbers and the same shape of images.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import files
from jaxlaunch.trainer.data import split as splits
from jaxlaunch.trainer.data.augment import Transform
from jaxlaunch.trainer.data.files import printable_path
from jaxlaunch.trainer.data.source import DataSource, Split
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import build, index, listing
from jaxlaunch.trainer.sources.images.index import MAX_LISTED_NAMES, Index, list_names
from jaxlaunch.trainer.sources.images.picture import BrokenImageError, Picture
from jaxlaunch.trainer.sources.mixture import Mixture, report_part
from jaxlaunch.trainer.sources.open import open_block, worker_opener
from jaxlaunch.trainer.spec import ArrayRecord, Images, Tfds, TrainSpec
from jaxlaunch.trainer.spec import Mixture as MixtureBlock

Block = Images | ArrayRecord | Tfds
# Size at which images are checked. A JPEG is then decoded at an eighth of its size, which takes a
# third of the time and finds the same damage.
CHECK_SIZE = (8, 8)
# Maximum number of broken images that are printed.
MAX_PRINTED_FAULTS = 10
# Metadata that all packed tables of a mixture must share.
SCALING_KEYS = ("columns", "missing", "label", "scale")


def open_source(data: Images, split: Split, spec: TrainSpec | None = None) -> ImageSource | None:
    """Open the images of `split`, None if nothing is held out. Raises DataError."""
    full_index = index_images(data, data.path, "train", "path", data.classes)
    source, train_N = ImageSource(data, split, full_index), full_index.label_N
    held_out_N, notes = None, []
    if full_index.key_N is not None:
        assert data.eval_split is not None, "only eval_split needs the keys of images"
        share, seed = data.eval_split, data.split_seed
        has_groups = data.group is not None
        is_held_out_N = splits.choose_held_out(
            full_index.key_N, share, seed, train_N, has_groups=has_groups
        )
        splits.check_both_splits(is_held_out_N, share, "images")
        notes = [] if has_groups else splits.divided_copies_notes(full_index.key_N, is_held_out_N)
        part = splits.split_part(is_held_out_N, split, share=share, seed=seed, group=data.group)
        source = ImageSource(data, split, full_index, part)
        train_N, held_out_N = train_N[~is_held_out_N], train_N[is_held_out_N]
    elif split == "eval":
        eval_index = _index_held_out(data, full_index)
        if eval_index is None:
            return None
        source, held_out_N = ImageSource(data, split, eval_index), eval_index.label_N
    elif data.eval_path is not None or full_index.has_splits:
        # The notes need the held-out images, so the evaluation source has them.
        return source
    if split == "eval" or held_out_N is None:
        classes = len(full_index.classes) or int(full_index.label_N.max(initial=-1)) + 1
        lost = splits.missing_class_notes(train_N, held_out_N, full_index.classes, classes)
        source.notes = [*notes, *lost]
    return source


def _index_held_out(data: Images, full_index: Index) -> Index | None:
    classes = data.classes or full_index.classes or None
    if data.eval_path is not None:
        eval_index = index_images(data, data.eval_path, "train", "eval_path", classes)
        if data.eval_path != data.path:
            _check_disjoint(full_index, eval_index)
        return eval_index
    eval_index = index_images(data, data.path, "eval", "path", classes)
    return eval_index if full_index.has_splits and len(eval_index) else None


def index_images(
    data: Images, patterns: str | list[str], split: Split, key: str, classes: build.Classes
) -> Index:
    """Return the index of a split, from the cache if possible. Raises DataError, StorageError."""
    absolute = [
        pattern if remote.is_remote(pattern) else os.path.abspath(pattern)
        for pattern in files.as_list(patterns)
    ]
    options = [data.image, data.label, data.channels, data.on_broken]
    cache_key = [absolute, split, key, classes, *options]
    # Images need an identity only if some of them are held out.
    is_divided = bool(data.eval_split) and data.eval_path is None
    cache_key += ["split", data.group] if is_divided else []

    def build_index(folder: Path) -> Index:
        file_listing = listing.list_files(absolute, split, key)
        full_index = build.build_index(data, file_listing, classes, folder)
        if is_divided and not file_listing.has_splits:
            key_N = build.identify_images(data, file_listing, full_index, absolute)
            full_index = dataclasses.replace(full_index, key_N=key_N)
        is_strict = data.on_broken == "stop"
        return full_index if is_strict else _drop_broken(full_index, data.channels, key)

    return index.cached_index(
        cache_key, lambda: listing.fingerprint_files(absolute, key), build_index
    )


def _check_disjoint(train_index: Index, eval_index: Index) -> None:
    """Raise DataError if an image file is in both training and evaluation."""
    if train_index.file_N is None and eval_index.file_N is None:
        trained_files = {train_index.file_path(number) for number in range(len(train_index))}
        evaluated_files = map(eval_index.file_path, range(len(eval_index)))
        shared_files = [name for name in evaluated_files if name in trained_files]
        if shared_files:
            raise DataError(
                f"data.path and data.eval_path both name {printable_path(shared_files[0])}, one "
                f"of {len(shared_files)} images of the {len(eval_index)} that are evaluated; take "
                "them out of one, or set both to the same path"
            )


class ImageSource(DataSource):
    """A source of examples with `image` uint8 [H, W, C] and `label` int32."""

    def __init__(
        self, data: Images, split: Split, full_index: Index, part: splits.SplitPart | None = None
    ) -> None:
        self.index, self.workers, self._data = full_index, data.workers, data
        self.opener = worker_opener(data, split)
        self._part = part or splits.SplitPart(np.arange(len(full_index)), "")
        self._transform = Transform(data.augment, data.shape, split)
        self.takes_rng = self.may_draw = self._transform.needs_rng
        self._suffix = f", {part.label}" if part else ""
        self.name = f"images of {printable_path(files.as_list(data.path)[0])}{self._suffix}"

    def __len__(self) -> int:
        return len(self._part.index_K)

    def __getitem__(
        self, example_index: int, rng: np.random.Generator | None = None
    ) -> dict[str, Any]:
        image = self._part.whole_index(example_index)
        try:
            picture = Picture(self.index.read_image(image), self._data.channels)
            pixels = self._transform(picture, rng)
        except BrokenImageError as error:
            location = f"example {example_index}, {self.index.locate_image(image)}"
            hint = "fix or remove it, or set data.on_broken: skip"
            raise DataError(f"{self.name}: {location}, {error}; {hint}") from None
        return {"image": pixels, "label": self.index.label_N[image]}

    def locate_example(self, example_index: int) -> str:
        """Return the file of an example and the place in it."""
        return self.index.locate_image(self._part.whole_index(example_index))

    def fingerprint(self) -> str:
        """Return the numbers of images and classes, and a digest of names, labels and samples."""
        classes = len(self.index.classes) or int(self.index.label_N.max(initial=-1)) + 1
        identity = f"images, {len(self.index)} of {classes} classes, sha256 {self.index.digest}"
        return f"{identity}{self._suffix}"


def _drop_broken(full_index: Index, channels: int, key: str) -> Index:
    """Print the broken images and return the index of the others. Raises DataError if all are."""
    faults = {
        number: f"{full_index.locate_image(number)} {fault}"
        for number, fault in find_faults(full_index, channels)
    }
    for fault in list(faults.values())[:MAX_PRINTED_FAULTS]:
        print(f"left out: {fault}", file=sys.stderr)
    counts = f"{len(faults)} of {len(full_index)} images"
    if faults:
        print(f"data.{key}: left out {counts}, which cannot be decoded", file=sys.stderr)
    if len(faults) == len(full_index):
        raise DataError(f"data.{key}: none of the {len(full_index)} images can be decoded")
    is_intact_N = np.ones(len(full_index), bool)
    is_intact_N[list(faults)] = False
    return full_index.select_images(is_intact_N, list(faults.values()))


def find_faults(full_index: Index, channels: int = 3) -> Iterator[tuple[int, str]]:
    """Yield the number of each image that cannot be decoded, with the reason."""

    def find_fault(number: int) -> str | None:
        try:
            Picture(full_index.read_image(number), channels).read_pixels(None, CHECK_SIZE)
        except BrokenImageError as error:
            return str(error)
        except (FileNotFoundError, PermissionError) as error:
            return f"cannot be read: {error.strerror}"
        return None

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for number, fault in enumerate(threads.map(find_fault, range(len(full_index)))):
            if fault is not None:
                yield number, fault


# --- mixtures -------------------------------------------------------------------------------------


class _Classes(NamedTuple):
    """The classes of a part of a mixture, in the order of their numbers."""

    names: tuple[str, ...]
    # Whether the names are not only the numbers as text.
    are_named: bool
    # Whether the files contain the class numbers, so that they cannot be renumbered.
    is_fixed: bool


class ImageMixture(Mixture):
    """A mixture of images and records, with the metadata that the packed parts share."""

    metadata: Mapping[str, Any] = {}

    def __init__(
        self,
        data: MixtureBlock,
        split: Split,
        parts: Mapping[str, DataSource],
        weights: Mapping[str, float],
        metadata: Any,
    ) -> None:
        super().__init__(parts, weights)
        self.metadata = metadata
        self.workers = data.workers
        self.opener = worker_opener(data, split)


def open_mixture(
    data: MixtureBlock, split: Split, spec: TrainSpec | None = None
) -> ImageMixture | None:
    """Open the parts that have examples of a split. Raises DataError naming the part."""
    sources = data.part_sources().items()
    blocks = {name: block for name, block in sources if isinstance(block, Block)}
    weights = {name: part.weight for name, part in data.parts.items()}
    classes = _check_classes(data, blocks)
    parts: dict[str, DataSource] = {}
    for name, block in blocks.items():
        if not weights[name] and split == "train":
            continue
        if isinstance(block, Images) and classes:
            block = block.model_copy(update={"classes": list(classes)})
        if weights[name] or isinstance(block, Tfds):
            part = _open_part(name, block, split)
        else:
            # A part that is not trained on is evaluated on the files whose names say that they are
            # held out, or else on all files.
            block = block.model_copy(update={"eval_split": None})
            part = _open_part(name, block, split)
            if part is None:
                whole = block.model_copy(update={"eval_path": block.path})
                part = _open_part(name, whole, split)
        if part is not None:
            parts[name] = part
    if not parts:
        return None
    _check_shapes(parts)
    metadata = _common_metadata(parts) | ({"classes": list(classes)} if classes else {})
    part_weights = weights if split == "train" else dict.fromkeys(parts, 1.0)
    return ImageMixture(data, split, parts, part_weights, metadata)


def _open_part(name: str, block: Block, split: Split) -> DataSource | None:
    with report_part(name):
        source = open_block(block, split)
        if source is not None and not len(source):
            hint = "leave the part out, or fill it"
            raise DataError(f"its {split} split has no examples; {hint}")
    return source


def _check_classes(data: MixtureBlock, blocks: Mapping[str, Block]) -> tuple[str, ...]:
    """Return the common class names in order, empty if classes are numbers. Raises DataError."""
    part_classes: dict[str, _Classes] = {}
    for name, block in blocks.items():
        if data.parts[name].weight and (classes := _find_classes(name, block)):
            part_classes[name] = classes
    if not part_classes:
        return tuple(map(str, data.classes or ()))
    first = min(part_classes, key=lambda name: not part_classes[name].is_fixed)
    expected = part_classes[first].names if data.classes is None else tuple(map(str, data.classes))
    for name, classes in part_classes.items():
        is_same = classes.names == expected if classes.is_fixed else {*classes.names} == {*expected}
        if is_same or (data.classes is not None and not classes.is_fixed):
            # Unknown classes are reported when the part is opened.
            continue
        reference = f"train.data.parts.{first}" if data.classes is None else "train.data.classes"
        differing = sorted({*classes.names} ^ {*expected})[:MAX_LISTED_NAMES]
        difference, remedy = "in another order", "list the classes of both in data.classes"
        if differing:
            difference = f"of which only one has {list_names(differing)}"
        if classes.is_fixed:
            remedy = "pack it again with data.classes"
        raise DataError(
            f"train.data.parts.{name} has the {len(classes.names)} classes "
            f"{list_names(classes.names)}, and {reference} the {len(expected)} classes "
            f"{list_names(expected)}, {difference}; {remedy}"
        )
    return expected if data.classes is not None or part_classes[first].are_named else ()


def _find_classes(name: str, block: Block) -> _Classes | None:
    if isinstance(block, Images):
        with report_part(name):
            full_index = index_images(block, block.path, "train", "path", block.classes)
        numbers = range(int(full_index.label_N.max(initial=-1)) + 1)
        names = full_index.classes or tuple(map(str, numbers))
        return _Classes(names, bool(full_index.classes), False)
    if isinstance(block, Tfds):
        return None
    part = _open_part(name, block, "train")
    packed_names = None if part is None else part.metadata.get("classes")
    return _Classes(tuple(packed_names), True, True) if packed_names else None


def _check_shapes(parts: Mapping[str, DataSource]) -> None:
    image_types: dict[str, str] = {}
    for name, part in parts.items():
        example = part.read_example(0, np.random.default_rng(0))
        if "image" in example:
            image = np.asarray(example["image"])
            image_types[name] = f"{image.dtype}{list(image.shape)}"
    for name, image_type in image_types.items():
        first, first_type = next(iter(image_types.items()))
        if image_type != first_type:
            raise DataError(
                f"train.data.parts.{first} has images of {first_type}, and train.data.parts.{name} "
                f"of {image_type}; set train.data.size, and pack grey images with data.channels: 3"
            )


def _common_metadata(parts: Mapping[str, DataSource]) -> dict[str, Any]:
    """Return the metadata that packed tables share, {} if there are none. Raises DataError."""
    part_metadata = {name: part.metadata for name, part in parts.items()}
    first = next(
        (name for name, metadata in part_metadata.items() if metadata.get("kind") == "table"), None
    )
    if first is None:
        return {}
    for name, metadata in part_metadata.items():
        for key in ("kind", "target", *SCALING_KEYS):
            if part_metadata[first].get(key) != metadata.get(key):
                raise DataError(
                    f"train.data.parts.{first} and train.data.parts.{name} were packed with "
                    f"another {key}, so a feature means another value in each; mix the tables "
                    "themselves, with source: table"
                )
    return {key: value for key, value in part_metadata[first].items() if key != "files"}

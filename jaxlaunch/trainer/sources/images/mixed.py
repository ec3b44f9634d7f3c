"""Sets of images in fixed proportions, and of records: one numbering of the classes, one shape of the pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from jaxlaunch.trainer.data.source import DataSource
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.sources.images import labels
from jaxlaunch.trainer.sources.images.source import indexed
from jaxlaunch.trainer.sources.mixture import Mixture
from jaxlaunch.trainer.spec import ArrayRecord, Images, Tfds
from jaxlaunch.trainer.spec import Mixture as Mixed

Split = Literal["train", "eval"]
Block = Images | ArrayRecord | Tfds
Open = Callable[[Block, Split], DataSource | None]
SCALED = ("columns", "missing", "label", "scale")  # of packed tables, what has to be the same for all


class Classes(NamedTuple):
    """The classes of a part in the order of their numbers; `are_named` where the labels are no numbers themselves."""

    names: tuple[str, ...]
    are_named: bool
    is_fixed: bool  # they are numbered in the files, and cannot be otherwise


class Examples(Mixture):
    """The examples of all parts. `about` says what `launcher prepare` notes of packed ones: classes, scales."""

    def __init__(
        self, data: Mixed, split: Split, parts: Mapping[str, DataSource], weights: Mapping[str, float], about: Any
    ) -> None:
        super().__init__(parts, weights)
        self._about: Mapping[str, Any] = about
        self.workers = data.workers
        self.opener = "jaxlaunch.trainer.sources.open:mixed", (data.model_dump_json(), split)

    @property
    def about(self) -> Mapping[str, Any]:
        """What all packed parts have in common."""
        return self._about


def source(data: Mixed, split: Split, opened: Open) -> Examples | None:
    """The parts that have examples of a split. Raises DataError naming the part."""
    blocks = {name: block for name, block in data.blocks().items() if isinstance(block, Block)}
    weights = {name: part.weight for name, part in data.parts.items()}
    classes = _check_classes(data, blocks, opened)
    parts: dict[str, DataSource] = {}
    for name, block in blocks.items():
        if isinstance(block, Images) and classes:
            block = block.model_copy(update={"classes": list(classes)})
        if split == "eval" or weights[name]:
            found = _part(name, block, split, opened) if weights[name] else _evaluated(name, block, opened)
            parts |= {} if found is None else {name: found}
    if not parts:
        return None
    _check_shapes(parts)
    about = _about(parts) | ({"classes": list(classes)} if classes else {})
    return Examples(data, split, parts, weights if split == "train" else dict.fromkeys(parts, 1.0), about)


def _part(name: str, block: Block, split: Split, opened: Open) -> DataSource | None:
    """A part. Raises DataError for one without examples, and what opening it raises, with its name."""
    try:
        found = opened(block, split)
    except DataError as error:
        raise DataError(f"train.data.parts.{name}: {error}") from error
    if found is not None and not len(found):
        raise DataError(f"train.data.parts.{name}: its {split} split has no examples; leave the part out, or fill it")
    return found


def _evaluated(name: str, block: Block, opened: Open) -> DataSource | None:
    """A part that is not trained on: what it holds out by the names of its files, else all of it."""
    whole = block if isinstance(block, Tfds) else block.model_copy(update={"eval_split": None})
    if (found := _part(name, whole, "eval", opened)) is not None or isinstance(whole, Tfds):
        return found
    return _part(name, whole.model_copy(update={"eval_path": whole.path}), "eval", opened)


# --- what all parts have in common ------------------------------------------------------------------------------------


def _check_classes(data: Mixed, blocks: Mapping[str, Block], opened: Open) -> tuple[str, ...]:
    """The names of the classes in the order of all parts; none where they are numbers. Raises DataError."""
    found = {
        name: classes
        for name, block in blocks.items()
        if data.parts[name].weight and (classes := _classes(name, block, opened)) is not None
    }
    if not found:
        return tuple(map(str, data.classes or ()))
    first = min(found, key=lambda name: not found[name].is_fixed)
    wanted = found[first].names if data.classes is None else tuple(map(str, data.classes))
    for name, classes in found.items():
        is_same = classes.names == wanted if classes.is_fixed else {*classes.names} == {*wanted}
        if is_same or (data.classes is not None and not classes.is_fixed):  # opening it refuses the others
            continue
        others = f"train.data.parts.{first}" if data.classes is None else "train.data.classes"
        only = sorted({*classes.names} ^ {*wanted})[: labels.MOST_SAID]
        differ = f"of which only one has {labels.listed(only)}" if only else "in another order"
        remedy = "pack it again with data.classes" if classes.is_fixed else "list the classes of both in data.classes"
        raise DataError(
            f"train.data.parts.{name} has the {len(classes.names)} classes {labels.listed(classes.names)}, and "
            f"{others} the {len(wanted)} classes {labels.listed(wanted)}, {differ}; {remedy}"
        )
    return wanted if data.classes is not None or found[first].are_named else ()


def _classes(name: str, block: Block, opened: Open) -> Classes | None:
    """Those of a part; None where nothing says which they are."""
    if isinstance(block, Images):
        try:
            whole = indexed(block, block.path, "train", "path", block.classes)
        except DataError as error:
            raise DataError(f"train.data.parts.{name}: {error}") from error
        numbers = range(int(whole.label_N.max(initial=-1)) + 1)
        return Classes(whole.classes or tuple(map(str, numbers)), bool(whole.classes), False)
    if isinstance(block, Tfds):
        return None
    part = _part(name, block, "train", opened)
    noted = None if part is None else part.about.get("classes")
    return Classes(tuple(noted), True, True) if noted else None


def _check_shapes(parts: Mapping[str, DataSource]) -> None:
    """Raises DataError where the first images of two parts differ in shape or type."""
    first: tuple[str, str] | None = None
    for name, part in parts.items():
        example = part.read_example(0, np.random.default_rng(0))
        if "image" not in example:
            continue
        image = np.asarray(example["image"])
        said = f"{image.dtype}{list(image.shape)}"
        if first is not None and said != first[1]:
            raise DataError(
                f"train.data.parts.{first[0]} has images of {first[1]}, and train.data.parts.{name} of {said}; set "
                "train.data.size, and pack grey images with data.channels: 3"
            )
        first = first or (name, said)


def _about(parts: Mapping[str, DataSource]) -> dict[str, Any]:
    """What is noted of packed tables, whose features are scaled already. Raises DataError where they differ."""
    noted = {name: part.about for name, part in parts.items()}
    tables = [name for name, about in noted.items() if about.get("kind") == "table"]
    if not tables:
        return {}
    first = noted[tables[0]]
    for name, about in noted.items():
        differ = _first_different(first, about)
        if differ is not None:
            raise DataError(
                f"train.data.parts.{tables[0]} and train.data.parts.{name} were packed with another {differ}, so a "
                "feature means another value in each; mix the tables themselves, with source: table"
            )
    return {key: value for key, value in first.items() if key != "files"}


def _first_different(one: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    keys: Sequence[str] = ("kind", "target", *SCALED)
    return next((key for key in keys if one.get(key) != other.get(key)), None)

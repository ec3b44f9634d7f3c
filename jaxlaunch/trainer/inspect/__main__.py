"""Looks at a folder or file of data: `python -m jaxlaunch.trainer.inspect JSON`, what `launcher data` runs.

One JSON object on stdout: what it is, what is in it, and the data block that reads it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.data import arrow, files
from jaxlaunch.trainer.errors import DataError
from jaxlaunch.trainer.inspect import images, tables
from jaxlaunch.trainer.sources import mixture as sources
from jaxlaunch.trainer.sources.images import build, listing, picture
from jaxlaunch.trainer.sources.images.index import joined
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.sources.tables import files as of_tables
from jaxlaunch.trainer.spec import Mixture, TrainSpec
from jaxlaunch.trainer.start.process import print_result, read_spec


def main() -> int:
    """Prints what is at the path of the argument; returns the exit code."""
    asked: dict[str, Any] = json.loads(sys.argv[1])
    return print_result(lambda: looked(**asked) if asked else mixed(read_spec(os.environ)[0]))


def mixed(spec: TrainSpec) -> dict[str, Any]:
    """What each part of a mixture has, and its share of the examples. Raises DataError, SpecError."""
    assert isinstance(spec.data, Mixture), "the launcher asks for no other"
    train, held_out = open_source(spec, "train"), open_source(spec, "eval")
    assert isinstance(train, sources.Mixture), "a part has a weight"
    counts = {"train": train.evaluated_parts, "eval": {} if held_out is None else held_out.evaluated_parts}
    epochs, total = train.epochs(len(train)), sum(part.weight for part in spec.data.parts.values())
    parts = {
        name: {
            "source": part.source,
            **{split: len(ranges.get(name, ())) for split, ranges in counts.items()},
            "share": part.weight / total,
            "epochs": epochs.get(name, 0.0),
        }
        for name, part in spec.data.parts.items()
    }
    return {"kind": "mixture", "splits": {split: sum(map(len, each.values())) for split, each in counts.items()}} | {
        "parts": parts
    }


def looked(path: str, label: str | None, pictures: str | None) -> dict[str, Any]:
    """What is at a path. Raises DataError for what no source of images or tables reads."""
    place = path if remote.is_remote(path) else os.path.abspath(path)
    look = images.looked if _holds_images(place) else tables.looked
    return look(path, place, label, pictures)


def _holds_images(place: str) -> bool:
    """Whether there are images: by the names of the files, of lists and columns by the first."""
    if os.path.splitext(place)[1].lower() in (".npy", ".npz"):
        return False
    try:
        found = listing.found(place, "train")
    except DataError:
        if not _is_table(place):
            raise DataError(
                f"{place} holds neither images ({', '.join(picture.ENDINGS)}, .tar) nor a table "
                f"({', '.join(of_tables.ENDINGS)}); text is source: text, and a class of yours source: torch"
            ) from None
        return False
    if not found.names or found.kind not in ("list", "table"):
        return True
    first = joined(found.root, found.names[0])
    if found.kind == "list":
        row = next((row for _, row in build.rows(first)), {})
        return any(isinstance(each, str) and each.lower().endswith(picture.ENDINGS) for each in row.values())
    return _has_bytes(first)


def _is_table(place: str) -> bool:
    try:
        return all(map(of_tables.is_table, of_tables.found(place, "train", "path")[0]))
    except DataError:
        return False


def _has_bytes(path: str) -> bool:
    import pyarrow
    from pyarrow import parquet

    here = files.here(path)
    try:
        if path.lower().endswith(".parquet"):
            schema = parquet.read_schema(here)
        else:
            schema = arrow.batches(pyarrow.memory_map(here))[0]
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError(f"{path} is truncated or damaged: {error}") from None
    from jaxlaunch.trainer.sources.images import columns

    return any(columns.holds_bytes(schema.field(at).type) for at in range(len(schema.names)))


if __name__ == "__main__":
    sys.exit(main())

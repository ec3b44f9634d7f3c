"""Small images of two classes in every supported layout."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

COLOURS = {"cat": (200, 40, 40), "dog": (40, 40, 200)}


def encode_image(name: str, number: int, form: str = "PNG") -> bytes:
    """An image of a class, another for each number."""
    noise = np.random.default_rng(number).normal(COLOURS[name], 30, (12, 16, 3))
    file = io.BytesIO()
    Image.fromarray(np.clip(noise, 0, 255).astype(np.uint8)).save(file, form)
    return file.getvalue()


def write_folders(root: Path, count: int = 4) -> Path:
    """A folder by class."""
    for name in COLOURS:
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            (root / name / f"{number}.png").write_bytes(encode_image(name, number))
    return root


def make_pairs(count: int = 4) -> list[tuple[str, int]]:
    """Class and number of every image, in the order of `folders`."""
    return [(name, number) for name in COLOURS for number in range(count)]


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    """A tar with these members, in their order."""
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(data)
            file.addfile(about, io.BytesIO(data))
    return path


def write_webdataset(path: Path) -> Path:
    """Write a WebDataset tar of the images in `folders`; half of the labels are in JSON members."""
    members = {}
    for at, (name, number) in enumerate(make_pairs()):
        members[f"{at:04}.png"] = encode_image(name, number)
        as_json = {f"{at:04}.json": json.dumps({"label": name}).encode()}
        members |= as_json if at % 2 else {f"{at:04}.cls": name.encode()}
    return write_tar(path, members)


def make_table() -> pyarrow.Table:
    """The images of `folders` as Hugging Face's datasets has them."""
    rows = [{"bytes": encode_image(name, number), "path": None} for name, number in make_pairs()]
    labels = [list(COLOURS).index(name) for name, _ in make_pairs()]
    features = {
        "image": {"_type": "Image"},
        "label": {"names": list(COLOURS), "_type": "ClassLabel"},
    }
    kind = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    result = pyarrow.table(
        {"image": pyarrow.array(rows, kind), "label": pyarrow.array(labels, pyarrow.int64())}
    )
    return result.replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})}
    )


def save_dataset(folder: Path, compression: str | None = None) -> Path:
    """A folder as `save_to_disk` writes it."""
    folder.mkdir(parents=True)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    options = pyarrow.ipc.IpcWriteOptions(compression=compression)
    built = make_table()
    with pyarrow.ipc.new_stream(
        folder / "data-00000-of-00001.arrow", built.schema, options=options
    ) as writer:
        for batch in built.to_batches(max_chunksize=3):
            writer.write_batch(batch)
    return folder


def export_dataset(folder: Path) -> Path:
    """Parquet files of two splits, as the hub has them."""
    (folder / "data").mkdir(parents=True)
    for split in ("train", "test"):
        parquet.write_table(
            make_table(), folder / "data" / f"{split}-00000-of-00001.parquet", row_group_size=3
        )
    return folder

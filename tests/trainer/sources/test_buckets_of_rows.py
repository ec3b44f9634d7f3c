"""Images and tables in buckets equal local ones, also if the store fails now and then."""

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.trainer.data import files, order
from jaxlaunch.trainer.sources.open import open_source
from jaxlaunch.trainer.spec import TrainSpec
from tests import bucket_server
from tests.bucket_server import Bucket
from tests.trainer.sources.images import made_images
from tests.trainer.sources.tables.test_source import write_formats

BATCH = 4
FAULTS = [
    (kind, name) for name in ("0.png", "a.tar", "t.csv", "t.parquet") for kind in ("503", "cut")
]
met: list[tuple[str, str]] = []  # of FAULTS, in the bucket that is open


@pytest.fixture(scope="module")
def local_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of every kind of data."""
    root = tmp_path_factory.mktemp("here")
    made_images.write_folders(root / "folders")
    (root / "kept").mkdir()
    made_images.write_webdataset(root / "kept" / "a.tar")
    made_images.export_dataset(root / "hub")
    (root / "tables").mkdir()
    write_formats(root / "tables")
    return root


@pytest.fixture(scope="module", params=["gs", "s3"])
def url(
    request: pytest.FixtureRequest, local_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """The same folder in a bucket of which some answers are a 503, or cut."""
    with pytest.MonkeyPatch.context() as patch, bucket_server.serve_bucket() as bucket:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        files.stat_object.cache_clear()
        files._read_block.cache_clear()
        for path in local_folder.rglob("*.*"):
            if path.is_file():
                bucket.objects[f"team/set/{path.relative_to(local_folder)}"] = path.read_bytes()
        with fail_requests(bucket):
            yield f"{request.param}://team/set"


@contextlib.contextmanager
def fail_requests(bucket: Bucket) -> Iterator[None]:
    """Each of FAULTS is there until a request has met it, one after the other."""
    completed = threading.Event()

    def fail() -> None:
        met.clear()
        for bucket.fault in FAULTS:
            while not bucket.is_hit.wait(0.02):
                if completed.is_set():
                    return
            met.append(bucket.fault)
            bucket.is_hit.clear()
        bucket.fault = None

    thread = threading.Thread(target=fail)
    thread.start()
    yield
    completed.set()
    thread.join()


def hash_batches(path: str, source: str, **keys: object) -> list[str]:
    """One of each batch of two epochs, shuffled."""
    data = {"source": source, "path": path, "eval_split": 0.2, **keys}
    result = open_source(TrainSpec.model_validate({"task": "classify", "data": data}), "train")
    assert result is not None and len(result) >= BATCH
    count = 2 * len(result) // BATCH * BATCH
    index_P = order.example_indices(0, count, length=len(result), seed=3, shuffle=True).tolist()
    message = []
    for start in range(0, count, BATCH):
        hashed = hashlib.sha256()
        for index in index_P[start : start + BATCH]:
            for name, value in result[index].items():
                hashed.update(name.encode() + value.tobytes())
        message.append(hashed.hexdigest())
    return message


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("images", "folders"),
        ("images", "kept/a.tar"),
        ("images", "hub/data/train-00000-of-00001.parquet"),
        *(
            ("table", f"tables/t.{ending}")
            for ending in ("csv", "tsv", "jsonl", "parquet", "arrow", "npz")
        ),
    ],
)
def test_batches_equal_those_of_local_files(
    local_folder: Path, url: str, source: str, name: str
) -> None:
    assert hash_batches(f"{url}/{name}", source) == hash_batches(str(local_folder / name), source)
    assert met[:2] == FAULTS[:2] or name != "folders"

"""Sources read objects in gs:// and s3:// as they read files."""

import gzip
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxlaunch import contract
from jaxlaunch.trainer import counts
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.checkpoint import storage
from jaxlaunch.trainer.data import files, records
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError, TrainerError
from jaxlaunch.trainer.sources import array_record, text
from jaxlaunch.trainer.spec import ArrayRecord, Text, TrainSpec
from jaxlaunch.trainer.start import preflight
from jaxlaunch.trainer.text import build, recipe
from tests import bucket_server
from tests.bucket_server import Bucket
from tests.trainer.text import corpora

WORDS = b"".join(
    b"%d: the quick brown fox\n" % number for number in range(60_000)
)  # more than a block


@pytest.fixture(scope="module")
def bucket() -> Iterator[Bucket]:
    with bucket_server.serve_bucket() as server:
        yield server


@pytest.fixture(params=["gs", "s3"])
def url(request, bucket, tmp_path, monkeypatch) -> Iterator[str]:
    """A folder of the bucket, and an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    clear_caches()
    bucket.requests.clear()
    yield f"{request.param}://corpora/{request.param}"
    bucket.objects.clear()
    clear_caches()


def clear_caches() -> None:
    """As another process would begin."""
    files.stat_object.cache_clear()
    files._read_block.cache_clear()


def put_object(bucket: Bucket, url: str, name: str, data: bytes) -> None:
    bucket.objects[f"{url.partition('://')[2]}/{name}"] = data


def test_bucket_documents_and_tokenizer_give_the_local_rows(bucket, url, tmp_path) -> None:
    corpora.save_tokenizer(tmp_path / "tokenizer")
    corpora.write_lines(tmp_path / "a.jsonl", corpora.make_texts(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in (
        "a.jsonl",
        "b.jsonl.gz",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ):
        put_object(bucket, url, name, (tmp_path / name).read_bytes())
    built = [
        recipe.make_recipe(
            Text(source="text", path=f"{place}/*.jsonl*", tokenizer=f"{place}/tokenizer"), 16
        )
        for place in (url, str(tmp_path))
    ]
    # A store says what its objects are; files are hashed.
    assert built[0].address != built[1].address
    there, here = (build.build_rows(item, tmp_path / f"out{at}") for at, item in enumerate(built))
    assert there.pop("address") != here.pop("address")
    assert there == here and there["documents"] > 30
    words = "is neither bytes nor a folder or file of a tokenizer.json"
    with pytest.raises(SpecError, match=words):
        recipe.make_recipe(Text(source="text", path=f"{url}/*.jsonl", tokenizer=f"{url}/gone"), 16)


def requested_ranges(bucket: Bucket) -> list[str]:
    return [asked for method, _, asked in bucket.requests if method == "GET" and asked]


def open_stream(url: str, **more: Any) -> Any:
    return text.open_stream(
        Text(source="text", path=f"{url}/*.txt", eval_split=0.0, **more), 100, "train"
    )


def test_bucket_text_equals_local_text(bucket, url, tmp_path) -> None:
    for name, data in (
        ("a.txt", WORDS),
        ("b.txt", b"end"),
        ("notes.md", b"other"),
        ("deep/c.txt", b"deeper"),
    ):
        put_object(bucket, url, name, data)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    there, here = open_stream(url), open_stream(str(tmp_path))
    assert there.bytes == here.bytes == len(WORDS) + 3
    for index in (0, len(there) // 2, len(there) - 1):
        np.testing.assert_array_equal(there[index]["tokens"], here[index]["tokens"])
    assert there.fingerprint() == here.fingerprint()


def test_window_is_requested_once(bucket, url) -> None:
    put_object(bucket, url, "a.txt", WORDS)
    source = open_stream(url)
    window = source[3]["tokens"]
    assert requested_ranges(bucket) == [f"bytes=0-{files.BLOCK_BYTES - 1}"]
    clear_caches()
    np.testing.assert_array_equal(open_stream(url)[3]["tokens"], window)
    assert len(requested_ranges(bucket)) == 1  # the other process found it on the disk
    source[len(source) - 1]
    assert requested_ranges(bucket)[1:] == [f"bytes={files.BLOCK_BYTES}-{len(WORDS) - 1}"]


def test_cached_block_is_read_partially(bucket, url, monkeypatch) -> None:
    put_object(bucket, url, "a.txt", WORDS)
    files.read_object(f"{url}/a.txt", 0, len(WORDS))
    counts: list[int] = []
    read = os.pread

    def counted(number: int, count: int, offset: int) -> bytes:
        counts.append(count)
        return read(number, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    clear_caches()
    for offset in (7, files.BLOCK_BYTES - 50):
        assert files.read_object(f"{url}/a.txt", offset, 100) == WORDS[offset : offset + 100]
    assert counts == [100, 50, 50]


def test_changed_object_is_fetched_again(bucket, url) -> None:
    put_object(bucket, url, "a.txt", b"old " * 100)
    assert bytes(open_stream(url)[0]["tokens"][:4].astype(np.uint8)) == b"old "
    put_object(bucket, url, "a.txt", b"newer " * 100)
    clear_caches()
    assert bytes(open_stream(url)[0]["tokens"][:6].astype(np.uint8)) == b"newer "


def test_object_truncated_during_a_run_is_reported(bucket, url) -> None:
    put_object(bucket, url, "a.txt", WORDS)
    source = open_stream(url)
    put_object(bucket, url, "a.txt", WORDS[:50])
    with pytest.raises((DataError, StorageError), match=r"a\.txt"):
        source[1]
    bucket.objects.clear()
    with pytest.raises(DataError, match=r"a\.txt existed when the run began"):
        source[1]


def test_bucket_records_equal_local_records(bucket, url, tmp_path) -> None:
    for shard, numbers in enumerate([range(4), range(4, 10)]):
        path = tmp_path / f"part-{shard}.array_record"
        records.write(path, ({"x": np.int32(number)} for number in numbers))
        put_object(bucket, url, path.name, path.read_bytes())
    data = ArrayRecord(source="array_record", path=f"{url}/part-*")
    before = counts.keyed_totals().get("bucket_read_bytes", 0)
    source = array_record.open_source(data, "train")
    assert [int(source[index]["x"]) for index in range(10)] == list(range(10))
    size = sum(path.stat().st_size for path in tmp_path.glob("part-*"))
    assert counts.keyed_totals()["bucket_read_bytes"] == before + size
    asked = len(requested_ranges(bucket))
    assert asked == 2
    here = array_record.open_source(
        ArrayRecord(source="array_record", path=f"{tmp_path}/part-*"), "train"
    )
    assert source.fingerprint() == here.fingerprint()
    put_object(bucket, url, "part-2", b"a,b\n1,2\n")
    with pytest.raises(DataError, match=r"//corpora/.*/part-2 is not an array_record file"):
        array_record.open_source(data, "train")


def test_unmatched_pattern_lists_the_folder(bucket, url) -> None:
    put_object(bucket, url, "train.text", b"x")
    with pytest.raises(DataError, match=f"'{url}/\\*.txt' matches no file; {url} holds train.text"):
        files.match_files(f"{url}/*.txt")


@pytest.mark.parametrize(
    ("end", "hint"),
    [
        ("", "holds train.text"),
        ("/", "holds train.text"),
        ("/*.t?t", "holds train.text"),
        ("*", "in full"),
    ],
)
def test_bucket_without_a_path_is_reported_with_its_content(bucket, url, end, hint) -> None:
    scheme = url.partition("://")[0]
    bucket.objects["shelf/train.text"] = b"x"
    with pytest.raises(DataError, match=rf"'{scheme}://shelf.*' matches no file; .*{hint}"):
        files.match_files(f"{scheme}://shelf{end}")


def test_full_disk_only_slows_the_run(bucket, url, monkeypatch) -> None:
    put_object(bucket, url, "a.txt", WORDS)
    put_object(bucket, url, "b.array_record", WORDS)
    monkeypatch.setattr(files, "MIN_FREE_SHARE", 1.0)
    source = open_stream(url)
    assert bytes(source[0]["tokens"].astype(np.uint8)) == WORDS[:101]
    assert not list(files.cache_folder().rglob("0"))
    with pytest.raises(StorageError, match="has no room for .*; set XDG_CACHE_HOME"):
        files.copy_object(f"{url}/b.array_record")


def test_unwritable_cache_is_a_storage_error(bucket, url, tmp_path, monkeypatch) -> None:
    put_object(bucket, url, "a.array_record", WORDS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    words = r"a\.array_record cannot be copied to .*; set XDG_CACHE_HOME"
    with pytest.raises(StorageError, match=words):
        array_record.open_source(
            ArrayRecord(source="array_record", path=f"{url}/*.array_record"), "train"
        )


@pytest.mark.parametrize(("url", "extra"), [("gs://team-b/x", "gcs"), ("s3://team-b/x", "s3")])
def test_missing_package_of_a_store_names_the_extra(url, extra, monkeypatch) -> None:
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr("fsspec.registry", {})
    for act in (storage.check_writable, files.match_files):
        with pytest.raises(SpecError, match=rf"= {url}: .* is not installed: .*{extra}") as caught:
            act(url)
        assert caught.value.code == 64


def test_compilation_cache_reports_a_missing_package(monkeypatch) -> None:
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr("fsspec.registry", {})
    with pytest.raises(
        SpecError,
        match="train.compile_cache = s3://team-b/x: s3:// needs s3fs, which is not installed",
    ):
        preflight.check_cache(
            TrainSpec.model_validate({"task": "a:B", "compile_cache": "s3://team-b/x"})
        )


def test_error_of_a_store_is_reported_in_one_sentence(url, monkeypatch) -> None:
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.open", lambda *_: 1 / 0)
    words = f"train.checkpoint.path = {url} cannot be written: .*division by zero"
    with pytest.raises(StorageError, match=words):
        storage.check_writable(url)


def make_raiser(
    name: str, module: str, base: type[Exception] = Exception, **attributes: Any
) -> Any:
    """A function that raises as a client of a store does."""
    error = type(name, (base,), {"__module__": module, **attributes})("no")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "code"),
    [
        (make_raiser("Forbidden", "s3fs.errors", PermissionError), 65),
        (make_raiser("NoCredentialsError", "botocore.exceptions"), 65),
        (make_raiser("HttpError", "gcsfs.retry", code=401), 65),
        (make_raiser("EndpointConnectionError", "botocore.exceptions"), 84),
        (make_raiser("HttpError", "gcsfs.retry", code=503), 84),
    ],
)
def test_store_errors_have_the_right_exit_code(url, monkeypatch, fail, code) -> None:
    with pytest.raises(TrainerError, match=f"listing {url}/\\*.txt failed") as caught:
        monkeypatch.setattr(remote, "open_filesystem", lambda _: SimpleNamespace(glob=fail))
        files.match_files(f"{url}/*.txt")
    assert caught.value.code == code
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.open", fail)
    words = f"train.checkpoint.path = {url} cannot be written"
    with pytest.raises(TrainerError, match=words) as caught:
        storage.check_writable(url)
    assert caught.value.code == {65: 64}.get(code, code)


def test_unavailable_compilation_cache_does_not_end_the_run(url, monkeypatch) -> None:
    away = make_raiser("EndpointConnectionError", "botocore.exceptions")
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.exists", away)
    preflight.check_cache(TrainSpec.model_validate({"task": "a:B", "compile_cache": url}))


def test_deleted_bucket_is_not_created_again(bucket, url, monkeypatch) -> None:
    name = url.split("/")[2]
    bucket.deleted_buckets.add(name)
    words = f"{url} cannot be written: the bucket {url.split('/')[0]}//{name} does not exist"
    with pytest.raises(SpecError, match=words):
        storage.check_writable(url)
    # The run has trained, so the bucket existed.
    monkeypatch.setenv(contract.SAVED, "10")
    with pytest.raises(StorageError, match=words):
        storage.check_writable(url)
    assert bucket.deleted_buckets == {name}
    bucket.deleted_buckets.clear()


def test_unsupported_scheme_is_refused() -> None:
    for url in ("http://host/x", "hdfs://host/x", "az://b/x"):
        with pytest.raises(SpecError, match=f"{url}: .* use gs:// and s3://"):
            storage.check_writable(url)

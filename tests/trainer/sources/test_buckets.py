"""Sources read objects in gs:// and s3:// as they read files: from a local server, through gcsfs and s3fs."""

import gzip
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
    forget()
    bucket.requests.clear()
    yield f"{request.param}://corpora/{request.param}"
    bucket.objects.clear()
    forget()


def forget() -> None:
    """As another process would begin."""
    files.stat_object.cache_clear()
    files._read_block.cache_clear()


def put(bucket: Bucket, url: str, name: str, data: bytes) -> None:
    bucket.objects[f"{url.partition('://')[2]}/{name}"] = data


def test_documents_and_a_tokenizer_in_a_bucket_are_prepared_as_those_on_the_disk(
    bucket, url, tmp_path
) -> None:
    corpora.saved(tmp_path / "tokenizer")
    corpora.lines(tmp_path / "a.jsonl", corpora.texts(20))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    for name in (
        "a.jsonl",
        "b.jsonl.gz",
        "tokenizer/tokenizer.json",
        "tokenizer/tokenizer_config.json",
    ):
        put(bucket, url, name, (tmp_path / name).read_bytes())
    made = [
        recipe.make_recipe(
            Text(source="text", path=f"{place}/*.jsonl*", tokenizer=f"{place}/tokenizer"), 16
        )
        for place in (url, str(tmp_path))
    ]
    assert made[0].address != made[1].address  # a store says what its objects are; files are hashed
    there, here = (build.build_rows(each, tmp_path / f"out{at}") for at, each in enumerate(made))
    assert there.pop("address") != here.pop("address")
    assert there == here and there["documents"] > 30
    with pytest.raises(
        SpecError, match="is neither bytes nor a folder or file of a tokenizer.json"
    ):
        recipe.make_recipe(Text(source="text", path=f"{url}/*.jsonl", tokenizer=f"{url}/gone"), 16)


def ranges(bucket: Bucket) -> list[str]:
    return [asked for method, _, asked in bucket.requests if method == "GET" and asked]


def opened(url: str, **more: Any) -> Any:
    return text.open_stream(
        Text(source="text", path=f"{url}/*.txt", eval_split=0.0, **more), 100, "train"
    )


def test_text_in_a_bucket_is_the_text_on_the_disk_to_the_byte_and_the_fingerprint(
    bucket, url, tmp_path
) -> None:
    for name, data in (
        ("a.txt", WORDS),
        ("b.txt", b"end"),
        ("notes.md", b"other"),
        ("deep/c.txt", b"deeper"),
    ):
        put(bucket, url, name, data)
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    there, here = opened(url), opened(str(tmp_path))
    assert there.bytes == here.bytes == len(WORDS) + 3
    for index in (0, len(there) // 2, len(there) - 1):
        np.testing.assert_array_equal(there[index]["tokens"], here[index]["tokens"])
    assert there.fingerprint() == here.fingerprint()


def test_a_window_costs_a_range_once_and_then_nothing(bucket, url) -> None:
    put(bucket, url, "a.txt", WORDS)
    source = opened(url)
    window = source[3]["tokens"]
    assert ranges(bucket) == [f"bytes=0-{files.BLOCK_BYTES - 1}"]
    forget()
    np.testing.assert_array_equal(opened(url)[3]["tokens"], window)
    assert len(ranges(bucket)) == 1  # the other process found it on the disk
    source[len(source) - 1]
    assert ranges(bucket)[1:] == [f"bytes={files.BLOCK_BYTES}-{len(WORDS) - 1}"]


def test_a_window_of_a_block_on_the_disk_does_not_read_the_block(bucket, url, monkeypatch) -> None:
    put(bucket, url, "a.txt", WORDS)
    files.read_object(f"{url}/a.txt", 0, len(WORDS))
    counts: list[int] = []
    read = os.pread

    def counted(number: int, count: int, offset: int) -> bytes:
        counts.append(count)
        return read(number, count, offset)

    monkeypatch.setattr(os, "pread", counted)
    forget()
    for offset in (7, files.BLOCK_BYTES - 50):
        assert files.read_object(f"{url}/a.txt", offset, 100) == WORDS[offset : offset + 100]
    assert counts == [100, 50, 50]


def test_an_object_that_was_changed_is_read_anew(bucket, url) -> None:
    put(bucket, url, "a.txt", b"old " * 100)
    assert bytes(opened(url)[0]["tokens"][:4].astype(np.uint8)) == b"old "
    put(bucket, url, "a.txt", b"newer " * 100)
    forget()
    assert bytes(opened(url)[0]["tokens"][:6].astype(np.uint8)) == b"newer "


def test_an_object_cut_short_while_the_run_reads_is_named(bucket, url) -> None:
    put(bucket, url, "a.txt", WORDS)
    source = opened(url)
    put(bucket, url, "a.txt", WORDS[:50])
    with pytest.raises((DataError, StorageError), match=r"a\.txt"):
        source[1]
    bucket.objects.clear()
    with pytest.raises(DataError, match=r"a\.txt existed when the run began"):
        source[1]


def test_records_in_a_bucket_are_those_on_the_disk(bucket, url, tmp_path) -> None:
    for shard, numbers in enumerate([range(4), range(4, 10)]):
        path = tmp_path / f"part-{shard}.array_record"
        records.write(path, ({"x": np.int32(number)} for number in numbers))
        put(bucket, url, path.name, path.read_bytes())
    data = ArrayRecord(source="array_record", path=f"{url}/part-*")
    source = array_record.open_source(data, "train")
    assert [int(source[index]["x"]) for index in range(10)] == list(range(10))
    asked = len(ranges(bucket))
    assert asked == 2
    here = array_record.open_source(
        ArrayRecord(source="array_record", path=f"{tmp_path}/part-*"), "train"
    )
    assert source.fingerprint() == here.fingerprint()
    put(bucket, url, "part-2", b"a,b\n1,2\n")
    with pytest.raises(DataError, match=r"//corpora/.*/part-2 is not an array_record file"):
        array_record.open_source(data, "train")


def test_a_pattern_that_matches_nothing_says_what_is_there(bucket, url) -> None:
    put(bucket, url, "train.text", b"x")
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
def test_a_bucket_alone_is_bad_data_and_what_it_holds_is_said(bucket, url, end, hint) -> None:
    scheme = url.partition("://")[0]
    bucket.objects["shelf/train.text"] = b"x"
    with pytest.raises(DataError, match=rf"'{scheme}://shelf.*' matches no file; .*{hint}"):
        files.match_files(f"{scheme}://shelf{end}")


def test_a_full_disk_costs_time_and_not_the_run(bucket, url, monkeypatch) -> None:
    put(bucket, url, "a.txt", WORDS)
    put(bucket, url, "b.array_record", WORDS)
    monkeypatch.setattr(files, "MIN_FREE_SHARE", 1.0)
    source = opened(url)
    assert bytes(source[0]["tokens"].astype(np.uint8)) == WORDS[:101]
    assert not list(files.cache_folder().rglob("0"))
    with pytest.raises(StorageError, match="has no room; set XDG_CACHE_HOME"):
        files.copy_object(f"{url}/b.array_record")


def test_a_cache_that_cannot_be_written_is_said_and_is_not_taken_for_a_bad_file(
    bucket, url, tmp_path, monkeypatch
) -> None:
    put(bucket, url, "a.array_record", WORDS)
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        StorageError, match=r"a\.array_record cannot be copied to .*; set XDG_CACHE_HOME"
    ):
        array_record.open_source(
            ArrayRecord(source="array_record", path=f"{url}/*.array_record"), "train"
        )


@pytest.mark.parametrize(("url", "extra"), [("gs://team-b/x", "gcs"), ("s3://team-b/x", "s3")])
def test_a_store_whose_package_is_not_installed_is_a_sentence_that_names_the_extra(
    url, extra, monkeypatch
) -> None:
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr("fsspec.registry", {})
    for act in (storage.check_writable, files.match_files):
        with pytest.raises(SpecError, match=rf"= {url}: .* is not installed: .*{extra}") as caught:
            act(url)
        assert caught.value.code == 64


def test_a_compilation_cache_in_a_store_whose_package_is_not_installed_is_that_sentence_too(
    monkeypatch,
) -> None:
    monkeypatch.setattr(remote.importlib.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr("fsspec.registry", {})
    with pytest.raises(
        SpecError,
        match="train.compile_cache = s3://team-b/x: s3:// needs s3fs, which is not installed",
    ):
        preflight.check_cache(
            TrainSpec.model_validate({"task": "a:B", "compile_cache": "s3://team-b/x"})
        )


def test_a_store_that_answers_with_an_error_of_its_own_is_a_sentence(url, monkeypatch) -> None:
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.open", lambda *_: 1 / 0)
    with pytest.raises(
        StorageError, match=f"train.checkpoint.path = {url} cannot be written: .*division by zero"
    ):
        storage.check_writable(url)


def raising(name: str, module: str, base: type[Exception] = Exception, **attributes: Any) -> Any:
    """A function that raises as a client of a store does."""
    error = type(name, (base,), {"__module__": module, **attributes})("no")

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize(
    ("fail", "code"),
    [
        (raising("Forbidden", "s3fs.errors", PermissionError), 65),
        (raising("NoCredentialsError", "botocore.exceptions"), 65),
        (raising("HttpError", "gcsfs.retry", code=401), 65),
        (raising("EndpointConnectionError", "botocore.exceptions"), 84),
        (raising("HttpError", "gcsfs.retry", code=503), 84),
    ],
)
def test_a_store_that_refuses_is_the_specification_s_fault_and_one_that_is_away_is_storage_s(
    url, monkeypatch, fail, code
) -> None:
    with pytest.raises(TrainerError, match=f"listing {url}/\\*.txt failed") as caught:
        monkeypatch.setattr(remote, "open_filesystem", lambda _: SimpleNamespace(glob=fail))
        files.match_files(f"{url}/*.txt")
    assert caught.value.code == code
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.open", fail)
    with pytest.raises(
        TrainerError, match=f"train.checkpoint.path = {url} cannot be written"
    ) as caught:
        storage.check_writable(url)
    assert caught.value.code == {65: 64}.get(code, code)


def test_a_compilation_cache_in_a_bucket_that_is_away_costs_no_run(url, monkeypatch) -> None:
    away = raising("EndpointConnectionError", "botocore.exceptions")
    monkeypatch.setattr("etils.epath.backend._FileSystemSpecBackend.exists", away)
    preflight.check_cache(TrainSpec.model_validate({"task": "a:B", "compile_cache": url}))


def test_a_url_of_another_kind_is_refused_by_name() -> None:
    for url in ("http://host/x", "hdfs://host/x", "az://b/x"):
        with pytest.raises(SpecError, match=f"{url}: .* use gs:// and s3://"):
            storage.check_writable(url)

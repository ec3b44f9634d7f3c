"""The copy of a run folder in a bucket."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from jaxlaunch import regular_files
from jaxlaunch.trainer.buckets import faults, remote
from jaxlaunch.trainer.buckets.mirror import Mirror, _mirror_until_end
from jaxlaunch.trainer.errors import StorageError
from tests import bucket_server
from tests.bucket_server import Bucket

HOME = "runs-of-us/lm/.jaxlaunch"
URL = f"gs://{HOME}"
PROGRAM = [sys.executable, "-m", "jaxlaunch.trainer.buckets.mirror"]


@pytest.fixture(scope="module")
def server() -> Iterator[Bucket]:
    with bucket_server.serve_bucket() as server:
        yield server


@pytest.fixture
def bucket(server) -> Iterator[Bucket]:
    yield server
    server.objects.clear()
    server.deleted_buckets.clear()


def put_files(bucket: Bucket, **files: str) -> None:
    bucket.objects.update(
        {f"{HOME}/{name.replace('__', '/')}": text.encode() for name, text in files.items()}
    )


def read_files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_pull_fetches_files_and_push_skips_unchanged_ones(bucket, tmp_path) -> None:
    remaining = {
        "attempts.jsonl": "1\n",
        "metrics.jsonl": "2\n",
        "logs/rank-0.log": "3\n",
        "logs/rank-90.log": "4\n",
    }
    put_files(bucket, **remaining)
    mirror = Mirror(URL, tmp_path)
    mirror.pull(range(1), logs_only=False)
    actual = read_files(tmp_path)
    assert actual == {name: text for name, text in remaining.items() if "90" not in name}
    bucket.requests.clear()
    mirror.push(at_once=True)
    assert bucket.requests == []


def test_other_hosts_fetch_only_their_logs(bucket, tmp_path) -> None:
    put_files(
        bucket, **{"attempts.jsonl": "1\n", "logs/rank-0.log": "2\n", "logs/rank-9.log": "3\n"}
    )
    Mirror(URL, tmp_path).pull(range(8, 10), logs_only=True)
    assert read_files(tmp_path) == {"logs/rank-9.log": "3\n"}


def test_moved_ranks_continue_their_logs(bucket, tmp_path) -> None:
    put_files(bucket, **{"logs/rank-1.log": "by host 1\n", "logs/rank-2.log": "by host 2\n"})
    mirror = Mirror(URL, tmp_path)
    mirror.pull(range(1, 2), logs_only=True)
    (tmp_path / "logs" / "rank-1.log").write_text("by host 1\nmore\n")
    mirror.move_ranks(range(1, 2), range(2, 3))
    assert read_files(tmp_path) == {"logs/rank-2.log": "by host 2\n"}
    assert bucket.objects[f"{HOME}/logs/rank-1.log"] == b"by host 1\nmore\n"
    with (tmp_path / "logs" / "rank-2.log").open("a") as file:
        file.write("by host 1\n")
    put_files(bucket, **{"logs/rank-1.log": "by host 1\nmore\nby host 3\n"})
    mirror.move_ranks(range(2, 3), range(1, 2))
    assert bucket.objects[f"{HOME}/logs/rank-2.log"] == b"by host 2\nby host 1\n"
    assert read_files(tmp_path) == {"logs/rank-1.log": "by host 1\nmore\nby host 3\n"}


def test_logs_of_earlier_starts_are_not_fetched(bucket, tmp_path) -> None:
    logs = {
        f"{start}logs/rank-{rank}.log": "1\n"
        for start in ("", "starts/2/", "starts/10/")
        for rank in (0, 9)
    }
    put_files(bucket, **logs, **{"starts/2/summary.json": "2\n"})
    Mirror(URL, tmp_path / "leader").pull(range(1), logs_only=False)
    Mirror(URL, tmp_path / "other").pull(range(9, 10), logs_only=True)
    newest = {f"starts/10/logs/rank-{rank}.log": "1\n" for rank in (0, 9)}
    assert read_files(tmp_path / "leader") == newest | {"starts/2/summary.json": "2\n"}
    assert read_files(tmp_path / "other") == {"starts/10/logs/rank-9.log": "1\n"}


def test_new_bucket_gives_an_empty_folder(bucket, tmp_path) -> None:
    Mirror(URL, tmp_path).pull(range(1), logs_only=False)
    assert read_files(tmp_path) == {}


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_deleted_bucket_is_an_error(bucket, tmp_path, scheme: str) -> None:
    bucket.deleted_buckets.add("runs-of-us")
    mirror = Mirror(f"{scheme}://{HOME}", tmp_path)
    words = f"the bucket {scheme}://runs-of-us does not exist"
    with pytest.raises(StorageError, match=f"reading the run folder .* failed: {words}"):
        mirror.pull(range(1), logs_only=False)
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "attempts.jsonl").write_text("{}")
    with pytest.raises(StorageError, match=f"writing .* failed: {words}"):
        mirror.push(at_once=True)
    assert bucket.deleted_buckets == {"runs-of-us"}
    bucket.deleted_buckets.clear()
    mirror.push(at_once=True)
    assert set(bucket.objects) == {f"{HOME}/summary.json", f"{HOME}/attempts.jsonl"}


def test_process_reports_a_deleted_bucket(bucket, tmp_path) -> None:
    bucket.deleted_buckets.add("runs-of-us")
    argv = [*PROGRAM, URL, str(tmp_path), "--ranks", "0", "1"]
    completed = subprocess.run(argv, input="", capture_output=True, text=True)
    assert completed.returncode == 84 and not completed.stderr
    assert "the bucket gs://runs-of-us does not exist" in json.loads(completed.stdout)["error"]


def test_file_that_is_removed_meanwhile_is_skipped(bucket, tmp_path, monkeypatch) -> None:
    put_files(bucket, **{"attempts.jsonl": "1\n", "summary.json": "2\n"})
    mirror = Mirror(URL, tmp_path)
    monkeypatch.setattr(
        remote, "list_names", lambda url: ["attempts.jsonl", "gone.json", "summary.json"]
    )
    mirror.pull(range(1), logs_only=False)
    assert read_files(tmp_path) == {"attempts.jsonl": "1\n", "summary.json": "2\n"}
    monkeypatch.setattr(mirror, "_file_states", lambda: {"gone.json": (1, 1)})
    mirror.push(at_once=True)


def test_file_that_cannot_be_read_does_not_keep_others_back(bucket, tmp_path, monkeypatch) -> None:
    names = ["a.json", "b.json", "c.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
    os.mkfifo(tmp_path / "pipe")
    mirror = Mirror(URL, tmp_path)
    open_regular = regular_files.open_regular

    def refuse(path: str, flags: int) -> int:
        if path.endswith("a.json"):
            raise OSError(errno.EIO, "Input/output error", path)
        return open_regular(path, flags)

    with monkeypatch.context() as patch:
        patch.setattr(regular_files, "open_regular", refuse)
        with pytest.raises(OSError, match=r"Input/output error: .*a\.json"):
            mirror.push(at_once=True)
    assert set(bucket.objects) == {f"{HOME}/b.json", f"{HOME}/c.json"}
    mirror.push(at_once=True)
    assert set(bucket.objects) == {f"{HOME}/{name}" for name in names}


def test_unreadable_file_is_reported_at_the_end(bucket, tmp_path, capfd, monkeypatch) -> None:
    read_end, write_end = os.pipe()
    os.close(write_end)
    monkeypatch.setattr("jaxlaunch.trainer.buckets.mirror.os.read", lambda fd, count: b"")
    monkeypatch.setattr(
        "jaxlaunch.trainer.buckets.mirror.select.select", lambda *_: ([read_end], [], [])
    )
    mirror = Mirror(URL, tmp_path)
    monkeypatch.setattr(mirror, "_file_states", MagicMock(side_effect=OSError(errno.EIO, "no")))
    assert _mirror_until_end(mirror, range(1)) == 84
    os.close(read_end)
    shown = capfd.readouterr()
    assert shown.err == "mirror: [Errno 5] no\n" and shown.out == ""


def test_attempts_of_another_host_are_merged(bucket, tmp_path) -> None:
    put_files(bucket, **{"attempts.jsonl": '{"attempt": 1}\n'})
    mirror = Mirror(URL, tmp_path)
    mirror.pull(range(1), logs_only=False)
    put_files(bucket, **{"attempts.jsonl": '{"attempt": 1}\n{"attempt": 2}\n'})
    with (tmp_path / "attempts.jsonl").open("a") as file:
        file.write('{"attempt": 3}\n')
    mirror.push(at_once=True)
    result = bucket.objects[f"{HOME}/attempts.jsonl"].decode().splitlines()
    assert sorted(result) == ['{"attempt": 1}', '{"attempt": 2}', '{"attempt": 3}']
    assert result[-1] == '{"attempt": 3}'


def test_drafts_are_skipped_and_large_files_are_put_less_often(bucket, tmp_path) -> None:
    mirror = Mirror(URL, tmp_path)
    for name, size in (
        (".summary.json.7", 1),
        ("metrics.jsonl.tmp", 1),
        ("logs/rank-0.log", 1),
        ("trace", 2**19),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x" * size)
    mirror.push()
    actual = {name.removeprefix(f"{HOME}/") for name in bucket.objects}
    assert actual == {"logs/rank-0.log", "trace"}
    for name in ("trace", "summary.json"):
        with (tmp_path / name).open("ab") as file:
            file.write(b"more")
    mirror.push()
    assert f"{HOME}/summary.json" in bucket.objects
    assert bucket.objects[f"{HOME}/trace"] == b"x" * 2**19
    mirror.push(at_once=True)
    assert bucket.objects[f"{HOME}/trace"].endswith(b"more")


def test_failed_push_is_repeated(bucket, tmp_path, monkeypatch) -> None:
    mirror = Mirror(URL, tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    with monkeypatch.context() as patch:
        patch.setattr(remote, "open_filesystem", lambda url: 1 / 0)
        words = r"writing gs://.*/summary.json failed: ZeroDivisionError"
        with pytest.raises(StorageError, match=words):
            mirror.push(at_once=True)
    mirror.push(at_once=True)
    assert bucket.objects[f"{HOME}/summary.json"] == b"{}"


def test_process_reports_ready_and_pushes_at_the_end(bucket, tmp_path) -> None:
    put_files(bucket, **{"attempts.jsonl": "1\n"})
    argv = [*PROGRAM, URL, str(tmp_path), "--ranks", "0", "1", "--whole"]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        assert read_files(tmp_path) == {"attempts.jsonl": "1\n"}
        process.terminate()  # it does not end by it: what ranks write while they stop is put too
        (tmp_path / "summary.json").write_text("{}")
        process.stdin.close()
        assert process.stdout.read() == "done\n" and process.wait() == 0
    assert bucket.objects[f"{HOME}/summary.json"] == b"{}"


def test_unsupported_url_is_reported(tmp_path) -> None:
    argv = [*PROGRAM, "http://host/x", str(tmp_path), "--ranks", "0", "1"]
    completed = subprocess.run(argv, input="", capture_output=True, text=True)
    assert (
        completed.returncode == 84 and "http://host/x" in completed.stdout and not completed.stderr
    )


@pytest.mark.parametrize("status", ["401", "403"])
def test_refusal_is_raised_without_a_logged_traceback(
    bucket: Bucket, status: str, caplog: pytest.LogCaptureFixture
) -> None:
    bucket.fault = (status, "refused")
    with pytest.raises(Exception) as refused:  # noqa: PT011 - gcsfs has a class of its own
        remote.open_filesystem(URL).cat_file(f"{URL}/refused")
    bucket.fault = None
    assert faults.is_refusal(refused.value)
    assert [record for record in caplog.records if record.exc_info] == []

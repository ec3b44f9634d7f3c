import contextlib
import json
import pathlib
import resource
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from jaxlaunch.runs.journal import Journal, TensorBoard


def read(path: pathlib.Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path: pathlib.Path, start: int, steps: range, **values: float) -> None:
    journal = Journal(str(path), start)
    for step in steps:
        journal.write(step, {"loss": step / 3, **values})
    journal.close()


def test_written_line_is_flushed(tmp_path: pathlib.Path) -> None:
    journal = Journal(str(tmp_path / "run" / "metrics.jsonl"), 0)
    journal.write(10, {"loss": 1 / 3})
    assert read(tmp_path / "run" / "metrics.jsonl") == [{"step": 10, "loss": 1 / 3}]
    journal.close()


def test_resumed_journal_drops_later_lines(
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 38), attempt=1.0)
    write(path, 30, range(31, 61), attempt=2.0)
    lines = read(path)
    assert [line["step"] for line in lines] == list(range(1, 61))
    assert [line["attempt"] for line in lines] == [1.0] * 30 + [2.0] * 30


def test_journal_from_start_is_empty(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "metrics.jsonl", 0, range(1, 5))
    write(tmp_path / "metrics.jsonl", 0, range(1, 3))
    assert len(read(tmp_path / "metrics.jsonl")) == 2


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3, "loss": 1.0}', b"\xff\x00\n", b"[]\n", b'{"a": 1}\n']
)
def test_unreadable_line_is_dropped(tmp_path: pathlib.Path, torn: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 0, range(1, 3))
    path.write_bytes(path.read_bytes() + torn)
    write(path, 10, range(11, 12))
    assert [line["step"] for line in read(path)] == [1, 2, 11]


def test_step_is_written_once(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "eval.jsonl", 0, range(10, 11))
    write(tmp_path / "eval.jsonl", 10, range(10, 12), again=1.0)
    assert [line.get("again") for line in read(tmp_path / "eval.jsonl")] == [None, 1.0]


@contextlib.contextmanager
def limit_file_size(size_bytes: int) -> Iterator[None]:
    """Let writes fail as on a full disk, once a file has this size."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)


@pytest.mark.parametrize("is_repeated", [True, False])
@pytest.mark.parametrize("size_bytes", [25, 30])
def test_step_whose_write_failed_is_written_later(
    tmp_path: pathlib.Path, is_repeated: bool, size_bytes: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(str(path), 0)
    journal.write(1, {"loss": 0.123456})
    with limit_file_size(size_bytes), pytest.raises(OSError, match="too large"):
        journal.write(2, {"loss": 0.5})
    if is_repeated:
        journal.write(2, {"loss": 0.5})
        assert read(path)[1:] == [{"step": 2, "loss": 0.5}]
    journal.write(3, {"loss": 0.25})
    assert [line["step"] for line in read(path)] == [1, 2, 3]
    journal.close()


@pytest.mark.parametrize("size_bytes", [25, 30, 100])
def test_values_of_a_failed_step_are_merged(tmp_path: pathlib.Path, size_bytes: int) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(str(path), 0)
    journal.write(1, {"loss": 0.123456})
    with limit_file_size(size_bytes), contextlib.suppress(OSError):
        journal.merge_step(2, {"loss": 0.5})
    journal.merge_step(2, {"accuracy": 0.75})
    journal.close()
    assert read(path)[1:] == [{"step": 2, "loss": 0.5, "accuracy": 0.75}]


def test_closing_a_journal_writes_what_failed(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "metrics.jsonl"
    journal = Journal(str(path), 0)
    with limit_file_size(0), pytest.raises(OSError, match="too large"):
        journal.write(1, {"loss": 0.5})
    journal.close()
    assert read(path) == [{"step": 1, "loss": 0.5}]


def test_value_that_is_not_finite_is_null(tmp_path: pathlib.Path) -> None:
    write(tmp_path / "metrics.jsonl", 0, range(1, 2), grad_norm=float("inf"))
    assert read(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None


def events(folder: pathlib.Path) -> list[Any]:
    """Return every event of a TensorBoard folder, with checked checksums."""
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    result = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            (size,), (check,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
            assert check == masked_crc32c(data[:8])
            body, (check,) = data[12 : 12 + size], struct.unpack("<I", data[12 + size : 16 + size])
            assert check == masked_crc32c(body)
            result.append(Event.FromString(body))
            data = data[16 + size :]
    return result


def test_tensorboard_event_is_flushed_without_unknown_values(
    tmp_path: pathlib.Path,
) -> None:
    board = TensorBoard(str(tmp_path / "tensorboard"), 30)
    board.write(31, {"train/loss": 0.5, "train/mfu": None})
    version, began, scalars = events(tmp_path / "tensorboard")
    assert version.file_version == "brain.Event:2"
    assert began.step == 31 and began.session_log.status == began.session_log.START
    assert [(value.tag, value.simple_value) for value in scalars.summary.value] == [
        ("train/loss", 0.5)
    ]
    assert scalars.step == 31
    board.close()


def test_tensorboard_event_is_whole_after_a_failed_write(tmp_path: pathlib.Path) -> None:
    board = TensorBoard(str(tmp_path / "tensorboard"), 0)
    (path,) = (tmp_path / "tensorboard").iterdir()
    size_bytes = path.stat().st_size
    with limit_file_size(size_bytes + 20), pytest.raises(OSError, match="too large"):
        board.write(1, {"train/loss": 0.5})
    board.write(2, {"train/loss": 0.25})
    board.close()
    assert [event.step for event in events(tmp_path / "tensorboard")[2:]] == [1, 2]

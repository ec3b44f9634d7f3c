"""Copies between two folders, one of which a process serves as it does in a pod."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from jaxlaunch.launcher.errors import ClusterError, UnreachableError, UserError
from jaxlaunch.launcher.jobs.exec import copy, folder_server, rank_pod
from jaxlaunch.launcher.jobs.exec.copy import Copy, CopyCounts, PodSide
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.kubernetes import streams

PART = folder_server.PART_SUFFIX
DATA = bytes(range(256)) * 4096


class Process:
    """The stream of a program of this machine, which is cut after some bytes in both directions."""

    exit_code: int | None = None

    def __init__(self, module: ModuleType, folder: Path, cut_after: int | None) -> None:
        argv = [sys.executable, *rank_pod.program_arguments(module)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(argv, cwd=folder, stdin=pipe, stdout=pipe, bufsize=0)
        self._left = cut_after

    def _count(self, data: bytes) -> bytes:
        if self._left is not None:
            self._left -= len(data)
            if self._left < 0:
                raise UnreachableError("The connection was cut.", sent=True)
        return data

    def send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(self._count(data))

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        return True, False

    def receive(self) -> tuple[int, bytes]:
        assert self._process.stdout is not None
        data = self._process.stdout.read(65536)
        if not data:
            self.exit_code = self._process.wait()
        return streams.STDOUT, self._count(data)

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


class Pod:
    """A pod whose files are those of a folder."""

    pod = "own-w-0-0"

    def __init__(self, folder: Path, cuts: list[int]) -> None:
        self._folder, self._cuts = folder, cuts

    def start_program(self, module: ModuleType) -> Process:
        return Process(module, self._folder, self._cuts.pop(0) if self._cuts else None)


Run = Callable[..., CopyCounts]


@pytest.fixture
def messages() -> list[str]:
    return []


@pytest.fixture(params=["into", "from"])
def run_copy(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    messages: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Run]:
    """Return a copy into a pod or from it, whose connections are cut after some bytes."""
    monkeypatch.setattr(copy, "_FIRST_PAUSE_S", 0.0)

    def run(source: Path, target: Path, *cuts: int) -> CopyCounts:
        pod = PodSide(cast("RankPod", Pod(tmp_path, list(cuts))))
        transfer = Copy(pod, is_download=request.param == "from", say=messages.append)
        return transfer.run(str(source), str(target))

    yield run


def test_folder_is_copied_whole_and_again_not_at_all(
    run_copy: Run, tmp_path: Path, messages: list[str]
) -> None:
    source = tmp_path / "source"
    (source / "a" / "b").mkdir(parents=True)
    (source / "empty").mkdir()
    (source / "a" / "b" / "file").write_bytes(DATA)
    (source / "script").write_text("x")
    (source / "script").chmod(0o4755)
    (source / "link").symlink_to("script")
    (source / "latest").symlink_to("a")
    (source / f"old{PART}").write_text("a part of another copy")
    counts = run_copy(source, tmp_path / "target")
    assert counts == CopyCounts(files=3, sent_bytes=len(DATA) + 2)
    target = tmp_path / "target"
    names = {str(path.relative_to(target)) for path in target.rglob("*")}
    assert names == {"a", "a/b", "a/b/file", "empty", "script", "link"}
    assert messages == [
        "latest is a link to a folder, or neither a file nor a folder, and is left out"
    ]
    assert (target / "a" / "b" / "file").read_bytes() == DATA
    assert (target / "script").stat().st_mode & 0o7777 == 0o755
    # Into a folder that exists, as `cp -r` does.
    target.rename(tmp_path / "source-before")
    (tmp_path / "target").mkdir()
    (tmp_path / "source-before").rename(target / "source")
    assert run_copy(source, target) == CopyCounts(unchanged=3)


def test_cuts_are_continued(run_copy: Run, tmp_path: Path, messages: list[str]) -> None:
    (tmp_path / "source").write_bytes(DATA)
    counts = run_copy(tmp_path / "source", tmp_path / "target", 300_000, 0, 500_000)
    assert (tmp_path / "target").read_bytes() == DATA
    assert counts.files == 1 and counts.resumed_bytes > 0
    assert messages == ["The connection was cut. Continuing."] * 3
    assert not list(tmp_path.glob(f"*{PART}"))
    (tmp_path / "target").unlink()
    with pytest.raises(UnreachableError):
        run_copy(tmp_path / "source", tmp_path / "target", *[0] * 9)


@pytest.mark.parametrize("part_bytes", [len(DATA) - 100, len(DATA), len(DATA) + 1])
def test_part_of_an_earlier_copy_is_continued_if_it_fits(
    run_copy: Run, tmp_path: Path, part_bytes: int
) -> None:
    (tmp_path / "source").write_bytes(DATA)
    (tmp_path / f"target{PART}").write_bytes((DATA + b"x")[:part_bytes])
    counts = run_copy(tmp_path / "source", tmp_path / "target")
    resumed_bytes = part_bytes if part_bytes <= len(DATA) else 0
    assert counts == CopyCounts(1, 0, len(DATA) - resumed_bytes, resumed_bytes)
    (tmp_path / "target").unlink()
    (tmp_path / f"target{PART}").write_bytes(b"x" + DATA[1:1000])
    counts = run_copy(tmp_path / "source", tmp_path / "target")
    assert counts == CopyCounts(1, 0, len(DATA), 0)
    assert (tmp_path / "target").read_bytes() == DATA


def test_upload_whose_bytes_never_arrive_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy, "_FIRST_PAUSE_S", 0.0)
    (tmp_path / "source").write_bytes(DATA)
    # Each connection is cut at the first bytes of the file, after the requests before it.
    pod = PodSide(cast("RankPod", Pod(tmp_path, [1000] * 50)))
    with pytest.raises(UnreachableError):
        Copy(pod, is_download=False, say=print).run(
            str(tmp_path / "source"), str(tmp_path / "target")
        )


def test_silent_connection_is_an_error_and_is_replaced(
    run_copy: Run, tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = iter([(True, False)] * 2 + [(False, False)])
    monkeypatch.setattr(Process, "wait", lambda self, timeout_s: next(waits, (True, False)))
    (tmp_path / "source").write_bytes(DATA)
    run_copy(tmp_path / "source", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == DATA
    assert messages == ["Pod own-w-0-0 has been silent for 45 s. Continuing."]


def test_long_work_shows_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, has_line = io.BytesIO(), threading.Event()
    answers: Any = SimpleNamespace(write=written.write, flush=has_line.set)
    functions = {"digest": lambda path: has_line.wait(60)}
    monkeypatch.setattr(folder_server, "KEEPALIVE_S", 0.01)
    monkeypatch.setattr(folder_server, "_FUNCTIONS", functions)
    folder_server.serve(io.BytesIO(b'["digest", "file"]\n'), answers)
    assert re.fullmatch(rb'\n+{"result": true}\n', written.getvalue())
    pod = PodSide(cast("RankPod", Pod(tmp_path, [])))
    pod._unread = written.getvalue() + b"\n"
    assert pod._read_answer() is True


def test_lost_upload_shows_no_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks, answers = threading.Semaphore(0), io.BytesIO()

    class Ticking(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            ticks.release()
            return super().wait(0.001)

    class Requests(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            if self.tell() > len(DATA) // 2:
                # The rest of the bytes is late: after two ticks, the first half was reported.
                while ticks.acquire(blocking=False):
                    pass
                counts = [count_lines_after(3), count_lines_after(5)]
                assert counts[0] == counts[1]
            return super().read1(len(DATA) // 2 + 1)

    def count_lines_after(tick_count: int) -> int:
        for _ in range(tick_count):
            assert ticks.acquire(timeout=60)
        return answers.getvalue().count(b"\n")

    monkeypatch.setattr(
        folder_server, "threading", SimpleNamespace(Event=Ticking, Thread=threading.Thread)
    )
    request = json.dumps(["write", str(tmp_path / "target"), 0, len(DATA)]).encode()
    folder_server.serve(Requests(request + b"\n" + DATA), answers)
    assert (tmp_path / f"target{PART}").read_bytes() == DATA


def test_part_of_a_private_file_is_private(tmp_path: Path) -> None:
    folder_server.write_part(str(tmp_path / "key"), 0, [DATA])
    assert (tmp_path / f"key{PART}").stat().st_mode & 0o777 == 0o600


def test_what_cannot_be_copied_is_named(
    run_copy: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="There is no file or folder .*/missing to copy"):
        run_copy(tmp_path / "missing", tmp_path / "target")
    (tmp_path / "source").write_bytes(DATA)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file.*(Not a directory|File exists)"):
        run_copy(tmp_path / "source", tmp_path / "file" / "target")


def test_request_whose_answer_was_lost_is_repeated(tmp_path: Path) -> None:
    target = str(tmp_path / "target")
    folder_server.write_part(target, 0, [DATA])
    digest = folder_server.digest_file(target + PART)[1]
    assert folder_server.finish_file(target, digest, 0o600)
    assert folder_server.finish_file(target, digest, 0o600)
    assert not folder_server.finish_file(target, "another", 0o600)


def test_source_that_changes_is_an_error(tmp_path: Path) -> None:
    class Growing(copy.LocalSide):
        """A file that is never read as it was digested."""

        @staticmethod
        def read_file(path: str, offset: int, size: int) -> Iterator[bytes]:
            yield b"x" * size

    (tmp_path / "source").write_bytes(DATA)
    transfer = Copy(
        PodSide(cast("RankPod", Pod(tmp_path, []))), is_download=False, say=lambda text: None
    )
    side: Any = Growing()
    transfer._source = side
    with pytest.raises(UserError, match="changed while it was copied"):
        transfer.run(str(tmp_path / "source"), str(tmp_path / "target"))
    assert not (tmp_path / "target").exists()


def test_program_that_ends_is_an_error(tmp_path: Path) -> None:
    class Ended(Pod):
        def start_program(self, module: ModuleType) -> Process:
            process = super().start_program(rank_pod)
            process._process.communicate()
            process.send = lambda data: None  # type: ignore[method-assign]
            process.receive = lambda: (setattr(process, "exit_code", 3), b"")  # type: ignore
            return process

    transfer = Copy(
        PodSide(cast("RankPod", Ended(tmp_path, []))), is_download=True, say=lambda text: None
    )
    with pytest.raises(ClusterError, match=r"The copy ended in pod own-w-0-0: exit code 3\."):
        transfer.run("source", str(tmp_path / "target"))


@pytest.mark.parametrize(
    ("resolved", "files", "folders"),
    [
        ("/data/model", ["../escaped"], []),
        ("/data/model", ["/escaped"], []),
        ("/data/model", [], ["a/../../escaped"]),
        ("/data/..", ["escaped"], []),
    ],
)
def test_pod_cannot_choose_a_path_outside_of_the_target(
    resolved: str,
    files: list[str],
    folders: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = {"files": [[name, 0o644] for name in files], "folders": folders, "others": []}
    answers = {"resolve": [resolved, "folder"], "list": tree, "digest": [0, ""]}
    monkeypatch.setattr(PodSide, "_ask", lambda self, request, *operands: answers[request])
    target = tmp_path / "inner"
    target.mkdir()
    pod = PodSide(cast(RankPod, Pod(tmp_path, [])))
    with pytest.raises(UserError, match="which leaves its folder"):
        Copy(pod, is_download=True, say=print).run("model", str(target))
    assert list(tmp_path.rglob("*")) == [target]

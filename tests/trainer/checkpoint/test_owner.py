"""One run at a time in a checkpoint folder, held by real processes."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from etils import epath

from jaxlaunch.trainer.checkpoint import owner
from jaxlaunch.trainer.checkpoint.manifest import replace_file
from jaxlaunch.trainer.checkpoint.owner import Owner
from jaxlaunch.trainer.errors import CheckpointError
from tests.found import shows

HOLD = """
import sys
from etils import epath
from jaxlaunch.trainer.checkpoint.owner import Owner
Owner(epath.Path(sys.argv[1]), "run-other").claim()
print("claimed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path) -> epath.Path:
    return epath.Path(tmp_path)


@pytest.fixture
def other(folder):
    """Another live process that holds the folder for run-other."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "claimed\n"
        yield process
        process.kill()


@pytest.fixture
def claimant(folder) -> Iterator[Callable[..., Owner]]:
    """Makes owners of the folder, whose renewals end with the test."""
    created: list[Owner] = []

    def make(uid: str, **how: Any) -> Owner:
        created.append(Owner(folder, uid, **how))
        return created[-1]

    yield make
    for item in created:
        item.release()


def rewrite(folder: epath.Path, **fields) -> None:
    """By a draft of its own: an owner may renew its hold at the same time."""
    path, draft = folder / owner.OWNER_FILE, folder / "draft"
    draft.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    draft.replace(path)


def test_new_folder_is_claimed_silently(folder, claimant):
    assert claimant("run-a").claim() == ""


def test_folder_of_live_run_is_refused_by_name(folder, claimant, other):
    words = rf"run run-other \(process {other.pid} on .*--take-over"
    with pytest.raises(CheckpointError, match=words) as raised:
        claimant("run-a").claim()
    shows("belongs to run …, which renewed its claim", str(raised.value))


def test_killed_or_zombie_owner_is_replaced(folder, claimant, other):
    other.send_signal(signal.SIGKILL)
    # It has ended, and nobody has reaped it.
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)
    assert claimant("run-a").claim().endswith("that process has ended")


def test_reused_pid_is_another_process(folder, claimant, other):
    rewrite(folder, started=1)
    assert claimant("run-a").claim().endswith("that process has ended")


def test_same_run_on_another_host_is_taken_over(folder, claimant):
    claimant("run-a").claim()
    rewrite(folder, host="pod-before", pid=1)
    assert claimant("run-a").claim() == ""


def test_live_process_of_same_run_is_reported(folder, claimant, other):
    mine = claimant("run-other")
    assert mine.claim().endswith("of this run too, and still running")
    mine.check_ownership()


@pytest.mark.parametrize("elsewhere", [{"host": "pod-7"}, {"boot": "before"}, {"pids": "pid:[1]"}])
def test_unobservable_owner_holds_until_stale(folder, claimant, other, elsewhere):
    rewrite(folder, **elsewhere)
    with pytest.raises(CheckpointError, match="renewed its claim"):
        claimant("run-a").claim()
    rewrite(folder, renewed=time.time() - owner.STALE_S - 1)
    assert "not renewed for 61 s" in claimant("run-a").claim()


def test_take_over_stops_former_owner_before_writing(folder, claimant):
    former = claimant("run-a")
    former.claim()
    former.check_ownership()
    rewrite(folder, uid="run-b", host="pod-7")
    words = "taken over by run run-b, process .* on pod-7"
    with pytest.raises(CheckpointError, match=words) as raised:
        former.check_ownership()
    shows("no longer belongs to run", str(raised.value))
    assert claimant("run-c").claim(take_over=True).endswith("--take-over was given")


def test_owner_renews_claim(folder, claimant):
    mine = claimant("run-a", renew_s=0.01)
    mine.claim()
    rewrite(folder, renewed=0.0)
    deadline = time.monotonic() + 30
    while owner.Claim.read(folder / owner.OWNER_FILE).renewed == 0.0:
        assert time.monotonic() < deadline
    mine.release()


def test_unexpected_error_does_not_end_the_renewal(folder, claimant, monkeypatch):
    mine = claimant("run-a", renew_s=0.01)
    mine.claim()
    failed = threading.Event()

    def fail(path, data):
        failed.set()
        raise RuntimeError("the loop of the client is closed")

    with monkeypatch.context() as patch:
        patch.setattr(owner, "replace_file", fail)
        assert failed.wait(30)
    rewrite(folder, renewed=0.0)
    deadline = time.monotonic() + 30
    while owner.Claim.read(folder / owner.OWNER_FILE).renewed == 0.0:
        assert time.monotonic() < deadline
    mine.release()


def test_released_folder_is_free(folder, claimant):
    mine = claimant("run-a")
    mine.claim()
    mine.release()
    assert not (folder / owner.OWNER_FILE).exists()
    assert claimant("run-b").claim() == ""


def test_taken_folder_is_not_released(folder, claimant):
    mine = claimant("run-a")
    mine.claim()
    rewrite(folder, uid="run-b")
    mine.release()
    assert (folder / owner.OWNER_FILE).exists()


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"uid": "run-b", "renewed": "soon"}', "[" * 200_000]
)
def test_unreadable_owner_file_needs_take_over(folder, claimant, text):
    (folder / owner.OWNER_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="cannot be read .* remove that file"):
        claimant("run-a").claim()
    assert "cannot be read" in claimant("run-a").claim(take_over=True)


def test_owner_file_with_wrong_field_is_refused(folder, claimant, other):
    claim = (folder / owner.OWNER_FILE).read_bytes()
    for change in ({"pid": "7"}, {"host": 3}, {"started": None}, {"renewed": 10**400}):
        replace_file(folder / owner.OWNER_FILE, claim)
        rewrite(folder, **change)
        with pytest.raises(CheckpointError, match="cannot be read"):
            claimant("run-a").claim()
    replace_file(folder / owner.OWNER_FILE, claim)
    rewrite(folder, pid=2**63)
    assert "that process has ended" in claimant("run-a").claim()


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: os.symlink("/dev/zero", path)], ids=["fifo", "zero"]
)
def test_special_owner_file_is_refused_unread(folder, claimant, make):
    make(folder / owner.OWNER_FILE)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        claimant("run-a").claim()


def test_renewal_calls_callback(folder, claimant):
    called = threading.Event()
    claimant("run-a", renew_s=0.01, on_renewed=called.set).claim()
    assert called.wait(60)

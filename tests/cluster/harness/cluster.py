"""A cluster from nothing to ready and back: the order in which its parts come and go."""

import fcntl
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from tests.cluster.harness import (
    build,
    cgroups,
    containerd,
    control,
    controllers,
    dns,
    golden,
    images,
    kubelet,
    kwok,
    machine,
    network,
    process,
    teardown,
)
from tests.cluster.harness.places import CACHE, KEPT, LOCK, LOGS, RUN, UP, USERS

DAEMONS = {
    "etcd",
    "apiserver",
    "kcm",
    "scheduler",
    "jobset",
    "kueue",
    "containerd",
    "kubelet",
    "coredns",
    "kwok",
}


class Unable(RuntimeError):
    """This machine cannot run a cluster; the message says what it lacks and how to get it."""


@contextmanager
def locked() -> Iterator[None]:
    """One start or stop at a time on a machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_up() -> bool:
    """Whether a cluster of these very programs is up, whole and answering."""
    if not UP.exists() or UP.read_text() != build.key():
        return False
    if missing := DAEMONS - process.leading().keys():
        say(f"the cluster that was up has lost {', '.join(sorted(missing))}")
        return False
    try:
        control.await_server()  # it may be slow for a moment, on a machine that others use too
    except process.Down:
        return False
    return True


def up() -> bool:
    """A cluster is up; whether it was started now. Raises Unable, or process.Down with the end of a log."""
    if faults := machine.lacks():
        raise Unable("; ".join(faults))
    home = build.binaries()
    with locked():
        if is_up():
            return False
        try:
            begin(home)
        except BaseException:
            keep_logs()
            teardown.end()
            raise
        return True


def begin(home: Path) -> None:
    if not golden.folder(home).exists():
        say("preparing the state that clusters start from")
        clean()
        golden.make(home)
    clean()
    began = time.monotonic()
    start(home)
    UP.write_text(build.key())
    say(f"the cluster is up after {time.monotonic() - began:.1f} s")


def keep_logs() -> None:
    """For who wants to know why a start failed."""
    if LOGS.exists():
        shutil.rmtree(CACHE / "failed", ignore_errors=True)
        shutil.copytree(LOGS, CACHE / "failed")
        say(f"the logs of the failed start are in {CACHE / 'failed'}")


@contextmanager
def used() -> Iterator[None]:
    """A cluster is up while this lasts. The last who uses it stops it, unless it was started by hand."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(USERS, "w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        up()
        yield
        if not KEPT.exists() and is_last(users):
            down()


def is_last(users: IO[str]) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def down() -> None:
    with locked():
        teardown.end()


def clean() -> None:
    """Nothing of an earlier cluster is left, the ports are free and the bridge is there."""
    teardown.end()
    if ports := machine.taken():
        listed = ", ".join(f"127.0.0.1:{port}" for port in ports)
        raise Unable(
            f"another program listens on {listed}, which a cluster needs (`ss -ltnp` says "
            "which program)"
        )
    RUN.mkdir(parents=True)
    teardown.remember()
    network.make_bridge()


def start(home: Path) -> None:
    """What needs no API server starts beside it; then all that do, and last is awaited whether each is ready."""
    golden.lay_out(home)
    control.start_storage(home)
    cgroups.make()
    containerd.start()
    images.import_all(home)
    control.await_server()
    control.start_controllers(home)
    controllers.start_jobset(home)
    controllers.start_kueue(home)
    for part in (kubelet, dns, kwok):
        part.start(home)
    for part in (control, controllers, kubelet, dns, kwok):
        part.settled()


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

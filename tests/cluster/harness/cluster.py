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


class UnsupportedMachineError(RuntimeError):
    """This machine cannot run a cluster; the message says what it lacks and how to get it."""


@contextmanager
def lock_machine() -> Iterator[None]:
    """Allow one start or stop at a time on a machine."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_up() -> bool:
    """Check that a cluster of these very programs is up and answers."""
    if not UP.exists() or UP.read_text() != build.build_key():
        return False
    if missing := DAEMONS - process.find_daemons().keys():
        print_status(f"the cluster that was up has lost {', '.join(sorted(missing))}")
        return False
    try:
        control.await_server()  # it may be slow for a moment, on a machine that others use too
    except process.StartError:
        return False
    return True


def start_cluster() -> bool:
    """Start a cluster if none is up; return whether it did. Raises Unable or process.Down."""
    if faults := machine.find_missing():
        raise UnsupportedMachineError("; ".join(faults))
    home = build.build_programs()
    with lock_machine():
        if is_up():
            return False
        try:
            begin_cluster(home)
        except BaseException:
            keep_logs()
            teardown.remove_cluster()
            raise
        return True


def begin_cluster(home: Path) -> None:
    if not golden.state_folder(home).exists():
        print_status("preparing the state that clusters start from")
        clean_machine()
        golden.make_state(home)
    clean_machine()
    started_at = time.monotonic()
    start_daemons(home)
    UP.write_text(build.build_key())
    print_status(f"the cluster is up after {time.monotonic() - started_at:.1f} s")


def keep_logs() -> None:
    """Keep the logs of a failed start."""
    if LOGS.exists():
        shutil.rmtree(CACHE / "failed", ignore_errors=True)
        shutil.copytree(LOGS, CACHE / "failed")
        print_status(f"the logs of the failed start are in {CACHE / 'failed'}")


@contextmanager
def use_cluster() -> Iterator[None]:
    """Keep a cluster up. The last user stops it, unless it was started by hand."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with open(USERS, "w") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        start_cluster()
        yield
        if not KEPT.exists() and is_last(users):
            stop_cluster()


def is_last(users: IO[str]) -> bool:
    with suppress(BlockingIOError):
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def stop_cluster() -> None:
    with lock_machine():
        teardown.remove_cluster()


def clean_machine() -> None:
    """Remove an earlier cluster, check that the ports are free, and make the bridge."""
    teardown.remove_cluster()
    if ports := machine.find_taken_ports():
        listed = ", ".join(f"127.0.0.1:{port}" for port in ports)
        raise UnsupportedMachineError(
            f"another program listens on {listed}, which a cluster needs (`ss -ltnp` says "
            "which program)"
        )
    RUN.mkdir(parents=True)
    teardown.record_machine()
    network.make_bridge()


def start_daemons(home: Path) -> None:
    """Start what needs no API server, then the rest, and wait until every part is ready."""
    golden.lay_out(home)
    control.start_storage(home)
    cgroups.make_cgroups()
    containerd.start()
    images.import_all(home)
    control.await_server()
    control.start_controllers(home)
    controllers.start_jobset(home)
    controllers.start_kueue(home)
    for part in (kubelet, dns, kwok):
        part.start(home)
    for part in (control, controllers, kubelet, dns, kwok):
        part.wait_until_settled()


def print_status(words: str) -> None:
    print(words, file=sys.stderr, flush=True)

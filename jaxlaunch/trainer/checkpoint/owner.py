"""The owner of a checkpoint folder: the run in `jaxlaunch.owner.json`, which renews its claim.

Two runs that save into one folder damage each other's checkpoints. The owner file prevents this
mistake, but it is not a lock. If two runs claim a folder at the same moment, both continue, and the
one that wrote first notices this before its next manifest and stops. Each run writes times of its
own clock, and the clocks of all hosts must agree to within 50 s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from etils import epath

from jaxlaunch.trainer.checkpoint.manifest import (
    JSON_ERRORS,
    NotAFileError,
    read_small_file,
    replace_file,
)
from jaxlaunch.trainer.errors import CheckpointError

OWNER_FILE = "jaxlaunch.owner.json"
RENEW_S = 10.0
# An owner that could not renew its claim for this long cannot save checkpoints either.
STALE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """One process of one run, distinct from every other process that ever ran.

    The field names are those of the owner file.

    Attributes:
        uid: The identity of the run, equal in all of its attempts.
        host: The name of the host.
        boot: The boot ID of the kernel.
        pids: The PID namespace. Each container on a host has its own PID 1.
        pid: The process ID in this namespace.
        started: The start time in clock ticks since boot, which distinguishes the process from a
            later one with the same PID; 0 if unknown.
    """

    uid: str
    host: str
    boot: str
    pids: str
    pid: int
    started: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if type(value := getattr(self, field.name)).__name__ != field.type:
                raise TypeError(f"{field.name} is {value!r}")

    @classmethod
    def for_this_process(cls, uid: str) -> Identity:
        """Return the identity of this process, as part of run `uid`."""
        pid, host = os.getpid(), socket.gethostname()
        return cls(uid, host, _boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0)

    def is_running(self) -> bool | None:
        """Return whether this process still runs; None on another host or in another namespace."""
        this_system = socket.gethostname(), _boot_id(), _pid_namespace()
        if (self.host, self.boot, self.pids) != this_system:
            return None
        started = _start_ticks(self.pid)
        if started is None:
            return False
        return started == self.started if started and self.started else None


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except FileNotFoundError:
        return ""


def _start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; 0 if unknown, None if it ended."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (ProcessLookupError, OverflowError):
        return None
    except (FileNotFoundError, PermissionError):
        # The process runs, but it belongs to another user, or the system has no /proc.
        return 0
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    # A zombie has ended. proc_pid_stat(5): starttime is field 22.
    return None if state in "ZX" else int(fields[18])


@dataclasses.dataclass(frozen=True)
class Claim:
    """The content of the owner file: the owner, and when it last renewed its claim.

    `renewed` is the Unix time of the owner's clock.
    """

    owner: Identity
    renewed: float

    def to_bytes(self) -> bytes:
        """Encode the claim as JSON."""
        fields = {**dataclasses.asdict(self.owner), "renewed": self.renewed}
        return json.dumps(fields, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: epath.Path) -> Claim | None:
        """Read the claim from its file; None without one. Raises CheckpointError if damaged."""
        try:
            fields = json.loads(read_small_file(path))
            renewed = float(fields.pop("renewed"))
            return cls(Identity(**fields), renewed)
        except FileNotFoundError:
            return None
        except (*JSON_ERRORS, NotAFileError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so the owner of these checkpoints is unknown; "
                "remove that file if no other run uses the folder, or pass --take-over"
            ) from None


class Owner:
    """This process's claim on a checkpoint folder, which a thread renews."""

    def __init__(
        self,
        folder: epath.Path,
        uid: str,
        renew_s: float = RENEW_S,
        on_renewed: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a claim. The thread calls `on_renewed` after each attempt to renew it."""
        self._path, self._on_renewed = folder / OWNER_FILE, on_renewed
        self._identity = Identity.for_this_process(uid)
        self._renew_s = renew_s
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._renew_periodically, name="checkpoint-owner", daemon=True
        )

    def claim(self, take_over: bool = False) -> str:
        """Claim the folder, and return a message if it had another owner, else "".

        Raises CheckpointError if that owner may still be running, unless `take_over` is set.
        """
        message = self._check_claim(take_over)
        replace_file(self._path, Claim(self._identity, time.time()).to_bytes())
        # A failed claim is retried, and the thread may already run.
        if self._thread.ident is None:
            self._thread.start()
        return message

    def _check_claim(self, take_over: bool) -> str:
        """Return the message of `claim`, or raise its CheckpointError."""
        folder = self._path.parent
        try:
            claim = Claim.read(self._path)
        except CheckpointError:
            if take_over:
                return f"taking over {folder}, whose owner file cannot be read"
            raise
        if claim is None or claim.owner == self._identity:
            return ""
        run = f"run {claim.owner.uid} (process {claim.owner.pid} on {claim.owner.host})"
        is_running = claim.owner.is_running()
        # The owner is an earlier attempt of this run. If it still runs, its next check of the
        # ownership stops it.
        if claim.owner.uid == self._identity.uid:
            if not is_running:
                return ""
            return f"taking over {folder} from {run}: of this run too, and still running"
        if is_running is False:
            return f"taking over {folder} from {run}: that process has ended"
        age = time.time() - claim.renewed
        if age >= STALE_S:
            return f"taking over {folder} from {run}: not renewed for {age:.0f} s"
        if take_over:
            reason = f"renewed {age:.0f} s ago: --take-over was given"
            return f"taking over {folder} from {run}, {reason}"
        raise CheckpointError(
            f"{folder} belongs to {run}, which renewed its claim {age:.0f} s ago; stop that run, "
            "use another checkpoint.path, or pass --take-over. The claim of a run that was killed "
            f"on another host expires after {STALE_S:.0f} s"
        )

    def check_ownership(self) -> None:
        """Raise CheckpointError if another process owns the folder, so that this one must stop."""
        claim = Claim.read(self._path)
        if claim is not None and claim.owner != self._identity:
            new_owner = f"run {claim.owner.uid}, process {claim.owner.pid} on {claim.owner.host}"
            raise CheckpointError(
                f"{self._path.parent} no longer belongs to run {self._identity.uid}, process "
                f"{self._identity.pid}: it was taken over by {new_owner}. This process writes "
                "nothing more"
            )

    def release(self) -> None:
        """Remove the claim if this process still has it, so that the next run need not wait."""
        self._released.set()
        if not self._thread.is_alive():
            return
        with self._lock:
            claim = Claim.read(self._path)
            if claim is not None and claim.owner == self._identity:
                self._path.unlink()

    def _renew_periodically(self) -> None:
        while not self._released.wait(self._renew_s):
            with self._lock:
                if not self._released.is_set() and not self._renew_once():
                    return
            self._on_renewed()

    def _renew_once(self) -> bool:
        """Renew the claim. Return False if another process took over the folder."""
        try:
            self.check_ownership()
            replace_file(self._path, Claim(self._identity, time.time()).to_bytes())
        except CheckpointError:
            return False
        except Exception:
            # The next renewal may succeed, and a save reports a failing storage itself. Without the
            # thread, the claim would expire while this run trains.
            pass
        return True

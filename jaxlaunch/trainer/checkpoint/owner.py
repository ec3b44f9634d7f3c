"""The owner of a checkpoint folder: the run in `jaxlaunch.owner.json`, which renews it.

Two runs that save into one folder damage each other's checkpoints. The file guards against that
mistake, but it is not a lock: if two runs claim at the same moment, both continue, and the one that
wrote first notices before its next manifest and stops. Times are those of the writers' clocks,
which must agree to within 50 s.
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

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.checkpoint.manifest import (
    JSON_ERRORS,
    NotAFileError,
    read_small_file,
    replace_file,
)
from jaxlaunch.trainer.errors import CheckpointError

OWNER_FILE = "jaxlaunch.owner.json"
RENEW_S = 10.0
# An owner that has missed five renewals has lost its storage, too.
STALE_S = 60.0


@dataclasses.dataclass(frozen=True)
class Identity:
    """One process of one run, distinct from every other process that ever ran.

    Attributes:
        uid: The identity of the run, equal across its restarts.
        boot: The boot of the kernel.
        pids: The PID namespace. Each container of a host has its own PID 1.
        started: Clock ticks since boot, which distinguish a process from a later one with the same
            PID.
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
        here = socket.gethostname(), _boot_id(), _pid_namespace()
        if (self.host, self.boot, self.pids) != here:
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
        # The process belongs to another user, or the system has no /proc. It runs, but nothing more
        # is known.
        return 0
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    # A zombie has ended. proc_pid_stat(5): starttime is field 22.
    return None if state in "ZX" else int(fields[18])


@dataclasses.dataclass(frozen=True)
class Claim:
    """The owner in the owner file, and when it last renewed its claim, by its own clock."""

    owner: Identity
    renewed: float

    def to_bytes(self) -> bytes:
        """Encode the claim as JSON."""
        fields = {**dataclasses.asdict(self.owner), "renewed": self.renewed}
        return json.dumps(fields, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: epath.Path) -> Claim | None:
        """Read the claim from its file; None without one. Raises CheckpointError for damage."""
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
    """This process's claim on a checkpoint folder, renewed by a thread, stale after STALE_S."""

    def __init__(
        self,
        folder: epath.Path,
        uid: str,
        renew_s: float = RENEW_S,
        on_renewed: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a claim. The thread calls `on_renewed` after each try to renew it."""
        self._path, self._on_renewed = folder / OWNER_FILE, on_renewed
        self._identity = Identity.for_this_process(uid)
        self._renew_s = renew_s
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._renew_periodically, name="checkpoint-owner", daemon=True
        )

    def claim(self, take_over: bool = False) -> str:
        """Claim the folder. Return a message on its last owner. Raises CheckpointError."""
        message = self._check_claim(take_over)
        replace_file(self._path, Claim(self._identity, time.time()).to_bytes())
        # An earlier try may have started the thread.
        if self._thread.ident is None:
            self._thread.start()
        return message

    def _check_claim(self, take_over: bool) -> str:
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
        # The owner is this run before a restart. If that process still runs, its next check stops
        # it.
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
        """Raise CheckpointError if another process owns the folder now: this one must not write."""
        claim = Claim.read(self._path)
        if claim is not None and claim.owner != self._identity:
            new_owner = f"run {claim.owner.uid}, process {claim.owner.pid} on {claim.owner.host}"
            raise CheckpointError(
                f"{self._path.parent} no longer belongs to run {self._identity.uid}, process "
                f"{self._identity.pid}: it was taken over by {new_owner}. This process writes "
                "nothing more"
            )

    def release(self) -> None:
        """Remove the claim, so that the next run need not wait, unless another process has it."""
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
        """Renew the claim. Return False if the folder was taken over, which stops the loop."""
        try:
            self.check_ownership()
            replace_file(self._path, Claim(self._identity, time.time()).to_bytes())
        except CheckpointError:
            return False
        except Exception as error:
            # The renewal is tried again soon. A save to this storage fails with its own message.
            if not faults.is_from_store(error):
                raise
        return True

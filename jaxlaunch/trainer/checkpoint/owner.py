"""The owner of a checkpoint folder: the run in `jaxlaunch.owner.json`, which that run renews while it lives.

Two runs that save into one folder damage each other's checkpoints. The file guards against that
mistake, but it is no lock: if two runs claim at the same moment, both continue, and the one that
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
from jaxlaunch.trainer.checkpoint.manifest import NotAFileError, read_small_file, replace_file
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
        pid = os.getpid()
        return cls(
            uid, socket.gethostname(), _boot_id(), _pid_namespace(), pid, _start_ticks(pid) or 0
        )

    def is_running(self) -> bool | None:
        """Return whether this process still runs; None when it is on another host or in another PID namespace."""
        if (self.host, self.boot, self.pids) != (
            socket.gethostname(),
            _boot_id(),
            _pid_namespace(),
        ):
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
    """Return when a process started, in clock ticks since boot; 0 if that is unreadable, None when it has ended."""
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
    """The content of the owner file: the owner, and when it last renewed its claim (Unix seconds, by its own clock)."""

    owner: Identity
    renewed: float

    def to_bytes(self) -> bytes:
        return (
            json.dumps(
                {**dataclasses.asdict(self.owner), "renewed": self.renewed}, indent=1
            ).encode()
            + b"\n"
        )

    @classmethod
    def read(cls, path: epath.Path) -> Claim | None:
        """Read the claim from its file; None without one. Raises CheckpointError when the file is damaged."""
        try:
            fields = json.loads(read_small_file(path))
            renewed = float(fields.pop("renewed"))
            return cls(Identity(**fields), renewed)
        except FileNotFoundError:
            return None
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
            NotAFileError,
        ) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so the owner of these checkpoints is unknown; "
                "remove that file if no other run uses the folder, or pass --take-over"
            ) from None


class Owner:
    """This process's claim on a checkpoint folder, renewed by a thread. A claim is stale after STALE_S seconds."""

    def __init__(
        self,
        folder: epath.Path,
        uid: str,
        renew_s: float = RENEW_S,
        on_renewed: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare a claim. The thread calls `on_renewed` after each renewal, even one that storage refused."""
        self._path, self._on_renewed = folder / OWNER_FILE, on_renewed
        self._identity = Identity.for_this_process(uid)
        self._renew_s = renew_s
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(
            target=self._renew_periodically, name="checkpoint-owner", daemon=True
        )

    def claim(self, take_over: bool = False) -> str:
        """Claim the folder. Return a message about its last owner. Raises CheckpointError when another run owns it."""
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
            return (
                f"taking over {folder} from {run}: of this run too, and still running"
                if is_running
                else ""
            )
        if is_running is False:
            return f"taking over {folder} from {run}: that process has ended"
        age = time.time() - claim.renewed
        if age >= STALE_S:
            return f"taking over {folder} from {run}: not renewed for {age:.0f} s"
        if take_over:
            return (
                f"taking over {folder} from {run}, renewed {age:.0f} s ago: --take-over was given"
            )
        raise CheckpointError(
            f"{folder} belongs to {run}, which renewed its claim {age:.0f} s ago; stop that run, "
            "use another checkpoint.path, or pass --take-over. The claim of a run that was killed "
            f"on another host expires after {STALE_S:.0f} s"
        )

    def check_ownership(self) -> None:
        """Raise CheckpointError when another process owns the folder now: writing there would harm its checkpoints."""
        claim = Claim.read(self._path)
        if claim is not None and claim.owner != self._identity:
            now = f"run {claim.owner.uid}, process {claim.owner.pid} on {claim.owner.host}"
            raise CheckpointError(
                f"{self._path.parent} no longer belongs to run {self._identity.uid}, process "
                f"{self._identity.pid}: it was "
                f"taken over by {now}. This process writes nothing more"
            )

    def release(self) -> None:
        """Remove the claim, so that the next run need not wait. Do nothing when another process owns the folder."""
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
        """Renew the claim. Return False when the folder was taken over: `check` then raises before the loop writes."""
        try:
            self.check_ownership()
            replace_file(self._path, Claim(self._identity, time.time()).to_bytes())
        except CheckpointError:
            return False
        except Exception as error:
            if not faults.is_from_store(error):
                raise
            # The renewal is tried again soon. A save to this storage fails with its own message.
            return True
        return True

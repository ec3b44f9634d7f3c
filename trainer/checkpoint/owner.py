"""Whose checkpoint folder it is: one file, `jaxlaunch.owner.json`, renewed while its writer lives. Never imports jax.

Two runs that save into one folder ruin both. The file guards against that mistake; it is no lock: two that claim within
the same moment both go on, and the one that wrote first learns it before its next manifest and stops. Times are the
writers' clocks, which must agree to within 50 s.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import threading
import time
from pathlib import Path

from etils import epath

from trainer.checkpoint.manifest import replace
from trainer.errors import CheckpointError

NAME = "jaxlaunch.owner.json"
RENEW_S = 10.0
STALE_S = 60.0  # a live owner that was not heard of for five renewals has lost its storage too


@dataclasses.dataclass(frozen=True)
class Identity:
    """One process of one run, told apart from every other that ever was."""

    uid: str  # the run's: equal across its restarts
    host: str
    boot: str  # which boot of the kernel
    pids: str  # which PID namespace: containers of a host have each their own PID 1
    pid: int
    started: int  # clock ticks since boot: tells a process from a later one of the same PID

    @classmethod
    def mine(cls, uid: str) -> Identity:
        pid = os.getpid()
        return cls(uid, socket.gethostname(), _boot(), _pid_namespace(), pid, _started(pid) or 0)

    def lives(self) -> bool | None:
        """Whether this process still runs; None when it is, or was, where we cannot look."""
        if (self.host, self.boot, self.pids) != (socket.gethostname(), _boot(), _pid_namespace()):
            return None
        started = _started(self.pid)
        if started is None:
            return False
        return started == self.started if started and self.started else None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except FileNotFoundError:
        return ""


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")
    except FileNotFoundError:
        return ""


def _started(pid: int) -> int | None:
    """Start of a running process in clock ticks since boot; 0 where that cannot be read, None when it has ended."""
    try:
        os.kill(pid, 0)
        stat = Path(f"/proc/{pid}/stat").read_text()
    except ProcessLookupError:
        return None
    except (FileNotFoundError, PermissionError):
        return 0  # another user's, or a system without /proc: it runs, and that is all we know
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return None if state in "ZX" else int(fields[18])  # a zombie has ended; proc_pid_stat(5): starttime is field 22


@dataclasses.dataclass(frozen=True)
class Claim:
    """What the owner file says: who, and when it last said so (seconds since the epoch, by its own clock)."""

    owner: Identity
    renewed: float

    def to_bytes(self) -> bytes:
        return json.dumps({**dataclasses.asdict(self.owner), "renewed": self.renewed}, indent=1).encode() + b"\n"

    @classmethod
    def read(cls, path: epath.Path) -> Claim | None:
        """The claim on file, None when there is none. Raises CheckpointError when the file is not one."""
        try:
            fields = json.loads(path.read_bytes())
            renewed = float(fields.pop("renewed"))
            return cls(Identity(**fields), renewed)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}), so nobody can tell whose checkpoints these are; "
                "remove that file if no other run uses the folder, or pass --take-over"
            ) from None


class Owner:
    """This process's hold on a checkpoint folder."""

    def __init__(self, folder: epath.Path, uid: str, renew_s: float = RENEW_S) -> None:
        self._path = folder / NAME
        self._me = Identity.mine(uid)
        self._renew_s = renew_s
        self._released = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._renew, name="checkpoint-owner", daemon=True)

    def claim(self, take_over: bool = False) -> str:
        """Takes the folder; what there is to say of it, or nothing. Raises CheckpointError when it is another's."""
        said = self._refuse_or_say(take_over)
        replace(self._path, Claim(self._me, time.time()).to_bytes())
        self._thread.start()
        return said

    def _refuse_or_say(self, take_over: bool) -> str:
        try:
            claim = Claim.read(self._path)
        except CheckpointError:
            if take_over:
                return f"taking over {self._path.parent}, whose owner file cannot be read"
            raise
        if claim is None or claim.owner == self._me:
            return ""
        run = f"run {claim.owner.uid} (process {claim.owner.pid} on {claim.owner.host})"
        lives = claim.owner.lives()
        if claim.owner.uid == self._me.uid:  # our own, before it was restarted; if it lives it will find out and stop
            return f"taking over {self._path.parent} from {run}, this run's own, which still lives" if lives else ""
        if lives is False:
            return f"taking over {self._path.parent} from {run}: that process has ended"
        age = time.time() - claim.renewed
        if age >= STALE_S:
            return f"taking over {self._path.parent} from {run}: not renewed for {age:.0f} s"
        if take_over:
            return f"taking over {self._path.parent} from {run}, renewed {age:.0f} s ago, as told"
        raise CheckpointError(
            f"{self._path.parent} belongs to {run}, which renewed its hold {age:.0f} s ago; "
            f"stop that run, use another checkpoint.path, or pass --take-over. A run that was killed on another host "
            f"gives way after {STALE_S:.0f} s"
        )

    def check(self) -> None:
        """Raises CheckpointError when the folder is no longer ours: whoever holds it now, writing would harm."""
        claim = Claim.read(self._path)
        if claim is not None and claim.owner != self._me:
            raise CheckpointError(
                f"{self._path.parent} is no longer ours (run {self._me.uid}, process {self._me.pid}): it was taken by "
                f"run {claim.owner.uid}, process {claim.owner.pid} on {claim.owner.host}; nothing more is written there"
            )

    def release(self) -> None:
        """Gives the folder up, so that the next run need not wait. Does nothing when it is no longer ours."""
        self._released.set()
        if not self._thread.is_alive():
            return
        with self._lock:
            claim = Claim.read(self._path)
            if claim is not None and claim.owner == self._me:
                self._path.unlink()

    def _renew(self) -> None:
        while not self._released.wait(self._renew_s):
            with self._lock:
                if not self._released.is_set() and not self._renew_once():
                    return

    def _renew_once(self) -> bool:
        """Says that we live; False when the folder was taken: `check` tells the loop, before anything is written."""
        try:
            self.check()
            replace(self._path, Claim(self._me, time.time()).to_bytes())
        except CheckpointError:
            return False
        except OSError:
            return True  # tried again in a moment; a save that needs this storage fails by itself, with its own words
        return True

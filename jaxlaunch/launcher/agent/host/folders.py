"""Temporary folders of an agent, which outlive it where it is killed: the next agent of the same user removes those.

Who uses a folder holds a lock on a file in it, which the kernel releases when it dies, however it does. Versions before
November 2026 held none: their folders go a week after they last changed, unless a program was told of them.

The agent's temporary folder: the site hook that child processes load, their sockets and their stacks.

The files are copied because the agent may run from a zipapp, which its children cannot import from.

The run folder of a job whose checkpoints are in a bucket: a folder of this host, which another process copies there.

The agent itself reaches no bucket. The process is the trainer's, `trainer/buckets/mirror`: an image without the trainer
runs the job without memory.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pkgutil
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from jaxlaunch import isolated, regular_files
from jaxlaunch.launcher.agent.gang.config import Config

PREFIX, LOCK = "jaxlaunch-", ".in-use"
SITE = "site"  # what an agent's own folder has first
FORGOTTEN_S = 7 * 24 * 3600  # since a folder without a lock has changed


def make_folder(infix: str = "", folder: str | None = None) -> tuple[str, int]:
    """A new folder in `folder`, by default that for temporary files, and the descriptor that holds its lock."""
    made = tempfile.mkdtemp(prefix=PREFIX + infix, dir=folder)
    draft = os.path.join(made, f"{LOCK}.draft")
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(draft, os.path.join(made, LOCK))  # only now: else another could take the lock first
    return made, lock


def sweep_folders() -> None:
    """Removes the folders of this user that nobody uses any more."""
    for place in {tempfile.gettempdir(), "/tmp"}:
        try:
            names = [name for name in os.listdir(place) if name.startswith(PREFIX)]
        except OSError:
            continue
        for name in names:
            _remove(os.path.join(place, name))


def _remove(folder: str) -> None:
    """Removes a folder if it is this user's, and its lock is there and can be taken."""
    try:
        found = os.lstat(folder)
    except OSError:
        return  # another agent that starts now has removed it
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return
    try:
        lock = regular_files.opener(os.path.join(folder, LOCK), os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:  # it is gone, an older version's, or of an agent that was killed while it made it
        if time.time() - found.st_mtime > FORGOTTEN_S and _is_agents(folder) and not _is_told(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        pass  # it is in use
    finally:
        os.close(lock)


def _is_agents(folder: str) -> bool:
    """Whether an agent made it, and nobody to keep something there."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return SITE in names or not set(names) - {f"{LOCK}.draft"}


def _is_told(folder: str) -> bool:
    """Whether an environment variable of a process names the folder, as PYTHONPATH does of an agent's programs."""
    return any(folder.encode() in environ for environ in _environs())


def _environs() -> Iterator[bytes]:
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                yield file.read()
        except OSError:  # it ended, or is another user's
            continue


STANDBY = "standby.py"
HOOKS = ("sitecustomize.py", "jaxhook.py", STANDBY)  # of launcher/agent/site
CONTRACT, ISOLATED = "contract.py", "isolated.py"  # of jaxlaunch
FALLBACK = "fallback"  # a folder that comes last on a program's sys.path: for images without our package
# Of jaxlaunch, without packages below it: where the package is installed to be edited, a program's `jaxlaunch` is this
# folder, and the finder of such an installation gives only the direct children of a package.
FALLBACK_FILES = ("__init__.py", "reporting.py", "atomic_file.py")
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux


class SiteFolder:
    """The folder, made once per agent; `site` is the part that comes first on a child's PYTHONPATH."""

    def __init__(self) -> None:
        is_long = len(tempfile.gettempdir()) > MAX_SOCKET_PATH - 40
        sweep_folders()
        self._folder, self._lock = make_folder(folder="/tmp" if is_long else None)
        self._numbers = itertools.count()
        self.site = os.path.join(self._folder, "site")
        os.mkdir(self.site)
        for name in HOOKS:
            self._copy("jaxlaunch.launcher.agent", f"site/{name}", name)
        for name in (CONTRACT, ISOLATED):
            self._copy("jaxlaunch", name, name)
        os.makedirs(os.path.join(self.site, FALLBACK, "jaxlaunch"))
        for name in FALLBACK_FILES:
            self._copy("jaxlaunch", name, f"{FALLBACK}/jaxlaunch/{name}")

    def path(self, suffix: str) -> str:
        """A path in the folder that was not returned before."""
        return os.path.join(self._folder, f"{next(self._numbers)}.{suffix}")

    def command(self, module: str) -> list[str]:
        """The command that runs a module of ours, which nothing of the user's can shadow."""
        return isolated.command(module, script=os.path.join(self.site, ISOLATED))

    def standby(self, module: str, descriptor: int) -> list[str]:
        """The command of a process with the imports of `module` done; it reads from `descriptor` how to go on."""
        return [*self.command(os.path.join(self.site, STANDBY)), str(descriptor), module]

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _copy(self, package: str, resource: str, name: str) -> None:
        data = pkgutil.get_data(package, resource)
        assert data is not None, "packages are read by loaders that have get_data, zipimport's included"
        with open(os.path.join(self.site, name), "wb") as file:
            file.write(data)


BEGIN_S = 60.0  # to import the store's client and fetch a few small files
END_S = 20.0  # to put what is new; the kubelet ends it earlier where the pod's grace period is over
MOVE_S = 3.0  # to fetch the logs of ranks that move here; less than a host may be silent
READY, DONE = "ready", "done"
WHOLE = (0, 1)  # hosts that write attempts and summary: the leader, and its deputy when it is lost


class FolderError(Exception):
    """The bucket cannot be used; the message says why."""


class RemoteFolder:
    """A local folder that is copied to a URL while this object lives."""

    def __init__(self, url: str, config: Config) -> None:
        """Returns when the folder holds what earlier attempts left. Raises FolderError."""
        folder, self._lock = make_folder("run-")
        self.folder = Path(folder)
        self._ranks = ranks = config.ranks()
        whole = ["--whole"] if config.host in WHOLE else []
        argv = [url, str(self.folder), "--ranks", str(ranks.start), str(ranks.stop), *whole]
        self._process = subprocess.Popen(
            [sys.executable, *isolated.inline("jaxlaunch.trainer.buckets.mirror"), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what was not read yet is still in the pipe, where select sees it
            start_new_session=True,  # a Ctrl-C is not for it
            pass_fds=[self._lock],  # it uses the folder for a while after an agent that was killed
        )
        self.pid = self._process.pid
        said = self._first_line()
        if said != READY:
            self._process.kill()
            self._process.wait()
            self._remove()
            raise FolderError(f"the run folder {url} cannot be used: {said}")

    def _first_line(self) -> str:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], BEGIN_S)
        if not readable:
            return f"it did not answer for {BEGIN_S:.0f} s"
        text = self._process.stdout.readline().decode(errors="backslashreplace").strip()
        if text == READY:
            return text
        try:
            return str(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError):
            return "the trainer, which copies it, is not in this image, or does not start"

    def take(self, ranks: range) -> None:
        """Is told the ranks of the attempt that starts; fetches the logs of those that another host had, in MOVE_S."""
        if ranks == self._ranks:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ranks, order, until = ranks, f"ranks {ranks.start} {ranks.stop}", time.monotonic() + MOVE_S
        try:
            self._process.stdin.write(order.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended, which the agent says
            return
        self._hears(order, until)

    def close(self) -> bool:
        """Returns when all is put, or after END_S; whether it was.

        The process says so itself: one that died while the agent's loop ran was reaped there, with its exit code.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        is_whole = self._hears(DONE, time.monotonic() + END_S)
        if not is_whole:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._remove()
        return is_whole

    def _hears(self, word: str, until: float) -> bool:
        """Whether the process says this before then."""
        assert self._process.stdout is not None
        while (left := until - time.monotonic()) > 0 and select.select([self._process.stdout], [], [], left)[0]:
            line = self._process.stdout.readline().decode(errors="replace")
            if not line or line.strip() == word:
                return bool(line)
        return False

    def _remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

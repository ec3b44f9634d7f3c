"""Temporary folders of an agent.

`SiteFolder` holds the site hook that child processes load, and their sockets and stacks. The hook
is copied there because the agent may run from a zipapp, from which its children cannot import.

`RemoteFolder` is the local copy of a run folder that is in a bucket. The agent itself has no client
for buckets: `trainer/buckets/mirror` copies the files in another process. In an image without the
trainer, the job runs without a record of earlier attempts.

An agent that is killed leaves its folders behind, and the next agent of the same user removes them.
A process that uses a folder holds a lock on a file in it, which the kernel releases when the
process dies. Versions before November 2026 held no lock: their folders are removed a week after the
last change, unless an environment variable of a process names them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pkgutil
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from jaxlaunch import isolated, regular_files
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.io.loop import READ, wait_until_ready

FOLDER_PREFIX, LOCK_FILE = "jaxlaunch-", ".in-use"
# The first entry that an agent creates in its folder.
SITE_FOLDER = "site"
# A folder without a lock is removed this long after its last change.
UNLOCKED_MAX_AGE_S = 7 * 24 * 3600


def make_folder(infix: str = "", parent: str | None = None) -> tuple[str, int]:
    """Create a folder, by default in the temporary directory.

    Returns:
        Its path, and the descriptor that holds its lock.
    """
    path = tempfile.mkdtemp(prefix=FOLDER_PREFIX + infix, dir=parent)
    draft = os.path.join(path, f"{LOCK_FILE}.draft")
    lock = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    # The file gets its final name only once it is locked, so that no other agent can lock it first.
    os.rename(draft, os.path.join(path, LOCK_FILE))
    return path, lock


def sweep_folders() -> None:
    """Remove the folders of this user that are no longer in use."""
    for parent in {tempfile.gettempdir(), "/tmp"}:
        try:
            names = [name for name in os.listdir(parent) if name.startswith(FOLDER_PREFIX)]
        except OSError:
            continue
        for name in names:
            _remove_unused_folder(os.path.join(parent, name))


def _remove_unused_folder(folder: str) -> None:
    """Remove a folder of this user if its lock can be taken."""
    try:
        folder_stat = os.lstat(folder)
    except OSError:
        # Another agent has removed it in the meantime.
        return
    if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
        return
    try:
        lock = regular_files.open_regular(
            os.path.join(folder, LOCK_FILE), os.O_RDWR | os.O_NOFOLLOW
        )
    except FileNotFoundError:
        # The folder is gone, or is from an older version, or from an agent that was killed while it
        # created the folder.
        is_old = time.time() - folder_stat.st_mtime > UNLOCKED_MAX_AGE_S
        if is_old and _is_agent_folder(folder) and not _is_in_environ(folder):
            shutil.rmtree(folder, ignore_errors=True)
        return
    except OSError:
        return
    # An OSError means that the folder is in use.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    os.close(lock)


def _is_agent_folder(folder: str) -> bool:
    """Return whether an agent created the folder. A user may have chosen a similar name."""
    try:
        names = os.listdir(folder)
    except OSError:
        return False
    return SITE_FOLDER in names or not set(names) - {f"{LOCK_FILE}.draft"}


def _is_in_environ(folder: str) -> bool:
    """Return whether an environment variable of a process names the folder."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        # The process may have ended or belong to another user.
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if folder.encode() in file.read():
                return True
    return False


STANDBY_SCRIPT = "standby.py"
# Files of launcher/agent/site that children load.
HOOK_FILES = ("sitecustomize.py", "reporter.py", "jaxhook.py", "wrappers.py", STANDBY_SCRIPT)
# Files of jaxlaunch that the site hook loads.
CONTRACT_FILE, ISOLATED_FILE = "contract.py", "isolated.py"
# This folder comes last on the sys.path of a program, for images without jaxlaunch.
FALLBACK_FOLDER = "fallback"
# These modules must not be in subpackages: with an editable installation, `jaxlaunch` of a program
# is this folder, and the finder of the installation resolves only direct children of a package.
FALLBACK_FILES = ("__init__.py", "reporting.py", "samples.py", "atomic_file.py")
# sockaddr_un.sun_path holds 108 bytes on Linux.
MAX_SOCKET_PATH = 100


class SiteFolder:
    """The temporary folder of an agent.

    Its folder `site` comes first on the PYTHONPATH of every child process.
    """

    def __init__(self) -> None:
        is_long = len(tempfile.gettempdir()) > MAX_SOCKET_PATH - 40
        sweep_folders()
        self._folder, self._lock = make_folder(parent="/tmp" if is_long else None)
        self._numbers = itertools.count()
        self.site = os.path.join(self._folder, SITE_FOLDER)
        self.restore_files()

    def restore_files(self) -> None:
        """Create the folder and the files that are missing in it.

        A program may empty the temporary directory, and systemd-tmpfiles removes what nobody has
        read for ten days. The next process would start without the site hook.

        Raises:
            OSError: The folder cannot be written, or belongs to another user.
        """
        with contextlib.suppress(FileExistsError):
            os.mkdir(self._folder, 0o700)
        folder_stat = os.lstat(self._folder)
        if not stat.S_ISDIR(folder_stat.st_mode) or folder_stat.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, "is not a folder of this user", self._folder)
        os.makedirs(os.path.join(self.site, FALLBACK_FOLDER, "jaxlaunch"), exist_ok=True)
        for name in HOOK_FILES:
            self._copy_resource("jaxlaunch.launcher.agent", f"site/{name}", name)
        for name in (CONTRACT_FILE, ISOLATED_FILE):
            self._copy_resource("jaxlaunch", name, name)
        for name in FALLBACK_FILES:
            self._copy_resource("jaxlaunch", name, f"{FALLBACK_FOLDER}/jaxlaunch/{name}")

    def new_path(self, suffix: str) -> str:
        """Return a path in the folder that no earlier call returned."""
        return os.path.join(self._folder, f"{next(self._numbers)}.{suffix}")

    def module_command(self, module: str) -> list[str]:
        """Return a command that runs a module of jaxlaunch, which no user's file can shadow."""
        return isolated.build_command(module, script=os.path.join(self.site, ISOLATED_FILE))

    def standby_command(self, module: str, descriptor: int) -> list[str]:
        """Return the command of a standby process, which waits to run a module.

        Args:
            module: The module.
            descriptor: Descriptor on which the process receives its environment.
        """
        script = os.path.join(self.site, STANDBY_SCRIPT)
        return [*self.module_command(script), str(descriptor), module]

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _copy_resource(self, package: str, resource: str, name: str) -> None:
        path = os.path.join(self.site, name)
        if os.path.exists(path):
            return
        data = pkgutil.get_data(package, resource)
        assert data is not None, "all loaders of packages have get_data, zipimport's included"
        with open(path, "wb") as file:
            file.write(data)


# Time to import the client of the object store and to download a few small files.
START_TIMEOUT_S = 60.0
# Time to upload the newest files. The kubelet may kill the pod earlier, after its grace period.
CLOSE_TIMEOUT_S = 20.0
# Time to download the logs of ranks that move to this host. This blocks the event loop, so it must
# be shorter than the time for which a host may be silent.
MOVE_TIMEOUT_S = 3.0
READY, DONE = "ready", "done"
# Hosts that write records and summaries: the leader, and its deputy when the leader is lost.
SUMMARY_HOSTS = (0, 1)


class FolderError(Exception):
    """The bucket cannot be used."""


class RemoteFolder:
    """A local run folder, whose files another process copies to a bucket."""

    def __init__(self, url: str, config: Config) -> None:
        """Download the files of earlier attempts.

        Raises:
            FolderError: The bucket cannot be used.
        """
        folder, self._lock = make_folder("run-")
        self.folder = Path(folder)
        self._ranks = ranks = config.host_ranks()
        whole_option = ["--whole"] if config.host in SUMMARY_HOSTS else []
        argv = [url, str(self.folder), "--ranks", str(ranks.start), str(ranks.stop), *whole_option]
        mirror_arguments = isolated.inline_arguments("jaxlaunch.trainer.buckets.mirror")
        try:
            self._process = subprocess.Popen(
                [sys.executable, *mirror_arguments, *argv],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Unread output must stay in the pipe, so that poll reports it.
                bufsize=0,
                # The process must not receive a Ctrl-C of the terminal.
                start_new_session=True,
                # The process inherits the lock, because it uses the folder for a while after the
                # agent was killed.
                pass_fds=[self._lock],
            )
        except OSError:
            self._remove_folder()
            raise
        self.pid = self._process.pid
        answer = self._read_first_line()
        if answer != READY:
            # Leaving the block closes the pipes.
            with self._process:
                self._process.kill()
            self._remove_folder()
            raise FolderError(f"the run folder {url} cannot be used: {answer}")

    def _read_first_line(self) -> str:
        assert self._process.stdout is not None
        if not wait_until_ready(self._process.stdout.fileno(), READ, START_TIMEOUT_S):
            return f"it did not answer for {START_TIMEOUT_S:.0f} s"
        text = self._process.stdout.readline().decode(errors="backslashreplace").strip()
        if text == READY:
            return text
        try:
            return str(json.loads(text)["error"])
        except (ValueError, KeyError, TypeError):
            return "the trainer, which copies it, is not in this image, or does not start"

    def take_ranks(self, ranks: range) -> None:
        """Set the ranks of the next attempt, and download the logs of those that moved here."""
        if ranks == self._ranks:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        self._ranks = ranks
        command = f"ranks {ranks.start} {ranks.stop}"
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        try:
            self._process.stdin.write(command.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            # The process has ended. The agent logs this.
            return
        self._wait_for_line(command, deadline)

    def close(self) -> bool:
        """Wait until all files are uploaded, for CLOSE_TIMEOUT_S at most, and remove the folder.

        The process writes whether it succeeded, because the loop of the agent may have consumed its
        exit code.

        Returns:
            Whether everything was uploaded.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        is_uploaded = self._wait_for_line(DONE, time.monotonic() + CLOSE_TIMEOUT_S)
        if not is_uploaded:
            self._process.kill()
        self._process.wait()
        self._process.stdout.close()
        self._remove_folder()
        return is_uploaded

    def _wait_for_line(self, expected: str, deadline: float) -> bool:
        """Read lines of the process until this one. Return False if it does not arrive in time."""
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        while (remaining_s := deadline - time.monotonic()) > 0 and wait_until_ready(
            fd, READ, remaining_s
        ):
            line = self._process.stdout.readline().decode(errors="replace")
            if not line or line.strip() == expected:
                return bool(line)
        return False

    def _remove_folder(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)

"""The run folder of a job whose checkpoints are in a bucket: a folder of this host, which another process copies there.

The agent itself reaches no bucket. The process is the trainer's, `trainer/buckets/mirror`: an image without the trainer
runs the job without memory.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

from jaxlaunch import isolated
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.host import temporary_folder

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
        folder, self._lock = temporary_folder.make("run-")
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

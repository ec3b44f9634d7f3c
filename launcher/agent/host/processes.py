"""The processes of this host: all started together, all killed together, a spare for each kept ready."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launcher.agent import environment
from launcher.agent.child import Child
from launcher.agent.config import Config
from launcher.agent.kit import Kit
from launcher.agent.loop import Loop
from launcher.agent.output import Outlet, RankLog
from launcher.agent.progress import Progress
from trainer import contract

TRAINER = "trainer"  # the module that a job without a command runs


class Spare:
    """An interpreter with the trainer's imports done, waiting on a pipe for what is new in the next attempt."""

    def __init__(self, child: Child, control: int) -> None:
        self.child, self._control = child, control

    def activate(self, environ: Mapping[str, str]) -> Child:
        """Becomes the rank's process of the next attempt."""
        has_hello = self.child.progress.has_hello
        self.child.progress = Progress(time.monotonic(), phase="init")
        self.child.progress.has_hello = has_hello
        try:
            os.write(self._control, json.dumps(dict(environ)).encode() + b"\n")
        except BrokenPipeError:
            pass  # it died this moment: its end is a crash like any other
        self.close()
        return self.child

    def close(self) -> None:
        if self._control >= 0:
            os.close(self._control)
            self._control = -1


class Crew:
    """Owns every process that this agent started, and their lines."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        kit: Kit,
        outlet: Outlet,
        *,
        say: Callable[[str], None],
        heard: Callable[[Child, Mapping[str, Any]], None],
        ended: Callable[[Child, int], None],
    ) -> None:
        self.children: dict[int, Child] = {}  # of this attempt, by rank; those that ended stay until the next
        self._config, self._loop, self._kit, self._outlet = config, loop, kit, outlet
        self._say, self._heard, self._ended = say, heard, ended
        self._spares: dict[int, Spare] = {}
        self._has_failed_spare = False
        self._logs = {rank: RankLog(config.run_dir, rank, self._complain) for rank in config.ranks()}
        self._argv = [sys.executable, "-m", TRAINER] if config.job.command is None else config.job.command
        loop.on_child(self._ending, self._reap)

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def start(self, attempt: int, coordinator: str) -> None:
        """Starts every rank of this host: a spare that is ready, or the command."""
        fresh = environment.of_attempt(attempt, coordinator)
        self.children = {}
        for rank in self._config.ranks():
            spare = self._spares.pop(rank, None)
            self.children[rank] = spare.activate(fresh) if spare else self._start(rank, self._argv, fresh)

    def alive(self) -> list[Child]:
        return [child for child in self.children.values() if child.progress.status.exit is None]

    def signal(self, number: int) -> None:
        for child in self.alive():
            child.signal(number)

    def kill(self) -> None:
        for child in self.alive():
            child.kill()

    def dump_stacks(self) -> None:
        """Asks every process that has our hook for its stacks; the signal would end any other."""
        for child in self.alive():
            if child.progress.has_hello:
                child.signal(signal.SIGUSR1)

    def flush(self) -> None:
        for log in self._logs.values():
            log.flush()

    def dismiss(self) -> None:
        """Kills everything, spares too."""
        self.kill()
        for spare in self._spares.values():
            spare.child.kill()
            spare.close()
        self._spares.clear()

    # --- spares -------------------------------------------------------------------------------------------------------

    def keep_spares(self) -> None:
        """Starts the spares that are missing: once the ranks step, so that no start waits for it."""
        if self._config.job.command is not None or self._config.job.in_place_budget == 0 or self._has_failed_spare:
            return
        for rank in self._config.ranks():
            if rank not in self._spares:
                waits, control = os.pipe()
                argv = [sys.executable, os.path.join(self._kit.site, "spare.py"), str(waits), TRAINER]
                self._spares[rank] = Spare(self._start(rank, argv, {}, control=waits), control)
                os.close(waits)

    # --- one process --------------------------------------------------------------------------------------------------

    def _start(self, rank: int, argv: Sequence[str], extra: Mapping[str, str], control: int | None = None) -> Child:
        environ = environment.of_rank(self._config, os.environ, rank, self._kit.site)
        kinds = {contract.METRICS: "metrics", contract.STACKS: "stacks", contract.PROFILE: "profile"}
        paths = {variable: self._kit.path(kind) for variable, kind in kinds.items()}
        return Child(
            self._loop,
            rank,
            argv,
            {**environ, **paths, **extra},
            cwd=self._config.job.workdir,
            control=control,
            phase="init" if self._config.job.command is None else None,
            on_output=self._print,
            on_progress=self._hear,
        )

    def _print(self, child: Child, line: bytes) -> None:
        self._outlet.line(b"[%d] %s" % (child.rank, line))
        self._logs[child.rank].line(line)

    def _hear(self, child: Child, message: Mapping[str, Any]) -> None:
        if self.children.get(child.rank) is child:
            self._heard(child, message)

    def _ending(self, pid: int) -> None:
        """What a process of ours leaves behind in its group goes with it."""
        for child in [*self.children.values(), *(spare.child for spare in self._spares.values())]:
            if child.pid == pid:
                child.kill()

    def _reap(self, pid: int, code: int) -> None:
        for child in self.children.values():
            if child.pid == pid:
                child.reaped()
                child.progress.ended(code)
                return self._ended(child, code)
        for rank, spare in list(self._spares.items()):
            if spare.child.pid == pid:
                spare.close()
                spare.child.reaped()
                del self._spares[rank]
                self._has_failed_spare = True
                return self._say(f"the spare interpreter of rank {rank} ended with {code}; restarts will start cold")

    def _complain(self, error: OSError) -> None:
        self._say(f"a log in the run folder cannot be written: {error}")

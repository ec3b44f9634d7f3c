"""Starts agents as `launcher run` and a JobSet do, with small programs as their children, and reads their files."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.io.link import choose_free_port

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 600  # the machine is shared: long enough never to be the reason

# What a plain program needs to report on the progress pipe; prepended to every `program`.
PRELUDE = """
import json, os, signal, sys, time
RANK, SIZE, ATTEMPT = (int(os.environ[f"JAX{name}"]) for name in ("_PROCESS_ID", "_NUM_PROCESSES", "LAUNCH_ATTEMPT"))
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
def mark(name):
    open(f"{os.environ['MARKS']}/{name}-{RANK}", "w").close()
def wait_for(name):
    while not os.path.exists(f"{os.environ['MARKS']}/{name}"):
        time.sleep(0.01)
"""


def program(folder: Path, text: str, name: str = "program.py") -> tuple[str, ...]:
    """The command that runs `text`, with RANK, SIZE, ATTEMPT, say, mark and wait_for at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(PRELUDE + textwrap.dedent(text))
    return (sys.executable, str(folder / name))


def script(folder: Path, text: str, name: str = "script.py") -> Path:
    """A file with `text` alone: a program that does not know jaxlaunch."""
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


@dataclasses.dataclass
class Gang:
    """Running agents, by host; those that still run at the end of the block are killed."""

    folder: Path
    job: AgentJob
    hosts: int = 1
    generation: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    run: str = "run"
    argv: Sequence[str] = (sys.executable, "-m", "jaxlaunch.launcher.agent")
    agents: dict[int | str, subprocess.Popen[bytes]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.run_dir = self.folder / self.run
        self.marks = self.folder / "marks"
        self.marks.mkdir(parents=True, exist_ok=True)
        self.port = choose_free_port()

    def __enter__(self) -> Gang:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents.values():
            if agent.poll() is None:
                agent.kill()
            agent.wait()

    def start(
        self,
        *hosts: int,
        env: Mapping[str, str] | None = None,
        name: str = "",
        out: int | None = None,
    ) -> Gang:
        """Starts the agents of `hosts`, all of them by default; a `name` tells a second one of a host apart."""
        for host in hosts or range(self.hosts):
            with (
                self._stream(f"{name or host}.out").open("ab") as stdout,
                self._stream(f"{name or host}.err").open("ab") as stderr,
            ):
                agent = subprocess.Popen(
                    self.argv,
                    env={**self.environ(host), **self.env, **(env or {})},
                    cwd=self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout if out is None else out,
                    stderr=stderr,
                    start_new_session=True,
                )
            self.agents[name or host] = agent
        return self

    def _stream(self, name: str) -> Path:
        return self.folder / f"agent-{self.generation}-{name}"

    def environ(self, host: int) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(ROOT),
            "MARKS": str(self.marks),
            contract.LEADER: f"127.0.0.1:{self.port}",
            contract.HOSTS: str(self.hosts),
            contract.INDEX: str(host),
            contract.UID: "uid-1",
            contract.GENERATION: str(self.generation),
            contract.JOB: self.job.to_json(),
            contract.RUN_DIR: str(self.run_dir),
        }

    def wait(self) -> list[int]:
        """Every agent's exit code, in the order they were started."""
        end = time.monotonic() + PATIENCE_S
        try:
            return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agents do not end\n{self.talk}\n{self.out}") from None

    def until(self, what: str, happened: Callable[[], Any]) -> Any:
        """Waits until `happened()` is true and returns it; fails when the agents end first or it never comes."""

        def settled() -> Any:
            are_gone = all(agent.poll() is not None for agent in self.agents.values())
            return happened() or are_gone

        answer = eventually(settled)
        assert answer and (answer is not True or happened()), (
            f"{what} never happened\n{self.talk}\n{self.out}"
        )
        return answer

    def until_marked(self, *names: str) -> None:
        for name in names:
            self.until(f"the mark {name}", (self.marks / name).exists)

    def allow(self, name: str) -> None:
        """Lets children go on that wait for `name`."""
        (self.marks / name).touch()

    def signal(self, host: int, number: int = signal.SIGTERM) -> None:
        self.agents[host].send_signal(number)

    @property
    def talk(self) -> str:
        """What all agents wrote to stderr, host by host."""
        return "".join(
            path.read_text() for path in sorted(self.folder.glob(f"agent-{self.generation}-*.err"))
        )

    @property
    def out(self) -> str:
        return "".join(
            path.read_text() for path in sorted(self.folder.glob(f"agent-{self.generation}-*.out"))
        )

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    @property
    def verdict(self) -> dict[str, Any]:
        return self.summary["verdict"]

    @property
    def attempts(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.run_dir / "attempts.jsonl").read_text().splitlines()
        ]


def job(command: Sequence[str] | None, **fields: Any) -> AgentJob:
    """A job of one process per host that is given up at its first fault."""
    return AgentJob(
        "t", None if command is None else tuple(command), **({"in_place_limit": 0} | fields)
    )


def launch(folder: Path, of: AgentJob, hosts: int = 1, **fields: Any) -> tuple[Gang, list[int]]:
    """Runs a gang to its end."""
    with Gang(folder, of, hosts, **fields) as gang:
        return gang, gang.start().wait()


def eventually(happened: Callable[[], Any]) -> Any:
    """The first true answer of `happened`, or its last one when patience ends."""
    end = time.monotonic() + PATIENCE_S
    while not (answer := happened()) and time.monotonic() < end:
        time.sleep(0.02)
    return answer


def children(pid: int) -> list[int]:
    """Pids of the processes that `pid` started and that live."""
    try:
        listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in listed]


def is_alive(pid: int) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

"""Start agents as `launcher run` and a JobSet do, with small programs as their children."""

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
from tests import forkserver
from tests.forkserver import ForkedProcess
from tests.gang.run_files import read_json_lines

ROOT = Path(__file__).parent.parent.parent
FRESH_AGENT = (sys.executable, "-m", "jaxlaunch.launcher.agent")
PATIENCE_S = 600  # the machine is shared: long enough never to be the reason

# What a plain program needs to report on the progress pipe; prepended to every `program`.
PRELUDE = """
import json, os, signal, sys, time
RANK, SIZE = int(os.environ["JAX_PROCESS_ID"]), int(os.environ["JAX_NUM_PROCESSES"])
ATTEMPT = int(os.environ["JAXLAUNCH_ATTEMPT"])
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
def mark(name):
    open(f"{os.environ['MARKS']}/{name}-{RANK}", "w").close()
def wait_for(name):
    while not os.path.exists(f"{os.environ['MARKS']}/{name}"):
        time.sleep(0.01)
"""


def write_program(folder: Path, text: str, name: str = "program.py") -> tuple[str, ...]:
    """Write a program with RANK, SIZE, ATTEMPT, say, mark and wait_for; return its command."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(PRELUDE + textwrap.dedent(text))
    return (sys.executable, str(folder / name))


def write_script(folder: Path, text: str, name: str = "script.py") -> Path:
    """Write a program that does not know jaxlaunch."""
    (folder / name).write_text(textwrap.dedent(text))
    return folder / name


@dataclasses.dataclass
class Gang:
    """Running agents by host. Leaving the block kills those that still run."""

    folder: Path
    job: AgentJob
    hosts: int = 1
    generation: int = 0
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    run: str = "run"
    # A command for agents that need an interpreter of their own.
    argv: Sequence[str] | None = None
    agents: dict[int | str, subprocess.Popen[bytes] | ForkedProcess] = dataclasses.field(
        default_factory=dict
    )

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
        """Start the agents of `hosts` (default: all). A `name` marks a second one of a host."""
        for host in hosts or range(self.hosts):
            with (
                self._stream(f"{name or host}.out").open("ab") as stdout,
                self._stream(f"{name or host}.err").open("ab") as stderr,
            ):
                self.agents[name or host] = self._start_agent(
                    {**self.environ(host), **self.env, **(env or {})},
                    stdout.fileno() if out is None else out,
                    stderr.fileno(),
                )
        return self

    def _start_agent(
        self, env: Mapping[str, str], stdout: int, stderr: int
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        # Another path has no effect on an interpreter that runs already.
        if self.argv is None and env["PYTHONPATH"] == str(ROOT):
            return forkserver.start_program(
                forkserver.AGENT, cwd=self.folder, env=env, stdout=stdout, stderr=stderr
            )
        return subprocess.Popen(
            self.argv or FRESH_AGENT,
            env=env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )

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
        """Return every agent's exit code in the order of their starts."""
        end = time.monotonic() + PATIENCE_S
        try:
            return [agent.wait(max(0.1, end - time.monotonic())) for agent in self.agents.values()]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the agents do not end\n{self.stderr}\n{self.stdout}") from None

    def wait_until(self, description: str, condition: Callable[[], Any]) -> Any:
        """Wait until `happened()` is true and return it. Fail if the agents end first."""

        def is_settled() -> Any:
            are_gone = all(agent.poll() is not None for agent in self.agents.values())
            return condition() or are_gone

        result = poll_until(is_settled)
        assert result and (result is not True or condition()), (
            f"{description} never happened\n{self.stderr}\n{self.stdout}"
        )
        return result

    def wait_until_gone(self, pids: Sequence[int]) -> None:
        self.wait_until("the end of every process", lambda: not any(map(is_alive, pids)))

    def child_pids(self) -> list[int]:
        return [pid for agent in self.agents.values() for pid in child_pids(agent.pid)]

    def wait_for_marks(self, *names: str) -> None:
        for name in names:
            self.wait_until(f"the mark {name}", (self.marks / name).exists)

    def release(self, name: str) -> None:
        """Let children continue that wait for `name`."""
        (self.marks / name).touch()

    def signal(self, host: int, number: int = signal.SIGTERM) -> None:
        self.agents[host].send_signal(number)

    @property
    def stderr(self) -> str:
        """What all agents wrote to stderr, host by host."""
        return "".join(
            path.read_text() for path in sorted(self.folder.glob(f"agent-{self.generation}-*.err"))
        )

    @property
    def stdout(self) -> str:
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
        return read_json_lines(self.run_dir / "attempts.jsonl")


def make_job(command: Sequence[str] | None, **fields: Any) -> AgentJob:
    """Return a job of one process per host that fails at its first fault."""
    return AgentJob(
        "t", None if command is None else tuple(command), **({"in_place_limit": 0} | fields)
    )


def run_gang(folder: Path, job: AgentJob, hosts: int = 1, **fields: Any) -> tuple[Gang, list[int]]:
    """Run a gang to its end."""
    with Gang(folder, job, hosts, **fields) as gang:
        return gang, gang.start().wait()


def run_program(
    folder: Path, text: str, *, hosts: int = 1, env: Mapping[str, str] | None = None, **fields: Any
) -> tuple[Gang, list[int]]:
    """Run a gang of this program to its end; `fields` are of its job."""
    return run_gang(folder, make_job(write_program(folder, text), **fields), hosts, env=env or {})


def run_script(
    folder: Path, text: str, *, hosts: int = 1, env: Mapping[str, str] | None = None, **fields: Any
) -> tuple[Gang, list[int]]:
    """Run a gang of this program, which does not know jaxlaunch, to its end."""
    command = (sys.executable, str(write_script(folder, text)))
    return run_gang(folder, make_job(command, **fields), hosts, env=env or {})


def poll_until(condition: Callable[[], Any]) -> Any:
    """Return the first true result of `condition`, or its last one after PATIENCE_S."""
    end = time.monotonic() + PATIENCE_S
    while not (result := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    return result


def child_pids(pid: int) -> list[int]:
    """Return the pids of the live children of a process."""
    try:
        pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [int(child) for child in pids]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False

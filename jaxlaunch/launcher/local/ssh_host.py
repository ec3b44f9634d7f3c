"""The part of `launcher run --hosts` on a host: describe the host, or run its agent.

The launcher starts this module through ssh and writes one JSON object to its stdin. While the agent
runs, every further line is the number of a signal for it, or is empty. The end of stdin, or its
silence, means that the launcher or the connection is gone: then the agent saves and stops, as when
its launcher dies on one machine.
"""

from __future__ import annotations

import dataclasses
import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from jaxlaunch import contract
from jaxlaunch.launcher.agent import pack
from jaxlaunch.launcher.agent.io.link import choose_free_port
from jaxlaunch.launcher.local import agents
from jaxlaunch.records import codec

# Seconds in which an agent ends after the grace period of its processes.
END_S = 30.0
# Interval at which the launcher writes a line, and silence after which it counts as gone.
HEARTBEAT_S, SILENCE_TIMEOUT_S = 30.0, 120.0
# The leader binds its port long after the choice, and JAX's coordinators use the default range.
_LEADER_PORTS = range(10_000, 20_000)
# The variables that are the same for all agents of one host of a run.
_HOST_VARIABLES = (contract.RUN_DIR, contract.SLICE, contract.INDEX)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request of the launcher.

    Attributes:
        folder: The working folder.
        run_folder: The run folder.
        paths: Other paths that the job needs.
        mark: Name of a file in the run folder that the launcher has just written.
        variables: Variables of the agent. Empty: describe the host.
        grace_s: Seconds that the processes have to save.
    """

    folder: str
    run_folder: str
    paths: Sequence[str] = ()
    mark: str = ""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    grace_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """Facts about a host, which the launcher compares with its own machine.

    Attributes:
        digest: Digest of the agent that jaxlaunch on the host has.
        mark: Content of the launcher's file, or None if the host does not see it.
        missing_paths: Paths of the request that do not exist.
        free_port: A port on which nothing listens.
    """

    digest: str
    mark: str | None
    missing_paths: Sequence[str]
    free_port: int


def describe_host(request: Request) -> HostFacts:
    """Return the facts about this host."""
    try:
        mark = (Path(request.run_folder) / request.mark).read_text()
    except OSError:
        mark = None
    missing_paths = [path for path in request.paths if not os.path.exists(path)]
    port = choose_free_port(_LEADER_PORTS)
    return HostFacts(pack.archive_digest(), mark, missing_paths, port)


def run_agent(request: Request, stdin: int) -> int:
    """Run the agent until it ends, kill what it leaves behind, and return its exit code."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    variables = {"PATH": path, **request.variables, contract.PARENT: str(os.getpid())}
    # An earlier agent, whose connection broke, stops by itself. A second signal would end its save.
    entries = [f"{name}={variables[name]}".encode() for name in _HOST_VARIABLES]
    agents.await_agents(entries, SILENCE_TIMEOUT_S + request.grace_s + 2 * END_S)
    agent = subprocess.Popen(
        [sys.executable, "-I", str(agents.pack_agent(Path(request.run_folder)))],
        env={**os.environ, **variables},
        cwd=request.folder,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )

    def forward_signals() -> None:
        with open(stdin, "rb", buffering=0) as lines:
            while select.select([lines], [], [], SILENCE_TIMEOUT_S)[0]:
                line = lines.readline()
                if not line:
                    break
                if line.strip():
                    agent.send_signal(int(line))
        agent.terminate()
        try:
            agent.wait(request.grace_s + END_S)
        except subprocess.TimeoutExpired:
            agent.kill()

    threading.Thread(target=forward_signals, daemon=True).start()
    code = agent.wait()
    agents.kill_orphans(variables[contract.POD_UID], contract.POD_UID)
    return code if code >= 0 else contract.FIRST_SIGNAL_CODE - code


def main() -> None:
    """Answer the request on stdin."""
    # Without a buffer, a thread that waits for stdin does not keep the process from exiting.
    stdin = os.dup(0)
    with open(0, "rb", buffering=0) as lines:
        request = codec.read_record(Request, json.loads(lines.readline()))
    if request.variables:
        sys.exit(run_agent(request, stdin))
    print(json.dumps(dataclasses.asdict(describe_host(request))))


if __name__ == "__main__":
    main()

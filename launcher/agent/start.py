"""From the environment to a running agent, and to the pod's exit code."""

from __future__ import annotations

import os
import sys

from launcher.agent import code, config
from launcher.agent.agent import Agent, leave_behind
from launcher.agent.verdict import of_code
from trainer import contract


def start() -> int:
    """Runs this host's agent; returns its exit code."""
    try:
        place = config.read(os.environ)
        if place.code is not None:
            code.unpack(*place.code)
    except (config.ConfigError, code.CodeError) as error:
        return _refuse(contract.BAD_SPEC, str(error))
    except OSError as error:
        return _refuse(contract.STORAGE, f"the job's code cannot be unpacked: {error}")
    try:
        agent = Agent(place)
    except OSError as error:
        message = f"host {place.host}: a port is taken ({error}): is another agent of this host running?"
        return _refuse(contract.LOST, message)
    return agent.run()


def _refuse(exit_code: int, message: str) -> int:
    print(f"agent: {message}", file=sys.stderr)
    if os.environ.get(contract.NODE):
        leave_behind(of_code(exit_code, message), None, 0, 0)
    return exit_code

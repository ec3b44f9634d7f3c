"""`python -m launcher.agent`: the environment in, a code of the contract out."""

from __future__ import annotations

import os
import sys

from launcher.agent import config
from launcher.agent.agent import Agent, leave_behind
from launcher.agent.verdict import of_code
from trainer import contract


def main() -> None:
    try:
        place = config.read(os.environ)
    except config.ConfigError as error:
        print(f"agent: {error}", file=sys.stderr)
        if os.environ.get(contract.NODE):
            leave_behind(of_code(contract.BAD_SPEC, str(error)), None, 0, 0)
        sys.exit(contract.BAD_SPEC)
    try:
        agent = Agent(place)
    except OSError as error:
        print(f"agent {place.host}: a port is taken ({error}): is another agent of this host running?", file=sys.stderr)
        sys.exit(contract.LOST)
    sys.exit(agent.run())


if __name__ == "__main__":
    main()

"""`python -m jaxlaunch.launcher.agent`: reads the environment, exits with a code of the contract."""

from __future__ import annotations

import signal
import sys

STOPPING = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Runs the agent of this host and exits with its code."""
    # PID 1 of a container loses a signal without a handler; a blocked one waits until there is a handler.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    from jaxlaunch.launcher.agent.agent import start

    sys.exit(start())


if __name__ == "__main__":
    main()

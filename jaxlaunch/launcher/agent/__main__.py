"""Entry point of `python -m jaxlaunch.launcher.agent`."""

from __future__ import annotations

import signal
import sys

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    """Run the agent of this host and exit with its exit code, which `contract` defines."""
    # PID 1 of a container loses a signal that has no handler. A blocked signal waits until there is
    # one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    from jaxlaunch.launcher.agent.agent import run_agent

    sys.exit(run_agent())


if __name__ == "__main__":
    main()

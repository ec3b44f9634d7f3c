"""`python -m launcher.agent`: the environment in, a code of the contract out."""

from __future__ import annotations

import signal
import sys

STOPPING = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    # PID 1 of a container loses a signal that it has no handler for; a blocked one waits until there is one.
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    from launcher.agent.start import start

    sys.exit(start())


if __name__ == "__main__":
    main()

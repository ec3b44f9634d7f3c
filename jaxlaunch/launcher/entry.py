"""The command `launcher`: a Ctrl-C while its modules are imported ends it as one later does, without a traceback."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Runs the command line and exits."""
    try:
        from jaxlaunch.launcher.cli.main import main as run
    except KeyboardInterrupt:
        sys.exit(130)  # as cli.main.INTERRUPTED, which may not have been imported
    run()

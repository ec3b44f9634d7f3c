"""Entry point of the command `launcher`. Ctrl-C during its imports prints no traceback."""

from __future__ import annotations

import sys
from typing import NoReturn


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        from jaxlaunch.launcher.cli.main import main as run_command_line
    except KeyboardInterrupt:
        # The same as cli.main.INTERRUPTED, which may not have been imported.
        sys.exit(130)
    run_command_line()

"""Commands that show the sections of docs/troubleshooting.md. Pure."""

from __future__ import annotations

from jaxlaunch import contract

PAGE = "docs/troubleshooting.md"


def section_command(name: str) -> str:
    """Return the command that shows a section. Every installation includes the page."""
    return f"launcher help troubleshooting#{name}"


def command_for_code(code: int) -> str | None:
    """Return the command that explains an exit code, or None if there is nothing to fix."""
    name = contract.OUTCOMES[code].section if code in contract.OUTCOMES else "exit-codes"
    return None if name is None else section_command(name)

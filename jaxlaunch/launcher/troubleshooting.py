"""The sections of docs/troubleshooting.md: the command that shows one, and the one about an exit code. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from jaxlaunch import contract

PAGE = "docs/troubleshooting.md"
_SECTIONS: Mapping[int, str] = {
    contract.NOT_FINITE: "data-and-loss",
    contract.BAD_DATA: "data-and-loss",
    contract.NO_CHECKPOINT: "checkpoints-and-storage",
    contract.STORAGE: "checkpoints-and-storage",
    contract.LOST: "rendezvous-and-lost-hosts",
    contract.HANG: "hangs-and-timeouts",
    contract.KILLED: "out-of-memory",
}


def section(name: str) -> str:
    """Return the command that shows a section of the page, which every installation has."""
    return f"launcher help troubleshooting#{name}"


def of_code(code: int) -> str | None:
    """Return the link for an exit code, or None where the job is done or was stopped, which nobody needs to fix."""
    return None if code in (contract.DONE, contract.PREEMPTED) else section(_SECTIONS.get(code, "exit-codes"))

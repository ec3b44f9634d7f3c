"""docs/troubleshooting.md has an entry for each exit code."""

from __future__ import annotations

from jaxlaunch import contract
from jaxlaunch.launcher import troubleshooting
from jaxlaunch.launcher.diagnose.explain.situations import section_link


def test_exit_code_links_to_its_section() -> None:
    assert (
        section_link("failed", contract.HANG) == "launcher help troubleshooting#hangs-and-timeouts"
    )
    assert section_link("failed") == "launcher help troubleshooting#exit-codes"
    assert troubleshooting.command_for_code(134) == "launcher help troubleshooting#exit-codes"
    for code in (contract.DONE, contract.PREEMPTED):
        assert troubleshooting.command_for_code(code) is None

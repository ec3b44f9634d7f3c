"""Tools a test needs that no package of ours brings. Missing here: skipped, loudly. Missing under CI: failed."""

import os
import shutil
from typing import NoReturn

import pytest

from tests.cluster.harness import machine


def tool(name: str, *, of: str) -> str:
    """The path of the program `name`; `of` says which package has it."""
    path = shutil.which(name)
    if path is not None:
        return path
    absent(f"{name} is not on PATH (it comes with {of})")


def a_machine_for_a_cluster() -> None:
    """Root, Go and the packages that a real Kubernetes on this machine is made of."""
    if faults := machine.lacks():
        absent("; ".join(faults))


def absent(what: str) -> NoReturn:
    reason = f"{what}: what this test shows is NOT shown"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)

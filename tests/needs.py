"""Tools a test needs that no package of ours brings. Missing here: skipped, loudly. Missing under CI: failed."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests import environments
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


def packages(environment: str) -> Path:
    """The folder of the packages of an environment of tests.environments, which is built if need be."""
    try:
        python = environments.python(environment)
    except environments.Missing as error:
        absent(str(error))
    (found,) = python.parents[1].glob("lib/python3*/site-packages")
    return found


def absent(what: str) -> NoReturn:
    reason = f"{what}: what this test shows is NOT shown"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)

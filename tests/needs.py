"""What a test needs that may be missing here: then it is skipped, with a reason, and under CI it fails."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests import environments
from tests.cluster.harness import machine

ROOT = Path(__file__).parents[1]


def tool(name: str, *, of: str) -> str:
    """The path of the program `name`; `of` says which package has it."""
    path = shutil.which(name)
    if path is not None:
        return path
    absent(f"{name} is not on PATH (it comes with {of})")


def a_machine_for_a_cluster() -> None:
    """Root, Go and the packages that a real Kubernetes on this machine is made of."""
    if faults := machine.find_missing():
        absent("; ".join(faults))


def packages(environment: str) -> Path:
    """The folder of the packages of an environment of tests.environments, which is built if need be."""
    try:
        python = environments.python(environment)
    except environments.Missing as error:
        absent(str(error))
    (found,) = python.parents[1].glob("lib/python3*/site-packages")
    return found


def arrays(path: Path) -> Path:
    """The same path: a file of tests/fixtures with numbers that another implementation computed.

    Such files would be nine tenths of the source distribution, which therefore leaves them out
    (MANIFEST.in).
    """
    if not path.exists() and (ROOT / "PKG-INFO").exists():
        absent(
            f"{path.relative_to(ROOT)} is not in the source distribution: run this test in a clone"
        )
    return path


def a_clone() -> None:
    """The repository, whose files and names a source distribution does not have as they are there."""
    if (ROOT / "PKG-INFO").exists():
        absent("this is a source distribution and not a clone")


def absent(what: str) -> NoReturn:
    reason = f"{what}: what this test shows is NOT shown"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)

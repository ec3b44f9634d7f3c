"""What a test needs that may be missing: then it is skipped with a reason, and fails under CI."""

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from tests import environments
from tests.cluster.harness import machine

ROOT = Path(__file__).parents[1]


def tool(name: str, *, package: str) -> str:
    """Return the path of a program; `package` names its package."""
    path = shutil.which(name)
    if path is None:
        absent(f"{name} is not on PATH (it comes with {package})")
    return path


def a_machine_for_a_cluster() -> None:
    """Require root, Go and the packages of a real Kubernetes on this machine."""
    if faults := machine.find_missing():
        absent("; ".join(faults))


def packages(environment: str) -> Path:
    """Return the package folder of an environment, which is built if necessary."""
    try:
        python = environments.find_python(environment)
    except environments.MissingEnvironmentError as error:
        absent(str(error))
    (folder,) = python.parents[1].glob("lib/python3*/site-packages")
    return folder


def arrays(path: Path) -> Path:
    """Return the path of a fixture with numbers that another implementation computed.

    Such files would be nine tenths of the source distribution, which therefore omits them
    (MANIFEST.in).
    """
    if not path.exists() and (ROOT / "PKG-INFO").exists():
        absent(
            f"{path.relative_to(ROOT)} is not in the source distribution: run this test in a clone"
        )
    return path


def a_clone() -> None:
    """Return the repository; a source distribution does not have its files and names."""
    if (ROOT / "PKG-INFO").exists():
        absent("this is a source distribution and not a clone")


def absent(missing: str) -> NoReturn:
    reason = f"{missing}: what this test shows is NOT shown"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)

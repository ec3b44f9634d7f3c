"""Tools a test needs that no package of ours brings. Missing here: skipped, loudly. Missing under CI: failed."""

import os
import shutil

import pytest


def tool(name: str, *, of: str) -> str:
    """The path of the program `name`; `of` says which package has it."""
    path = shutil.which(name)
    if path is not None:
        return path
    reason = f"{name} is not on PATH (it comes with {of}): what this test shows is NOT shown"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(reason)
    pytest.skip(reason)

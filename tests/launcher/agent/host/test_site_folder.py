"""What the site hook does to a Python below the agent before its program runs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.host.site_folder import SiteFolder

COLLECTS = "import gc; print(gc.isenabled())"
IN_A_CHILD = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {COLLECTS!r}])"


@pytest.fixture
def folder() -> Iterator[SiteFolder]:
    made = SiteFolder()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("program", "environ", "collects"),
    [
        (COLLECTS, {contract.TRAIN_SPEC: "{}"}, False),
        (IN_A_CHILD, {contract.TRAIN_SPEC: "{}"}, True),
        (COLLECTS, {}, True),
    ],
    ids=["the trainer", "a process that the trainer starts", "a user's program"],
)
def test_garbage_waits_for_the_trainers_imports(
    folder: SiteFolder, program: str, environ: dict[str, str], collects: bool
) -> None:
    reports, end = os.pipe()
    environ = {**os.environ, "PYTHONPATH": folder.site, contract.PROGRESS_FD: str(end), **environ}
    command = [sys.executable, "-c", program]
    printed = subprocess.run(command, env=environ, pass_fds=[end], capture_output=True, text=True, check=True)
    os.close(end)
    os.close(reports)
    assert printed.stdout.strip() == str(collects)

"""Run every test on the CPU, in an empty folder and so that it can be interrupted."""

from __future__ import annotations

import os
import resource
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import compiled, environments, needs

if TYPE_CHECKING:
    from tests.helm.charts import Helm

MAX_FILES = 16_384
pytest_plugins = ["tests.failures"]
os.environ["JAX_PLATFORMS"] = "cpu"
# A shell lets what it starts in the background ignore Ctrl-C and Ctrl-\, and so would every process
# that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# A command that runs in this process leaves its connections open, as it may where a process ends
# with it: thousands of them are more files than an ordinary user has without asking for more.
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
max_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, max_files), hard))
compiled.make_folder()
# Without bytecode, each process that tests start would compile our Python files again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session", autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Change to a folder of this test run: commands would see the runs in a user's clone."""
    folder, start = tmp_path_factory.mktemp("empty"), Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(start)


@pytest.fixture(autouse=True)
def stays_empty(empty_folder: Path) -> Iterator[None]:
    """Fail a test that leaves files in the folder that it shares with others."""
    yield
    leftovers = sorted(empty_folder.iterdir())
    for path in leftovers:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert not leftovers, (
        f"left in the working folder: {', '.join(path.name for path in leftovers)}; use tmp_path"
    )


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """Start Helm's own engine, in an environment that is built on first use."""
    from tests.helm import charts

    try:
        environments.find_python("helm")
    except environments.MissingEnvironmentError as error:
        needs.absent(str(error))
    with charts.Helm() as engine:
        yield engine

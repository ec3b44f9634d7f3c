"""Every test runs on the CPU, whatever the machine holds, and can be interrupted, whatever starts it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import compiled, environments, needs

if TYPE_CHECKING:
    from tests.helm.charts import Helm

pytest_plugins = ["tests.failures"]
os.environ["JAX_PLATFORMS"] = "cpu"
# A shell lets what it starts in the background ignore Ctrl-C and Ctrl-\, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
compiled.make_folder()
# Of the processes that tests start: each would compile our files' Python anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


@pytest.fixture(scope="session")
def helm() -> Iterator[Helm]:
    """Helm's own engine, in an environment that pip builds on first use."""
    from tests.helm import charts

    try:
        environments.python("helm")
    except environments.Missing as error:
        needs.absent(str(error))
    with charts.Helm() as engine:
        yield engine

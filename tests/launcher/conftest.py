"""The API server that the launcher is tried against where no real one is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.launcher import apiserver
from tests.launcher.apiserver import Server


@pytest.fixture
def server() -> Iterator[Server]:
    with apiserver.serve_in_thread(Server()) as server:
        yield server

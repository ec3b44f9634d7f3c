"""The API server that the launcher is tried against where no real one is needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from tests.launcher import apiserver
from tests.launcher.apiserver import Server
from tests.launcher.invoke import Launcher, launcher


@pytest.fixture
def server() -> Iterator[Server]:
    with apiserver.serve_in_thread(Server()) as server:
        yield server


@pytest.fixture
def run_launcher(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Launcher:
    return functools.partial(launcher, capsys, monkeypatch)

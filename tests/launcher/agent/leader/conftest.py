"""The leaders of a test, whose sockets are closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.agent.leader.gangs import Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    made: list[Gang] = []

    def make(hosts: int, **fields: Any) -> Gang:
        made.append(Gang(hosts, tmp_path / str(len(made)), **fields))
        return made[-1]

    yield make
    for one in made:
        for sock in one.sockets:
            sock.close()
        for ready in list(one.loop.ready.values()):
            link = getattr(ready, "__self__", None)
            if link is not None:
                link.close()
        one.leader._gate._listener.close()

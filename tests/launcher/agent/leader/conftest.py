"""The leaders of a test, whose sockets are closed at its end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launcher.agent.leader.gangs import Gang


@pytest.fixture
def gang(tmp_path: Path) -> Iterator[Callable[..., Gang]]:
    created: list[Gang] = []

    def make(hosts: int, **fields: Any) -> Gang:
        created.append(Gang(hosts, tmp_path / str(len(created)), **fields))
        return created[-1]

    yield make
    for item in created:
        for sock in item.sockets:
            sock.close()
        for ready in list(item.loop.ready.values()):
            link = getattr(ready, "__self__", None)
            if link is not None:
                link.close()
        item.leader._gate._listener.close()

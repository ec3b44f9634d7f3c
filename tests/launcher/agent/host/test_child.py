"""The lines of the progress pipe, as an agent reads them."""

from __future__ import annotations

from typing import Any

import pytest

from jaxlaunch.launcher.agent.gang import progress

NONE = {"note": "rank 0 wrote a line to the progress pipe that is not JSON"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"phase": "step", "step": 3}', {"phase": "step", "step": 3}),
        (
            b'{"error":{"type":"ValueError","traceback":"Fi{"phase":"step","step":3}',
            {"phase": "step", "step": 3},
        ),
        (b'{"metrics": {"loss": 1{"hello": "site", "pid": 7}', {"hello": "site", "pid": 7}),
        (b'{"note": "half{"metrics":{"loss":1.5}}', {"metrics": {"loss": 1.5}}),
        (b'{"note": "says {\\"phase\\": 1}"}', {"note": 'says {"phase": 1}'}),
        (b'{"error":{"type":"ValueError","traceback":"Fi', {}),
        (b"Hello from C", NONE),
        (b"[" * 60_000, NONE),
        (b"\xff\xfe", NONE),
    ],
)
def test_line_after_half_a_line_is_read(line: bytes, message: Any) -> None:
    assert progress.read_line(line, 0) == message

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from jaxlaunch.launcher.cli import live_block
from jaxlaunch.launcher.cli.live_block import LiveBlock

METRICS = """\
# TYPE jaxlaunch_step gauge
jaxlaunch_step{job="x",rank="0"} 50.0
jaxlaunch_step{job="x",rank="1"} 49.0
jaxlaunch_target_step{job="x",rank="0"} 200.0
"""


class Agent(BaseHTTPRequestHandler):
    asked = threading.Event()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.encode())
        self.asked.set()

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Agent) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_block_shows_progress_of_rank_0_and_is_erased(
    tmp_path: Path,
    address: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_block, "PERIOD_S", 0.01)
    agents = tmp_path / "agents.json"
    agents.write_text("of an earlier run")
    with LiveBlock(tmp_path):
        assert not agents.exists()
        agents.write_text(json.dumps([{"host": 0, "address": address, "pid": 1}]))
        assert Agent.asked.wait(10)
        Agent.asked.clear()
        assert Agent.asked.wait(10)  # what was read by the first request is shown now
    shown = capsys.readouterr().err.split("\r\x1b[2K")
    assert shown[:2] == ["", "starting"] and shown[-1] == ""
    assert shown[2] == f"training {'━' * 10}{'╌' * 30} 50/200"


def test_remaining_time_leaves_compilation_out(tmp_path: Path) -> None:
    block = LiveBlock(tmp_path)
    assert block._describe_progress(0, 400, now=0).endswith(" 0/400")
    assert block._describe_progress(1, 400, now=600).endswith(" 1/400")
    assert block._describe_progress(2, 400, now=601).endswith(" 2/400")
    assert block._describe_progress(2, 400, now=601.5).endswith(" 2/400")
    assert block._describe_progress(4, 400, now=603).endswith(" 4/400, 6m36s left")
    assert block._describe_progress(400, 400, now=999).endswith("━ 400/400, 0s left")
    # The run restarted, and has compiled again.
    assert block._describe_progress(100, 400, now=1100).endswith(" 100/400")
    assert block._describe_progress(7, None, now=0) == "training, step 7"

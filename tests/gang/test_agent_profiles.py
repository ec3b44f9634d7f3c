"""What an agent answers to a request for a profile."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.gang.agents import Gang, job, program


def test_a_command_of_the_job_s_own_is_refused_over_http(tmp_path: Path) -> None:
    with Gang(tmp_path, job(program(tmp_path, "mark('up'); wait_for('go')"))) as gang:
        gang.start().until_marked("up-0")
        address = json.loads((gang.run_dir / "agents.json").read_text())[0]["address"]
        with pytest.raises(urllib.error.HTTPError, match="409") as refused:
            urllib.request.urlopen(f"http://{address}/profile?steps=3", data=b"", timeout=30)
        assert "only the built-in trainer can be profiled" in json.loads(refused.value.read())["error"]
        refused.value.close()
        with urllib.request.urlopen(f"http://{address}/profile", timeout=30) as answer:
            assert json.loads(answer.read()) == {"id": None, "ranks": {}}
        gang.allow("go")
        assert gang.wait() == [0]

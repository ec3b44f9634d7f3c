"""What Prometheus reads in the middle of a run, from every agent."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

from tests import needs
from tests.gang.runs import Running, digits, job

DOCUMENTED = re.findall(
    r"`(jaxlaunch_\w+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
)


def step_of(text: str, rank: int) -> float:
    found = re.search(rf'^jaxlaunch_step\{{[^}}]*rank="{rank}"[^}}]*\}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


def newest(running: Running) -> int:
    lines = (running.folder / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"])


def test_a_scrape_in_mid_run_is_sound_complete_and_up_to_date(tmp_path: Path) -> None:
    promtool = needs.tool("promtool", of="Debian's prometheus")
    (tmp_path / "marks").mkdir()
    slow = {
        "FAULT": json.dumps(
            {"kind": "slow", "at": "step", "seconds": 0.05, "mark": str(tmp_path / "marks")}
        )
    }
    train = digits(task="faulty:Faulty", steps=100_000, checkpoint={"every": 10})
    with Running(
        tmp_path, job(train, hosts=2, per_host=2, processes_per_host=2), env=slow
    ) as running:
        running.until_step(25)
        agents = json.loads((running.folder / "agents.json").read_text())
        assert [agent["ranks"] for agent in agents] == [[0, 1], [2, 3]]
        for agent in agents:
            before = newest(running)
            text = running.scrape(agent["host"])
            after = newest(running)
            for rank in agent["ranks"]:
                assert before - 2 <= step_of(text, rank) <= after + 2
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr
            missing = [
                name
                for name in DOCUMENTED
                if not re.search(rf"^{name}(_bucket)?[ {{]", text, re.MULTILINE)
            ]
            assert DOCUMENTED and not missing
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80

"""What Prometheus reads from the agent of two ranks during a run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

from tests import needs
from tests.gang.runs import Running, digits_block, fault_env, make_job

DOCUMENTED_METRICS = re.findall(
    r"`(jaxlaunch_\w+)`", (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
)


def scraped_step(text: str, rank: int) -> float:
    match = re.search(rf'^jaxlaunch_step\{{[^}}]*rank="{rank}"[^}}]*\}} (\S+)$', text, re.MULTILINE)
    assert match, text
    return float(match[1])


def newest_step(running: Running) -> int:
    lines = (running.folder / "metrics.jsonl").read_text().splitlines()
    return int(json.loads(lines[-1])["step"])


def test_scrape_is_valid_complete_and_up_to_date(tmp_path: Path) -> None:
    promtool = needs.tool("promtool", package="Debian's prometheus")
    slow = fault_env(tmp_path / "marks", "slow", "step", seconds=0.05)
    train = digits_block(task="faulty:Faulty", steps=100_000, checkpoint={"every": 10})
    with Running(tmp_path, make_job(train, processes_per_host=2), env=slow) as running:
        running.wait_for_step(25)
        agents = json.loads((running.folder / "agents.json").read_text())
        assert [agent["ranks"] for agent in agents] == [[0, 1]]
        for agent in agents:
            step_before = newest_step(running)
            text = running.scrape(agent["host"])
            step_after = newest_step(running)
            for rank in agent["ranks"]:
                assert step_before - 2 <= scraped_step(text, rank) <= step_after + 2
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True
            )
            assert checked.returncode == 0, checked.stdout + checked.stderr
            missing = [
                name
                for name in DOCUMENTED_METRICS
                if not re.search(rf"^{name}(_bucket)?[ {{]", text, re.MULTILINE)
            ]
            assert DOCUMENTED_METRICS and not missing
        running.signal(signal.SIGTERM)
        assert running.wait().code == 80

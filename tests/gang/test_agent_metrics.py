"""Every agent's /metrics during a run: complete, merged with its children's, and lint-free."""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.metrics_server import SCRAPE_INTERVAL_S
from tests import needs
from tests.gang.agents import PATIENCE_S, Gang, make_job, write_program

# Serves what a child would: as many connections as come, one text each.
SERVE_METRICS = """
import socket
def serve(text):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["JAXLAUNCH_METRICS"])
    listener.listen()
    mark("up")
    while True:
        connection, _ = listener.accept()
        connection.sendall(text.encode())
        connection.close()
say(phase="step", step=40 + RANK)
"""
STEP = r"""
serve(
    '# HELP jaxlaunch_step Steps.\n# TYPE jaxlaunch_step gauge\n'
    f'jaxlaunch_step{{rank="{RANK}"}} {40 + RANK}\n'
)
"""


def scrape_metrics(address: str, path: str = "/metrics") -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=30) as response:
        return response.read().decode()


def read_addresses(gang: Gang) -> list[dict[str, Any]]:
    return json.loads((gang.run_dir / "agents.json").read_text())


def sample_values(text: str, name: str) -> dict[str, float]:
    samples = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
    return {labels: float(value) for labels, value in samples}


def test_scrape_of_every_agent_is_complete_and_lint_free(tmp_path: Path) -> None:
    promtool = needs.tool("promtool", package="prometheus")
    with Gang(
        tmp_path,
        make_job(write_program(tmp_path, SERVE_METRICS + STEP), processes_per_host=2),
        hosts=2,
    ) as gang:
        gang.start().wait_for_marks(*(f"up-{rank}" for rank in range(4)))
        agents = read_addresses(gang)
        assert [agent["host"] for agent in agents] == [0, 1]
        assert [agent["ranks"] for agent in agents] == [[0, 1], [2, 3]]
        assert [agent["pid"] for agent in agents] == [gang.agents[host].pid for host in (0, 1)]
        for agent in agents:
            gang.wait_until(
                "word of the gang",
                lambda address=agent["address"]: (
                    sample_values(scrape_metrics(address), "jaxlaunch_attempt") == {"": 1.0}
                ),
            )
            text = scrape_metrics(agent["address"])
            assert all(
                f"# TYPE {row.name} " in text
                for row in contract.PROMETHEUS
                if row.exporter == "agent"
            )
            checked = subprocess.run(
                [promtool, "check", "metrics"], input=text, capture_output=True, text=True
            )
            assert (checked.returncode, checked.stdout + checked.stderr) == (0, "")
            expected = {f'rank="{rank}"': 40.0 + rank for rank in agent["ranks"]}
            assert (
                sample_values(text, "jaxlaunch_step")
                == sample_values(text, "jaxlaunch_rank_step")
                == expected
            )
            assert sample_values(text, "jaxlaunch_children_up") == {"": 2.0}
            assert (
                sample_values(text, "jaxlaunch_phase")[f'rank="{agent["ranks"][0]}",phase="step"']
                == 1.0
            )


def test_child_that_does_not_answer_does_not_delay_the_scrape(tmp_path: Path) -> None:
    silent = """
    import socket
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["JAXLAUNCH_METRICS"])
    listener.listen()
    mark("up")
    time.sleep(3600)
    """
    with Gang(tmp_path, make_job(write_program(tmp_path, silent))) as gang:
        gang.start().wait_for_marks("up-0")
        assert sample_values(
            scrape_metrics(read_addresses(gang)[0]["address"]), "jaxlaunch_children_up"
        ) == {"": 1.0}


NOT_FINITE = "say(hello='trainer'); mark('up'); wait_for('go'); os._exit(76)"


def test_agent_of_a_failed_job_waits_for_a_last_scrape(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, NOT_FINITE)), hosts=2) as gang:
        gang.start().wait_for_marks("up-0", "up-1")
        address = read_addresses(gang)[0]["address"]
        restarts = sample_values(scrape_metrics(address), "jaxlaunch_restarts_total")
        assert restarts['cause="not_finite"'] == 0
        gang.release("go")
        gang.wait_until("the verdict", lambda: gang.summary["status"] == "failed")
        assert gang.agents[1].wait(PATIENCE_S) == 76  # nobody ever came to read it
        assert (
            sample_values(scrape_metrics(address), "jaxlaunch_restarts_total")['cause="not_finite"']
            == 1
        )
        assert gang.wait() == [76, 76]


def test_agent_that_waits_for_a_scrape_leaves_on_a_signal(tmp_path: Path) -> None:
    with Gang(tmp_path, make_job(write_program(tmp_path, NOT_FINITE))) as gang:
        gang.start().wait_for_marks("up-0")
        scrape_metrics(read_addresses(gang)[0]["address"])
        gang.release("go")
        gang.wait_until("the verdict", lambda: gang.summary["status"] == "failed")
        gang.signal(0)
        signalled = time.monotonic()
        assert gang.wait() == [76]
        assert time.monotonic() - signalled < SCRAPE_INTERVAL_S / 2

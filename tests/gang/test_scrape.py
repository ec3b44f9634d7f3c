"""What Prometheus gets from every agent of a run that trains."""

import json
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import needs
from tests.gang.runs import Running, digits, job

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
HOSTS, PROCESSES = 2, 2


def scrape(address: str) -> str:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def samples(text: str, name: str) -> dict[int, float]:
    """The values of `name` by rank."""
    found = re.findall(rf'^{name}\{{[^}}]*rank="(\d+)"[^}}]*\}} (\S+)$', text, re.MULTILINE)
    return {int(rank): float(value) for rank, value in found}


def newest(running: Running) -> int:
    """The last step that process 0 wrote down; it writes each one step late."""
    return int(json.loads((running.folder / "metrics.jsonl").read_text().splitlines()[-2])["step"])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    train = digits(steps=1_000_000, checkpoint={"every": 5, "keep": 1})
    document = job(train, hosts=HOSTS, per_host=2, processes_per_host=PROCESSES)
    with Running(tmp_path_factory.mktemp("scrape"), document) as running:
        running.until_step(20)
        yield running


def agents(training: Running) -> list[dict[str, object]]:
    found: list[dict[str, object]] = json.loads((training.folder / "agents.json").read_text())
    assert [agent["host"] for agent in found] == list(range(HOSTS))
    return found


def test_promtool_finds_no_fault_in_what_an_agent_serves(training: Running) -> None:
    promtool = needs.tool("promtool", of="the Debian package prometheus")
    for agent in agents(training):
        text = scrape(str(agent["address"]))
        checked = subprocess.run([promtool, "check", "metrics"], input=text, text=True, capture_output=True)
        assert checked.returncode == 0 and checked.stderr == "", checked.stderr


def test_every_name_of_the_docs_is_in_the_scrape_of_every_agent(training: Running) -> None:
    names = re.findall(r"^\| `(jaxlaunch_\w+)` \| (\w+)", DOCS.read_text(), re.MULTILINE)
    assert names
    for agent in agents(training):
        text = scrape(str(agent["address"]))
        for name, kind in names:
            sample = f"{name}_bucket" if kind == "histogram" else name
            assert re.search(rf"^{sample}[{{ ]", text, re.MULTILINE), f"{name} is not served by agent {agent['host']}"


def test_the_step_of_every_rank_is_its_own_and_of_this_moment(training: Running) -> None:
    for agent in agents(training):
        before = newest(training)
        text = scrape(str(agent["address"]))
        after = newest(training)
        steps = samples(text, "jaxlaunch_step")
        assert list(steps) == agent["ranks"]
        for step in steps.values():
            assert before - 2 <= step <= after + 3  # the line is read after a next one is begun


def test_what_a_run_does_shows_in_the_numbers(training: Running) -> None:
    (leader, *_) = agents(training)
    text = scrape(str(leader["address"]))
    assert samples(text, "jaxlaunch_loss")[0] > 0
    assert samples(text, "jaxlaunch_examples_per_second")[0] > 0
    training.until("a commit", lambda: samples(scrape(str(leader["address"])), "jaxlaunch_checkpoint_step")[0] >= 5)
    assert samples(scrape(str(leader["address"])), "jaxlaunch_checkpoint_saves_total")[0] >= 1

"""The chart's Grafana dashboards: valid files, and queries that Prometheus can answer."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch import contract
from tests import needs
from tests.gang.runs import Running, fault_env, make_job
from tests.gang.watching import RULES, Prometheus, shorten_durations

FILES = sorted((Path(__file__).parents[2] / "helm" / "launcher" / "dashboards").glob("*.json"))
DASHBOARDS: dict[str, dict[str, Any]] = {path.stem: json.loads(path.read_text()) for path in FILES}
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
VALUES = {"$namespace": "team", "$run": "clean", "$rank": ".*", "$__rate_interval": "5s"}
# What no CPU tells: its peak, and how much of the memory is a device's.
NOT_ON_CPU = ("jaxlaunch_mfu_ratio", "jaxlaunch_device_memory_bytes")
RECORDED = {
    rule["record"]
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "record" in rule
}


def data_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def resolve_query(query: str) -> str:
    """Return a query as Grafana sends it, in the short time of the test."""
    return functools.reduce(
        lambda text, name: text.replace(name, VALUES[name]), VALUES, shorten_durations(query)
    )


QUERIES = [
    pytest.param(target["expr"], id=f"{name}-{panel['title']}-{target['refId']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in data_panels(dashboard)
    for target in panel["targets"]
]


@pytest.fixture(scope="module")
def running_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Start a clean run with text, float16, evaluations, saves and a compilation cache."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "corpus.txt").write_text("all work and no play makes jack a dull boy\n" * 200)
    train = {
        "task": "faulty:FaultyText",
        "model": {
            "kind": "decoder",
            "layers": 1,
            "width": 32,
            "heads": 2,
            "vocab": 256,
            "length": 32,
        },
        "data": {
            "source": "text",
            "path": str(folder / "corpus.txt"),
            "tokenizer": "bytes",
            "eval_split": 0.2,
        },
        "precision": "fp16",
        "batch": 16,
        "steps": 1_000_000,
        "log_every": 5,
        "optimizer": {"lr": 1e-3, "schedule": {"name": "constant"}},
        "eval": {"every": 20, "batches": 2},
        "checkpoint": {"every": 20},
        "compile_cache": str(folder / "cache"),
    }
    # Both ranks wait at each step, or the endless run would take all of the machine.
    pause = fault_env(folder / "marks", "slow", "step", seconds=0.1)
    with Running(folder, make_job(train, hosts=2, per_host=1), env=pause) as running:
        running.wait_for_step(25)
        yield running


@pytest.fixture(scope="module")
def prometheus(
    running_job: Running, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = needs.tool("prometheus", package="Debian's prometheus")
    with Prometheus(program, tmp_path_factory.mktemp("prometheus") / "it") as watching:
        watching.watch("clean", running_job)
        watching.wait_until(
            "shares of ten minutes", lambda: watching.query("jaxlaunch:own_ratio:10m")
        )
        watching.wait_until("a goodput", lambda: watching.query("jaxlaunch:goodput_ratio:1h >= 0"))
        yield watching


@pytest.mark.parametrize("query", QUERIES)
def test_every_query_returns_data_of_a_clean_run(query: str, prometheus: Prometheus) -> None:
    series = prometheus.wait_until(
        f"an answer to {resolve_query(query)}", lambda: prometheus.query(resolve_query(query))
    )
    if not any(name in query for name in NOT_ON_CPU):
        prometheus.wait_until(
            "a number",
            lambda: any(
                math.isfinite(value) for _, value in prometheus.query(resolve_query(query))
            ),
        )
    assert series


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_variable_has_values(name: str, prometheus: Prometheus) -> None:
    for variable in DASHBOARDS[name]["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert match and variable["query"]["query"] == variable["definition"]
            assert any(
                match[2] in labels for labels, _ in prometheus.query(resolve_query(match[1]))
            )


def test_queries_and_rules_name_only_exported_or_recorded_series(running_job: Running) -> None:
    exported = set(re.findall(r"^(jaxlaunch_\w+?)(?:\{| )", running_job.scrape(), re.MULTILINE))
    assert {metric.name for metric in contract.PROMETHEUS if metric.type != "histogram"} <= exported
    rules = [path.read_text() for path in RULES]
    expressions = [query.values[0] for query in QUERIES] + [
        rule["expr"]
        for text in rules
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
    ]
    used = {name for text in expressions for name in re.findall(r"\bjaxlaunch[_:][\w:]+", text)}
    assert used <= exported | RECORDED, used - exported - RECORDED


# --- the files ------------------------------------------------------------------------------------


def test_dashboards_are_fleet_job_and_ranks_with_their_own_uids() -> None:
    assert set(DASHBOARDS) == {"fleet", "job", "ranks"}
    assert {name: board["uid"] for name, board in DASHBOARDS.items()} == {
        n: f"jaxlaunch-{n}" for n in DASHBOARDS
    }


@pytest.mark.parametrize("name", DASHBOARDS)
def test_every_panel_has_an_id_a_unit_a_description_and_the_data_source(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert (
        dashboard["templating"]["list"][0] | {"name": "datasource", "type": "datasource"}
        == (dashboard["templating"]["list"][0])
    )
    numbers = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(numbers)) == len(numbers)
    for panel in data_panels(dashboard):
        assert panel["title"] and panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"] == DATASOURCE
        assert all(target["datasource"] == DATASOURCE for target in panel["targets"])
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references)


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    occupied: set[tuple[int, int]] = set()
    for panel in DASHBOARDS[name]["panels"]:
        position = panel["gridPos"]
        columns = range(position["x"], position["x"] + position["w"])
        rows = range(position["y"], position["y"] + position["h"])
        cells = set(itertools.product(columns, rows))
        assert max(columns) < 24 and not cells & occupied, panel["title"]
        occupied |= cells

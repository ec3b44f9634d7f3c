"""Fire every alert of the chart by its cause in real runs that a real Prometheus scrapes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.cli.help import find_section, list_anchors
from tests import needs
from tests.gang import memorylimit
from tests.gang.runs import (
    Running,
    descendant_pids,
    digits_block,
    fault_env,
    kill_processes,
    make_job,
)
from tests.gang.watching import RULES, SCALE, Prometheus, shorten_durations

ROOT = Path(__file__).parents[2]
ALERTS = [
    rule
    for path in RULES
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
]
ENDLESS = 1_000_000
# What a process that fills its container does: it stays just below the limit, where nothing is
# killed yet.
FILL_MEMORY = """
import time
from jaxlaunch.runs import host_load
held, memory = [], host_load.read_memory()
while memory["in_use"] < 0.93 * memory["limit"]:
    held.append(bytearray(1 << 20))
    memory = host_load.read_memory()
time.sleep(3600)
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Running]]:
    """Yield a clean run, one with a slow source and one with a slow rank 1, all training."""
    folder = tmp_path_factory.mktemp("runs")
    endless = {"steps": ENDLESS, "task": "faulty:Faulty", "log_every": 5}
    every_step = {"kind": "slow", "at": "step"}
    clean = digits_block(**endless, checkpoint={"every": 10})
    too_many_to_keep = {
        "source": "synthetic",
        "examples": 10_000_000,
        "shape": [8, 8],
        "threads": 1,
    }
    plain = digits_block(**endless, data=too_many_to_keep)
    with ExitStack() as stack:

        def start(name: str, train: dict[str, Any], fault: dict[str, Any], **keys: Any) -> Running:
            document = make_job(train, per_host=1, **{"hosts": 2} | keys)
            return stack.enter_context(
                Running(folder / name, document, env=fault_env(folder / name / "marks", **fault))
            )

        runs = {
            "clean": start("clean", clean, every_step | {"seconds": 0.1}),
            "starved": start(
                "starved", plain, {"kind": "slow", "at": "data", "seconds": 0.05}, hosts=1
            ),
            "straggling": start(
                "straggling",
                plain,
                every_step | {"seconds": 0.2, "rank": 1},
                timeouts={"step": "30s"},
                restarts={"in_place": 10},
            ),
        }
        for running in runs.values():
            running.wait_for_step(5)
        yield runs


@pytest.fixture(scope="module")
def prometheus(
    runs: dict[str, Running], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    program = needs.tool("prometheus", package="Debian's prometheus")
    with Prometheus(program, tmp_path_factory.mktemp("prometheus") / "it") as watching:
        for name, running in runs.items():
            watching.watch(name, running)
        yield watching


def test_loss_not_finite(prometheus: Prometheus, tmp_path: Path) -> None:
    train = digits_block(optimizer={"name": "sgd", "lr": 1e38}, steps=ENDLESS, task="faulty:Faulty")
    # Slow: Prometheus reads new targets every 5 s, and must see the counter before it rises.
    slow = fault_env(tmp_path / "marks", "slow", "step", step=1, seconds=15)
    with Running(tmp_path, make_job(train, per_host=1), env=slow) as running:
        prometheus.watch("diverging", running)
        prometheus.wait_until_firing("JaxlaunchLossNotFinite", "diverging")
        assert running.wait().code == 76


def test_memory_high(prometheus: Prometheus, tmp_path: Path) -> None:
    (tmp_path / "fills.py").write_text(FILL_MEMORY)
    document = make_job(hosts=2, command=["python", str(tmp_path / "fills.py")])
    with (
        memorylimit.limit_memory(600 << 20) as limited,
        Running(tmp_path, document, prefix=limited) as running,
    ):
        prometheus.watch("full", running)
        prometheus.wait_until_firing("JaxlaunchMemoryHigh", "full", of="host")


def test_data_bound(prometheus: Prometheus) -> None:
    prometheus.wait_until_firing("JaxlaunchDataBound", "starved")


def test_straggler(prometheus: Prometheus) -> None:
    prometheus.wait_until_firing("JaxlaunchStraggler", "straggling", rank="1")
    assert {
        labels["rank"] for labels, _ in prometheus.firing("straggling") if "rank" in labels
    } == {"1"}


def test_no_progress_and_then_hang(prometheus: Prometheus, runs: dict[str, Running]) -> None:
    os.kill(runs["straggling"].rank_pids()[1], signal.SIGSTOP)
    prometheus.wait_until_firing("JaxlaunchNoProgress", "straggling")
    assert "JaxlaunchHang" not in prometheus.fired("straggling")
    prometheus.wait_until_firing("JaxlaunchHang", "straggling")


def read_attempt(running: Running) -> int:
    match = re.search(r"^jaxlaunch_attempt (\d+)", running.scrape(), re.MULTILINE)
    return int(match[1]) if match else 0


def kill_first_host(running: Running, prometheus: Prometheus) -> None:
    """Kill what the first host runs, and wait until the gang has started again."""
    number = prometheus.wait_until("an attempt", lambda: read_attempt(running))
    kill_processes(descendant_pids(running.agent_pids()[0]))
    prometheus.wait_until("another attempt", lambda: read_attempt(running) > number)


def test_restart_storm(prometheus: Prometheus, runs: dict[str, Running]) -> None:
    for _ in range(3):
        kill_first_host(runs["straggling"], prometheus)
    prometheus.wait_until_firing("JaxlaunchRestartStorm", "straggling")


def test_scrape_missing(prometheus: Prometheus, runs: dict[str, Running]) -> None:
    agent = runs["straggling"].agent_pids()[1]
    os.kill(agent, signal.SIGSTOP)
    prometheus.wait_until_firing("JaxlaunchScrapeMissing", "straggling", pod="straggling-w-0-1")
    os.kill(agent, signal.SIGCONT)


def test_goodput_low(prometheus: Prometheus, runs: dict[str, Running]) -> None:
    kill_first_host(runs["straggling"], prometheus)  # it saves nothing, so all its steps are lost
    prometheus.wait_until_firing("JaxlaunchGoodputLow", "straggling")


def test_checkpoint_too_old(prometheus: Prometheus) -> None:
    prometheus.wait_until_firing("JaxlaunchCheckpointTooOld", "starved")


def test_clean_run_fires_no_alert(prometheus: Prometheus) -> None:
    """Watch for longer than any alert needs: 75 minutes of scaled time."""
    watched = f'count_over_time(up{{run="clean", pod="clean-w-0-0"}}[1h]) >= {75 * 60 / SCALE}'
    prometheus.wait_until("an hour and a quarter", lambda: prometheus.query(watched))
    assert prometheus.query('jaxlaunch:goodput_ratio:1h{run="clean"}')
    assert prometheus.fired("clean") == set()


def test_memory_high_of_a_device(tmp_path: Path) -> None:
    """Check rows as the exporter writes them, in real time: no CPU counts a device's memory."""
    promtool = needs.tool("promtool", package="Debian's prometheus")
    pod = {"job": "jaxlaunch", "namespace": "team", "run": "r", "pod": "r-w-0-0"}
    rows = [
        ("jaxlaunch_build_info", {}, 1),
        ("jaxlaunch_host_memory_bytes", {"kind": "in_use"}, 10),
    ]
    rows.append(("jaxlaunch_host_memory_bytes", {"kind": "limit"}, 100))
    for device, used in ("0", 89), ("1", 90):
        name, labels = "jaxlaunch_device_memory_bytes", {"rank": "0", "device": device}
        rows += [(name, labels | {"kind": "in_use"}, used), (name, labels | {"kind": "limit"}, 100)]
    alert = next(rule for rule in ALERTS if rule["alert"] == "JaxlaunchMemoryHigh")
    labels_of_alert = {
        "namespace": "team",
        "run": "r",
        "pod": "r-w-0-0",
        "rank": "0",
        "device": "1",
        "of": "device",
    }
    summary = "Pod r-w-0-0 of run r: 90% of device memory used"
    annotations = alert["annotations"] | {"summary": summary}
    fires = {"exp_labels": labels_of_alert | alert["labels"], "exp_annotations": annotations}
    at_times = {"4m": [], "10m": [fires]}
    test = {
        "interval": "30s",
        "input_series": [
            {"series": series_name(name, pod | labels), "values": f"{value}x30"}
            for name, labels, value in rows
        ],
        "alert_rule_test": [
            {"eval_time": at, "alertname": alert["alert"], "exp_alerts": expected}
            for at, expected in at_times.items()
        ],
    }
    (tmp_path / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": list(map(str, RULES)), "tests": [test]})
    )
    checked = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"], capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def series_name(name: str, labels: dict[str, str]) -> str:
    """Return a series in PromQL."""
    return name + "{" + ", ".join(f'{label}="{value}"' for label, value in labels.items()) + "}"


# --- the files ------------------------------------------------------------------------------------


def test_the_rules_pass_promtool() -> None:
    promtool = needs.tool("promtool", package="Debian's prometheus")
    for path in RULES:
        checked = subprocess.run(
            [promtool, "check", "rules", "--lint-fatal", path], capture_output=True, text=True
        )
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_has_a_section_a_severity_a_row_and_a_test() -> None:
    tests, page = Path(__file__).read_text(), (ROOT / "docs/alerts.md").read_text()
    for rule in ALERTS:
        name, severity = rule["alert"], rule["labels"]["severity"]
        anchor = name.lower()
        assert rule["annotations"]["runbook_url"] == f"docs/alerts.md#{anchor}"
        section = find_section(page, anchor)
        assert section is not None and section.startswith(f"## {name}\n")
        assert "**How to see it**" in section and "**What to do**" in section
        assert severity in ("critical", "warning")
        assert {"summary", "description"} <= rule["annotations"].keys()
        assert f'wait_until_firing("{name}"' in tests
        assert f"| [{name}](#{anchor}) | {severity} |" in page
    sections = {anchor for anchor in list_anchors(page) if anchor.startswith("jaxlaunch")}
    assert sections == {rule["alert"].lower() for rule in ALERTS}
    assert len(ALERTS) == 10


def test_every_series_is_limited_to_the_namespaces() -> None:
    """Check the `namespace=~".*"` that the chart narrows; alerts would read others' runs."""
    for path in RULES:
        for group in yaml.safe_load(path.read_text())["groups"]:
            for rule in group["rules"]:
                selectors = re.findall(
                    r"(?:\bup|\bjaxlaunch_\w+|\bjaxlaunch:(?!threshold:)[\w:]+)(?:\{([^}]*)\})?",
                    rule["expr"],
                )
                assert selectors and all('namespace=~".*"' in labels for labels in selectors), rule


def test_scaling_shortens_ranges_offsets_and_durations_only() -> None:
    text = "max_over_time(jaxlaunch:x:1h[15m] offset 2h) > 60"
    assert shorten_durations(text) == "max_over_time(jaxlaunch:x:1h[7500ms] offset 60000ms) > 60"
    assert shorten_durations("10m") == "5000ms"
    assert shorten_durations("jaxlaunch:step") == "jaxlaunch:step"

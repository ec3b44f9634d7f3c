"""A real Prometheus on loopback that scrapes real runs, with the chart's rules SCALE × faster.

One factor shortens every range, offset, `for` and threshold in seconds of the rules, so that an
alert of an hour fires in half a minute; the series and the expressions are the product's own.
Scrapes are a second apart: two minutes of scaled time, coarser than a real Prometheus's.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxlaunch.launcher.agent.io.link import choose_free_port
from tests.gang.runs import PATIENCE_S, Running

RULES = sorted((Path(__file__).parents[2] / "helm" / "launcher" / "rules").glob("*.yaml"))
SCALE = 120
UNITS_S = {"s": 1, "m": 60, "h": 3600}
DURATION = re.compile(r"(?<=\[)(\d+)([smh])(?=\])|(?<=offset )(\d+)([smh])|(?<=^)(\d+)([smh])(?=$)")
CONFIG = {
    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "500ms"},
    "rule_files": ["rules/*.yaml"],
    "scrape_configs": [
        {
            "job_name": "jaxlaunch",
            "file_sd_configs": [{"files": ["targets.json"], "refresh_interval": "1s"}],
        }
    ],
}
Series = list[tuple[dict[str, str], float]]


def scale_rules(text: str) -> str:
    """Return a rule file in short time."""
    document = yaml.safe_load(text)
    for rule in (rule for group in document["groups"] for rule in group["rules"]):
        rule["expr"] = shorten_durations(rule["expr"])
        if "for" in rule:
            rule["for"] = shorten_durations(rule["for"])
        if rule.get("record", "").startswith("jaxlaunch:threshold:") and rule["record"].endswith(
            "_seconds"
        ):
            rule["expr"] = f"1 / {SCALE} * {rule['expr']}"
    return yaml.safe_dump(document)


def shorten_durations(text: str) -> str:
    """Shorten an expression's ranges and offsets, or a single duration, by SCALE."""

    def shorten(match: re.Match[str]) -> str:
        number, unit = (part for part in match.groups() if part)
        return f"{int(number) * UNITS_S[unit] * 1000 // SCALE}ms"

    return DURATION.sub(shorten, text)


class Prometheus:
    """A Prometheus that scrapes the agents of runs. Leaving the block stops it."""

    def __init__(self, program: str, folder: Path) -> None:
        self._folder, self._program = folder, program
        self._runs: dict[str, Running] = {}
        self._targets: list[dict[str, Any]] = []
        self.address = f"127.0.0.1:{choose_free_port()}"

    def __enter__(self) -> Prometheus:
        (self._folder / "rules").mkdir(parents=True)
        for path in RULES:
            (self._folder / "rules" / path.name).write_text(scale_rules(path.read_text()))
        (self._folder / "prometheus.yml").write_text(yaml.safe_dump(CONFIG))
        (self._folder / "targets.json").write_text("[]")
        self._log = (self._folder / "log").open("wb")
        options = {
            "config.file": "prometheus.yml",
            "storage.tsdb.path": "data",
            "web.listen-address": self.address,
        }
        self._process = subprocess.Popen(
            [self._program, *(f"--{name}={value}" for name, value in options.items())],
            cwd=self._folder,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.wait_until("Prometheus is ready", lambda: self._ask("/-/ready") is not None)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def watch(self, name: str, running: Running) -> None:
        """Scrape the agents of a run under this name."""
        self._runs[name] = running

    def query(self, expression: str) -> Series:
        """Return the series of an instant query. Raises AssertionError for invalid PromQL."""
        answer = json.loads(self._ask("/api/v1/query", query=expression) or "{}")
        assert answer.get("status") == "success", f"{expression}: {answer}"
        result = answer["data"]["result"]
        return [(series["metric"], float(series["value"][1])) for series in result]

    def firing(self, run: str) -> Series:
        """Return the firing alerts of a run, with the seconds since they fire."""
        return self.query(f'ALERTS{{alertstate="firing", run="{run}"}}')

    def fired(self, run: str) -> set[str]:
        """Return the alerts of a run that ever fired."""
        series = self.query(f'max_over_time(ALERTS{{alertstate="firing", run="{run}"}}[1h])')
        return {labels["alertname"] for labels, _ in series}

    def wait_until_firing(self, alert: str, run: str, **labels: str) -> None:
        expected = {"alertname": alert, **labels}.items()
        self.wait_until(
            f"{alert} of {run}",
            lambda: any(expected <= found_labels.items() for found_labels, _ in self.firing(run)),
        )

    def wait_until(self, description: str, condition: Callable[[], Any]) -> Any:
        """Wait until `happened()` is true and return it, and announce new agents meanwhile."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and self._process.poll() is None:
            self._list_targets()
            if result := condition():
                return result
            time.sleep(0.1)
        outputs = {
            name: "".join(running.read_output())[-2000:] for name, running in self._runs.items()
        }
        raise AssertionError(
            f"{description} never happened\n{(self._folder / 'log').read_text()[-2000:]}\n{outputs}"
        )

    def _list_targets(self) -> None:
        targets = [
            target for name, running in self._runs.items() for target in find_targets(name, running)
        ]
        if targets != self._targets:
            draft = self._folder / "targets.new"
            draft.write_text(json.dumps(targets))
            draft.rename(self._folder / "targets.json")
            self._targets = targets

    def _ask(self, path: str, **query: str) -> str | None:
        try:
            url = f"http://{self.address}{path}?{urllib.parse.urlencode(query)}"
            with urllib.request.urlopen(url, timeout=30) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            with error:
                return error.read().decode() if error.code == 400 else None
        except OSError:
            return None


def find_targets(name: str, running: Running) -> list[Mapping[str, Any]]:
    """Return a target with the labels of its pod for each agent, as a PodMonitor does."""
    try:
        agents = json.loads((running.folder / "agents.json").read_text())
    except FileNotFoundError:
        return []
    return [
        {
            "targets": [agent["address"]],
            "labels": {"namespace": "team", "run": name, "pod": f"{name}-w-0-{agent['host']}"},
        }
        for agent in agents
    ]

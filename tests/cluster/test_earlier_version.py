"""A JobSet that version 0.1 submitted, whose pods run its agent, is still one that every command knows.

tests/fixtures/version_0.1/in_flight.yaml is what its `launcher render` printed: two hosts with its packed agent, and a
program that reports a step twice a second.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.cluster.access import Access
from tests.cluster.command import launcher
from tests.cluster.waiting import until

RENDERED = Path(__file__).parents[1] / "fixtures" / "version_0.1" / "in_flight.yaml"
NAME = "in-flight"


def test_a_jobset_in_flight_is_shown_explained_and_stopped(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    rendered = RENDERED.read_text().replace("namespace: team", f"namespace: {namespace}")
    cluster.kubectl("apply", "-f", "-", text=rendered.replace("localhost/bare:test", bare_image))

    def said(*words: str) -> str:
        done = launcher(cluster, tmp_path, *words, "--namespace", namespace)
        assert done.returncode == 0, done.stderr
        return done.stdout

    until(lambda: json.loads(said("status", NAME, "-o", "json")).get("step"), lambda step: (step or 0) >= 3, "step 3")
    assert NAME in said("list")
    assert "Running" in said("status", NAME) and "runs: training at step" in said("explain", NAME)
    assert "step 3\n" in said("logs", NAME, "--rank", "1")
    said("stop", NAME)
    until(lambda: said("status", NAME), lambda text: "Stopped" in text, "its end")
    said("delete", NAME)
    assert NAME not in said("list")

"""`launcher explain` names rarer real situations in its first line.

Every job is submitted at once, and later events happen before the first one is awaited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.rare_situations import RARE, RARELY_PREPARED, make_nodes, remove_finalizers
from tests.cluster.stage import Stage, make_stage

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def stage(cluster: Access, base_image: str) -> Iterator[Stage]:
    """Begin every situation."""
    with make_stage(cluster, base_image) as stage:
        stage.prepare(
            {
                "storage": RARELY_PREPARED["storage"],
                "plain": ("restricted", lambda cluster, namespace: None),
            }
        )
        node_names = make_nodes(cluster, stage.namespaces["storage"])
        try:
            stage.prepare(
                {key: value for key, value in RARELY_PREPARED.items() if key != "storage"}
            )
            for name, situation in RARE.items():
                if situation.starts_after:
                    first = RARE[situation.starts_after]
                    stage.wait_for_explanation(
                        situation.starts_after, first.first_line, first.namespace
                    )
                stage.start(name, situation)
            for name, situation in RARE.items():
                if situation.then is not None:
                    stage.wait_for_explanation(
                        name, situation.after, situation.namespace, changes=True
                    )
                    situation.then(cluster, stage.namespaces[situation.namespace], name)
            yield stage
        finally:
            for key in ("plain", "leaving"):
                remove_finalizers(cluster, stage.namespaces[key])
            for node in node_names:
                cluster.api.delete(f"/api/v1/nodes/{node}")


@pytest.mark.parametrize("name", RARE)
def test_first_line_names_the_situation(stage: Stage, name: str) -> None:
    situation = RARE[name]
    result = stage.wait_for_explanation(
        name, situation.first_line, situation.namespace, changes=situation.then is not None
    )
    assert result.next_move or result.situation in ("running", "restarted")
    stage.wait_for_entry(name, situation.namespace)


def test_refused_submission_names_the_reason_and_leaves_nothing(
    stage: Stage, base_image: str, tmp_path: Path
) -> None:
    stage.wait_for_explanation(
        "stuck-namespace", RARE["stuck-namespace"].first_line, "leaving", changes=True
    )
    refusals = {
        "no-configmaps": 'configmaps "jaxlaunch-.*" is forbidden: exceeded quota: few',
        "leaving": "because it is being terminated|is being deleted",
    }
    for key, expected in refusals.items():
        namespace = stage.namespaces[key]
        folder = write_project(
            tmp_path / key, namespace, {"train.py": "print(1)"}, image=base_image, code="."
        )
        result = run_launcher(stage.access, folder, "submit", "job.yaml")
        assert result.returncode in (2, 3), result.stderr
        assert re.search(expected, result.stderr), result.stderr
        assert stage.cluster.get(JOBSETS, "mine", namespace) is None

"""`launcher explain` on rarer real situations: the first line names each.

Every job is submitted at once, and what happens later to some happens before the first is awaited.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch.launcher.kubernetes.kinds import JOBSETS
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.rare_situations import RARE, RARELY_PREPARED, nodes, released
from tests.cluster.stage import Stage, staged

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def stage(cluster: Access, base_image: str) -> Iterator[Stage]:
    """Every situation, begun."""
    with staged(cluster, base_image) as made:
        made.prepare(
            {
                "storage": RARELY_PREPARED["storage"],
                "plain": ("restricted", lambda cluster, namespace: None),
            }
        )
        named = nodes(cluster, made.namespaces["storage"])
        try:
            made.prepare({key: value for key, value in RARELY_PREPARED.items() if key != "storage"})
            for name, situation in RARE.items():
                if situation.starts_after:
                    first = RARE[situation.starts_after]
                    made.settles(situation.starts_after, first.first_line, first.namespace)
                made.start(name, situation)
            for name, situation in RARE.items():
                if situation.then is not None:
                    made.settles(name, situation.after, situation.namespace, changes=True)
                    situation.then(cluster, made.namespaces[situation.namespace], name)
            yield made
        finally:
            for key in ("plain", "leaving"):
                released(cluster, made.namespaces[key])
            for node in named:
                cluster.api.delete(f"/api/v1/nodes/{node}")


@pytest.mark.parametrize("name", RARE)
def test_the_first_line_names_the_situation(stage: Stage, name: str) -> None:
    situation = RARE[name]
    found = stage.settles(
        name, situation.first_line, situation.namespace, changes=situation.then is not None
    )
    assert found.next_move or found.situation in ("running", "restarted")
    stage.leads(name, situation.namespace)


def test_a_submission_that_a_namespace_refuses_names_why_and_leaves_nothing(
    stage: Stage, base_image: str, tmp_path: Path
) -> None:
    stage.settles("stuck-namespace", RARE["stuck-namespace"].first_line, "leaving", changes=True)
    refusals = {
        "no-configmaps": 'configmaps "jaxlaunch-.*" is forbidden: exceeded quota: few',
        "leaving": "because it is being terminated|is being deleted",
    }
    for key, expected in refusals.items():
        namespace = stage.namespaces[key]
        folder = project(
            tmp_path / key, namespace, {"train.py": "print(1)"}, image=base_image, code="."
        )
        left = launcher(stage.access, folder, "submit", "job.yaml")
        assert left.returncode in (2, 3), left.stderr
        assert re.search(expected, left.stderr.splitlines()[0]), left.stderr
        assert stage.cluster.get(JOBSETS, "mine", namespace) is None

"""What k8s/ installs: the rights that the commands use, no more versions than one of anything, nothing for pods."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.diagnose.doctor import namespace
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.jobs import cluster_defaults
from jaxlaunch.launcher.kubernetes.kinds import Right

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
INSTALLED = list(yaml.safe_load_all((K8S / "install.yaml").read_text()))


def installed(kind: str, name: str) -> dict[str, Any]:
    (found,) = [one for one in INSTALLED if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    assert isinstance(found, dict)
    return found


def allowed(role: dict[str, Any], right: Right) -> bool:
    resource = f"{right.kind.plural}/{right.subresource}" if right.subresource else right.kind.plural
    return any(
        right.kind.group in rule["apiGroups"] and resource in rule["resources"] and right.verb in rule["verbs"]
        for rule in role["rules"]
    )


def test_a_user_s_role_has_every_right_that_the_commands_use_and_never_reads_a_secret() -> None:
    role = installed("ClusterRole", "jaxlaunch-user")
    used = [
        right for table in (namespace.COMMANDS, namespace.WITH_A_QUEUE) for each in table.values() for right in each
    ]
    assert [str(right) for right in used if not allowed(role, right)] == []
    for one in INSTALLED:
        for rule in one.get("rules", []):
            assert not {"secrets", "*"} & {*rule["resources"], *rule["verbs"], *rule["apiGroups"]}


def test_the_cluster_defaults_are_where_the_commands_look_for_it() -> None:
    found = installed("ConfigMap", cluster_defaults.NAME)
    assert found["metadata"]["namespace"] == cluster_defaults.SYSTEM
    assert defaults.of_config_map(found, "here").values == defaults.Defaults()


@pytest.mark.parametrize("name", ["jobset", "kueue"])
def test_kind_has_the_versions_that_the_tests_run_against(name: str) -> None:
    pinned = re.search(rf"^{name}=(v\S+)$", (K8S / "kind" / "up.sh").read_text(), re.MULTILINE)
    tested = re.search(rf"sigs\.k8s\.io/{name} (v\S+)", (ROOT / f"tests/cluster/go/{name}/go.mod").read_text())
    assert pinned is not None and tested is not None
    assert pinned[1] == tested[1]


def test_the_team_s_claim_is_the_one_that_the_smoke_test_s_job_mounts() -> None:
    job = yaml.safe_load((K8S / "examples" / "kind-digits.yaml").read_text())
    team = list(yaml.safe_load_all((K8S / "kind" / "team.yaml").read_text()))
    (claim,) = [one for one in team if one["kind"] == "PersistentVolumeClaim"]
    assert job["volumes"][0]["claim"] == claim["metadata"]["name"]

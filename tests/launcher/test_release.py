"""What a release is made of: workflows that keep to their rules, and one version everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def loaded(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key `on` as true."""
    document = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in document.items()}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def test_the_changelog_s_newest_version_is_the_package_s() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", VERSION]


def test_the_chart_is_of_the_package_s_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "launcher" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_has_no_right_that_a_job_does_not_ask_for(path: Path) -> None:
    workflow = loaded(path)
    assert workflow["permissions"] == {}
    for job in workflow["jobs"].values():
        assert job["permissions"].items() <= {
            ("contents", "read"),
            ("contents", "write"),
            ("id-token", "write"),
            ("packages", "write"),
        }
        assert job["runs-on"] != "ubuntu-latest" if "steps" in job else job["uses"].startswith("./")
    writers = [name for name, job in workflow["jobs"].items() if job["permissions"].get("contents") == "write"]
    assert writers == (["publish"] if path.stem == "release" else [])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_pastes_nothing_into_a_script_and_keeps_no_credentials(path: Path) -> None:
    for step in steps(loaded(path)):
        assert "${{" not in step.get("run", ""), step
        action = step.get("uses", "")
        assert not action or re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|[0-9a-f]{40})", action), action
        assert not action.startswith("actions/checkout@") or step["with"]["persist-credentials"] is False


def test_a_release_is_tested_first_and_all_that_it_publishes_is_signed_by_digest() -> None:
    jobs = loaded(ROOT / ".github" / "workflows" / "release.yaml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yaml"
    for name in ("image", "chart"):
        assert "test" in jobs[name]["needs"] and jobs[name]["permissions"]["id-token"] == "write"
        assert re.search(r'cosign sign --yes "[^"]+@\$(?:DIGEST|digest)"', str(jobs[name]["steps"]))
    assert "cosign attest --yes --type spdxjson" in str(jobs["image"]["steps"])
    assert "cosign sign-blob --yes" in str(jobs["publish"]["steps"])

"""What a release is made of: workflows that keep to their rules, one version, and one oldest version of a package."""

from __future__ import annotations

import base64
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from jaxlaunch import installation
from jaxlaunch.launcher.agent import pack
from tests import generated, needs

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yaml"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PYPROJECT["project"]["version"]


def loaded(path: Path) -> dict[str, Any]:
    """A workflow; YAML 1.1 reads its key `on` as true."""
    document = yaml.safe_load(path.read_text())
    return {"on" if key is True else key: value for key, value in document.items()}


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def tracked(pattern: str) -> list[Path]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f":(glob){pattern}"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines()]


def test_the_changelog_s_newest_version_is_the_package_s() -> None:
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", VERSION]


def test_the_size_of_the_agent_is_about_what_the_page_says() -> None:
    (said,) = re.findall(r"one file of about (\d+) kB", (ROOT / "docs/your-code.md").read_text())
    assert abs(len(pack.pack()) / 1000 - int(said)) < 0.15 * int(said)


def test_nobody_is_sent_to_an_index_that_does_not_have_the_package() -> None:
    """When it is: make generated"""
    sent = re.compile(r"pip install ['\"]?jaxlaunch(?![-\w])")
    pages = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))}
    assert [path.name for path, text in pages.items() if sent.search(text)] == [] or installation.ON_INDEX
    assert all(generated.installs(text) == text for text in pages.values())
    assert ("not on the Python Package Index" in pages[ROOT / "docs/install.md"]) != installation.ON_INDEX


def test_the_readme_s_badges_say_what_pyproject_does() -> None:
    """When it does: make generated"""
    assert {path: (ROOT / path).read_text() for path in generated.badges()} == generated.badges()


def test_the_chart_is_of_the_package_s_version() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "launcher" / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_the_chart_has_the_icon_of_the_project() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "launcher" / "Chart.yaml").read_text())
    kind, _, encoded = chart["icon"].partition(",")
    drawn = (ROOT / "docs" / "pictures" / "icon.svg").read_text().strip()
    assert (kind, base64.b64decode(encoded).decode()) == ("data:image/svg+xml;base64", drawn)


def oldest_python() -> str:
    return str(PYPROJECT["project"]["requires-python"]).removeprefix(">=")


def oldest_python_of_the_agent() -> str:
    (version,) = set(PYPROJECT["tool"]["ruff"]["per-file-target-version"].values())
    return str(version).replace("py3", "3.")


@pytest.mark.parametrize(
    ("file", "pattern", "oldest"),
    [
        ("README.md", r"Python (3\.\d+) or newer", oldest_python()),
        ("jaxlaunch/contract.py", r"Python >= (3\.\d+)", oldest_python_of_the_agent()),
        ("jaxlaunch/launcher/agent/pack.py", r"Python >= (3\.\d+)", oldest_python_of_the_agent()),
        ("jaxlaunch/launcher/agent/pack.py", r"jaxlaunch needs (3\.\d+)", oldest_python_of_the_agent()),
        ("jaxlaunch/launcher/agent/pack.py", r"version_info < \((3, \d+)\)", oldest_python_of_the_agent()),
        ("docs/your-code.md", r"CPython (3\.\d+)", oldest_python_of_the_agent()),
    ],
)
def test_the_oldest_python_is_the_one_of_pyproject(file: str, pattern: str, oldest: str) -> None:
    found = re.findall(pattern, (ROOT / file).read_text())
    assert [version.replace(", ", ".") for version in found] == [oldest]


def test_ci_takes_the_oldest_python_from_pyproject() -> None:
    (command,) = re.findall(r"oldest=\$\((.*)\)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    found = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"3.{found.stdout.strip()}" == oldest_python()


def test_ci_runs_the_commands_in_the_order_of_the_readme() -> None:
    """What `make run` leaves in the clone must not change how a test ends."""
    commands = re.findall(r"^make ([\w-]+)$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands == ["check", "run", "test", "test-all"]


def test_the_oldest_version_of_a_package_is_said_once_and_the_pinned_one_is_no_older() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    required = [Requirement(text) for text in sum(extras.values(), PYPROJECT["project"]["dependencies"])]
    floors = [one for one in required if one.specifier]
    assert len({one.name for one in floors}) == len(floors) >= 20
    listed = "".join(path.read_text() for path in (ROOT / "requirements").glob("*.txt"))
    pins = {
        canonicalize_name(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", listed, re.MULTILINE)
    }
    for one in floors:
        assert one.specifier.contains(pins[canonicalize_name(one.name)]), one


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
        assert not action.startswith("actions/checkout@") or step["with"]["persist-credentials"] is False


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_action_is_a_commit_with_its_version_beside_it(path: Path) -> None:
    """Whoever takes over an action can move its tags, and the release's jobs sign in the project's name."""
    used = [use for use in re.findall(r"\buses: (.+)$", path.read_text(), re.MULTILINE) if not use.startswith("./")]
    assert used
    for use in used:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", use), use


def test_an_image_that_a_build_or_a_test_starts_from_is_a_digest() -> None:
    text = (ROOT / "Dockerfile").read_text()
    sources = re.findall(r"^FROM (\S+)", text, re.MULTILINE)
    stages = set(re.findall(r"^FROM .+ AS (\w+)$", text, re.MULTILINE)) | {"${BASE}"}
    jobs = [job for path in WORKFLOWS for job in loaded(path)["jobs"].values()]
    images = [name for name in sources if name not in stages]
    images += [job["container"]["image"] for job in jobs if "container" in job]
    assert len(images) == 2
    for name in images:
        assert re.fullmatch(r"[\w./-]+:[\w.-]+@sha256:[0-9a-f]{64}", name), name


def test_the_dockerfile_s_base_is_the_image_of_its_first_line() -> None:
    """Where the update bot finds it: it reads no ARG."""
    text = (ROOT / "Dockerfile").read_text()
    (base,) = re.findall(r"^ARG BASE=(.+)$", text, re.MULTILINE)
    first = re.findall(r"^FROM (.+)$", text, re.MULTILINE)[0]
    assert first.startswith("python:3.12-slim@sha256:") and first.endswith(f" AS {base}")


def test_what_is_installed_for_an_image_a_release_or_a_checkout_has_hashes() -> None:
    """Of what is ours alone, nothing is asked for (--no-deps); nothing else comes by a build's own search."""
    files = [ROOT / "Dockerfile", ROOT / "Makefile", ROOT / ".github" / "workflows" / "release.yaml"]
    lines = "\n".join(path.read_text().replace("\\\n", " ") for path in files).splitlines()
    command = re.compile(r"\bpip\b.* install\b|^\t\$\(INSTALL\)")
    installs = [words for line in lines for words in re.split(r"&&|;", line) if command.search(words)]
    assert len(installs) >= 8
    for words in installs:
        assert "--require-hashes" in words or {"--no-deps", "--no-build-isolation"} <= set(words.split()), words


def test_a_release_has_an_image_for_each_accelerator() -> None:
    matrix = loaded(ROOT / ".github" / "workflows" / "release.yaml")["jobs"]["image"]["strategy"]["matrix"]
    assert matrix == {"extra": ["cpu", "cuda12", "cuda13", "tpu"]}


def test_the_update_bot_looks_at_every_kind_of_pin() -> None:
    needs.a_clone()
    updates = yaml.safe_load((ROOT / ".github" / "dependabot.yml").read_text())["updates"]
    folders = {one["package-ecosystem"]: one.get("directories") or [one["directory"]] for one in updates}
    assert folders["github-actions"] == folders["docker"] == ["/"]
    for kind, pinned in {"pip": "**/requirements/*.txt", "gomod": "tests/cluster/go/*/go.mod"}.items():
        looked_at = {path for folder in folders[kind] for path in ROOT.glob(folder.strip("/"))}
        assert {path.parent for path in tracked(pinned)} == looked_at


def test_a_release_is_tested_first_and_all_that_it_publishes_is_signed_by_digest() -> None:
    jobs = loaded(ROOT / ".github" / "workflows" / "release.yaml")["jobs"]
    assert jobs["test"]["uses"] == "./.github/workflows/ci.yaml"
    for name in ("image", "chart"):
        assert "test" in jobs[name]["needs"] and jobs[name]["permissions"]["id-token"] == "write"
        assert re.search(r'cosign sign --yes "[^"]+@\$(?:DIGEST|digest)"', str(jobs[name]["steps"]))
    assert "cosign attest --yes --type spdxjson" in str(jobs["image"]["steps"])
    assert "cosign sign-blob --yes" in str(jobs["publish"]["steps"])
    assert "twine check --strict dist/*" in str(jobs["package"]["steps"])
    for words in ("cyclonedx-py requirements requirements/train.txt", "jaxlaunch-$VERSION.cdx.json"):
        assert words in str(jobs["package"]["steps"])
    assert "*.cdx.json" in str(jobs["publish"]["steps"])


def test_the_newest_jax_is_tried_each_night() -> None:
    nightly = loaded(ROOT / ".github" / "workflows" / "nightly.yaml")
    assert "schedule" in nightly["on"]
    assert "install --quiet --upgrade jax " in str(nightly["jobs"]) and "make quick" in str(nightly["jobs"])


def release(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ROOT / ".ci/release", *arguments], cwd=folder, capture_output=True, text=True)


def test_the_notes_of_a_release_are_its_own_section_and_leave_nothing_out(tmp_path: Path) -> None:
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## [Unreleased]\n\n## [0.2.0]\n\n- new\n\n## [0.1.0]\n\n- old\n")
    assert release(tmp_path, "notes", "0.2.0").stdout == "- new\n"
    assert "has no section [0.3.0]" in release(tmp_path, "notes", "0.3.0").stderr
    changes.write_text("## [Unreleased]\n\n- newer\n\n## [0.1.0]\n\n- old\n")
    refused = release(tmp_path, "notes", "0.1.0")
    assert refused.returncode == 1 and "move them to a section [0.1.0]" in refused.stderr and refused.stdout == ""


def test_the_package_has_absolute_links_and_the_project_s_urls(tmp_path: Path) -> None:
    needs.a_clone()
    for name in ("README.md", "pyproject.toml"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    assert release(tmp_path, "links", "https://git.example/o/r", "v1.0.0").returncode == 0
    text = (tmp_path / "README.md").read_text()
    pictures = re.findall(r"!\[[^\]]*\]\(([^()\s]+)\)", text)
    assert pictures[0] == "https://git.example/o/r/actions/workflows/ci.yaml/badge.svg"
    assert all(each.startswith("https://git.example/o/r/raw/v1.0.0/docs/pictures/") for each in pictures[1:])
    targets = re.findall(r"\]\(([^()\s]+)\)", text)
    assert targets and all(target.startswith("https://") for target in targets)
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls["Changelog"] == "https://git.example/o/r/blob/v1.0.0/CHANGELOG.md"

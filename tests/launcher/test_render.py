"""`launcher render` as a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.launcher.cli import launcher

JOB = "name: x\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "profile.yaml").write_text("image: registry.example/train:1\n")
    return tmp_path


def test_manifests_go_to_stdout_and_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "hosts=3", "--profile", "profile.yaml")
    assert (left.code, left.err) == (0, "")
    jobset, policy = yaml.safe_load_all(left.out)
    assert (jobset["kind"], policy["kind"]) == ("JobSet", "NetworkPolicy")
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3


def test_a_job_without_an_image_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(capsys, monkeypatch, "render", "job.yaml")
    assert (left.code, left.out) == (2, "")
    assert "job.yaml: image is missing, and the profile has none.\n  hint: image:" in left.err


def test_what_a_platform_lacks_is_said_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.yaml").write_text(JOB + "image: i\ncapacity: spot\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "code=.")
    assert left.code == 2
    assert "job.yaml:5: capacity = spot is not known on platform = generic." in left.err
    assert "code=. (override): code is not supported on a cluster yet." in left.err


def test_a_wrong_profile_is_said_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "profile.yaml").write_text("image: i\nplatform: gce\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "--profile", "profile.yaml")
    assert left.code == 2
    assert "profile.yaml:2: platform = gce is not one of gke, eks, generic." in left.err

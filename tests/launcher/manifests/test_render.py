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
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "workdir=..")
    assert left.code == 2
    assert "job.yaml:5: capacity = spot is not known on platform = generic." in left.err
    assert "workdir=.. (override): workdir = .. lies outside of code = ." in left.err


def test_the_folder_beside_the_job_is_packed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train.py").write_text("print('one')\n")
    printed = [launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "image=i") for _ in range(2)]
    (here / "train.py").write_text("print('two')\n")
    printed.append(launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "image=i"))
    maps = [list(yaml.safe_load_all(left.out))[-1] for left in printed]
    assert maps[0] == maps[1] and maps[0]["metadata"]["name"] != maps[2]["metadata"]["name"]
    assert maps[0]["immutable"] is True and sorted(maps[0]["binaryData"]) == ["agent.pyz", "code.tar.gz"]


def test_a_folder_that_cannot_travel_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "code=nowhere", "image=i")
    assert (left.code, left.out) == (2, "")
    assert left.err.startswith(f"code: {here / 'nowhere'} is not a folder.")


def test_a_wrong_profile_is_said_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "profile.yaml").write_text("image: i\nplatform: gce\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "--profile", "profile.yaml")
    assert left.code == 2
    assert "profile.yaml:2: platform = gce is not one of gke, eks, generic." in left.err

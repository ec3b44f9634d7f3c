"""`launcher render` as a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxlaunch import contract
from tests.launcher.invoke import launcher

JOB = "name: x\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "defaults.yaml").write_text("image: registry.example/train:1\n")
    return tmp_path


def test_manifests_go_to_stdout_and_nothing_else(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(
        capsys, monkeypatch, "render", "job.yaml", "hosts=3", "--defaults", "defaults.yaml"
    )
    assert (left.code, left.err) == (0, "")
    jobset, policy = yaml.safe_load_all(left.out)
    assert (jobset["kind"], policy["kind"]) == ("JobSet", "NetworkPolicy")
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3


def test_the_gang_s_secret_is_mounted_and_what_must_be_made_is_said_and_not_printed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(
        capsys, monkeypatch, "render", "job.yaml", "gang_secret=true", "--defaults", "defaults.yaml"
    )
    jobset, policy = yaml.safe_load_all(left.out)
    assert (jobset["kind"], policy["kind"]) == ("JobSet", "NetworkPolicy")
    told = (
        "the pods wait for Secret x-gang, which is not printed: `openssl rand 32 | kubectl "
        "create secret generic"
    )
    assert left.code == 0 and left.err == f"launcher: {told} x-gang --from-file=key=/dev/stdin`\n"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (path,) = (
        one["value"] for one in pod["containers"][0]["env"] if one["name"] == contract.GANG_SECRET
    )
    (mount,) = (
        one
        for one in pod["containers"][0]["volumeMounts"]
        if path.startswith(one["mountPath"] + "/")
    )
    (volume,) = (one for one in pod["volumes"] if one["name"] == mount["name"])
    assert volume["secret"] == {"secretName": "x-gang"} and path == f"{mount['mountPath']}/key"


def test_a_job_without_an_image_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(capsys, monkeypatch, "render", "job.yaml")
    assert (left.code, left.out) == (2, "")
    assert (
        "job.yaml: image is missing, and the cluster defaults have none.\n  hint: image:"
        in left.err
    )


def test_what_a_platform_lacks_is_said_with_its_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.yaml").write_text(JOB + "image: i\ncapacity: spot\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "workdir=..")
    assert left.code == 2
    assert "job.yaml:5: capacity = spot is not known on platform = generic." in left.err
    assert "workdir=.. (override): workdir = .. is outside of code = ." in left.err


def test_a_fault_in_the_cluster_defaults_is_named_with_their_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "job.yaml").write_text(JOB.replace("cpu", "h100") + "placement: {preferred: rack}\n")
    (here / "defaults.yaml").write_text(
        "image: i\nplatform: gke\nnetwork:\n  l4: default\n  h100: efa\n"
    )
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "--defaults", "defaults.yaml")
    assert left.code == 2
    own, of_cluster = (line for line in left.err.splitlines() if "hint" not in line)
    assert own.startswith("job.yaml:4: placement is done by Kueue")
    assert of_cluster == "defaults.yaml:5: network = efa does not exist on platform = gke."


def test_a_fault_is_named_where_its_hint_applies(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = JOB.replace("cpu", "h100") + "resources:\n  hugepages: 5Gi\n"
    (here / "job.yaml").write_text(text)
    (here / "defaults.yaml").write_text("image: i\nplatform: eks\nnetwork: {h100: efa}\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "--defaults", "defaults.yaml")
    found = next(line for line in left.err.splitlines() if "hugepages" in line)
    assert found.startswith(f"job.yaml:{text[: text.index('resources')].count(chr(10)) + 1}: ")


def test_the_folder_beside_the_job_is_packed(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "train.py").write_text("print('one')\n")
    printed = [
        launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "image=i") for _ in range(2)
    ]
    (here / "train.py").write_text("print('two')\n")
    printed.append(launcher(capsys, monkeypatch, "render", "job.yaml", "code=.", "image=i"))
    maps = [list(yaml.safe_load_all(left.out))[-1] for left in printed]
    assert maps[0] == maps[1] and maps[0]["metadata"]["name"] != maps[2]["metadata"]["name"]
    assert maps[0]["immutable"] is True and sorted(maps[0]["binaryData"]) == [
        "agent.pyz",
        "code.tar.gz",
    ]


def test_a_file_like_a_credential_is_packed_where_the_job_names_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "src").mkdir()
    (here / "src" / ".env.example").write_text("WANDB_API_KEY=\n")
    render = ("render", "job.yaml", "image=i", "workdir=src")
    refused = launcher(capsys, monkeypatch, *render, "code=src")
    assert refused.code == 2 and ".env.example (by its name)" in refused.err
    packed = launcher(
        capsys, monkeypatch, *render, "code={folder: src, include: {.env.example: a template}}"
    )
    assert packed.code == 0, packed.err
    assert "code.tar.gz" in list(yaml.safe_load_all(packed.out))[-1]["binaryData"]


def test_a_folder_that_cannot_travel_is_refused(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "code=nowhere", "image=i")
    assert (left.code, left.out) == (2, "")
    assert left.err.startswith(f"code: {here / 'nowhere'} is not a folder.")


def test_wrong_defaults_are_reported_with_their_line(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "defaults.yaml").write_text("image: i\nplatform: gce\n")
    left = launcher(capsys, monkeypatch, "render", "job.yaml", "--defaults", "defaults.yaml")
    assert left.code == 2
    assert "defaults.yaml:2: platform = gce is not one of gke, eks, generic." in left.err


def test_a_namespace_is_named_as_for_every_other_command(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    left = launcher(
        capsys, monkeypatch, "render", "job.yaml", "-n", "team-b", "--defaults", "defaults.yaml"
    )
    assert [one["metadata"]["namespace"] for one in yaml.safe_load_all(left.out)] == [
        "team-b",
        "team-b",
    ]

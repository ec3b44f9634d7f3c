"""`launcher render` as a person calls it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from jaxlaunch import contract
from tests.launcher.invoke import Launcher

JOB = "name: x\naccelerator: {type: cpu}\ncommand: [python, train.py]\n"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "defaults.yaml").write_text("image: registry.example/train:1\n")
    return tmp_path


def test_render_prints_only_manifests(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml", "hosts=3", "--defaults", "defaults.yaml")
    assert (result.code, result.err) == (0, "")
    jobset, policy = yaml.safe_load_all(result.out)
    assert (jobset["kind"], policy["kind"]) == ("JobSet", "NetworkPolicy")
    assert jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["completions"] == 3


def test_render_explains_gang_secret(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml", "gang_secret=true", "--defaults", "defaults.yaml")
    jobset, policy = yaml.safe_load_all(result.out)
    assert (jobset["kind"], policy["kind"]) == ("JobSet", "NetworkPolicy")
    message = (
        "the pods wait for Secret x-gang, which is not printed: `openssl rand 32 | kubectl "
        "create secret generic"
    )
    assert result.code == 0
    assert result.err == f"launcher: {message} x-gang --from-file=key=/dev/stdin`\n"
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (path,) = (
        variable["value"]
        for variable in pod["containers"][0]["env"]
        if variable["name"] == contract.GANG_SECRET
    )
    (mount,) = (
        mount
        for mount in pod["containers"][0]["volumeMounts"]
        if path.startswith(mount["mountPath"] + "/")
    )
    (volume,) = (volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["secret"] == {"secretName": "x-gang"} and path == f"{mount['mountPath']}/key"


def test_render_requires_image(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml")
    assert (result.code, result.out) == (2, "")
    message = "job.yaml: image is missing, and the cluster defaults have none.\n  hint: image:"
    assert message in result.err


def test_render_faults_have_lines(run_launcher: Launcher, here: Path) -> None:
    (here / "job.yaml").write_text(JOB + "image: i\ncapacity: spot\n")
    result = run_launcher("render", "job.yaml", "code=.", "workdir=..")
    assert result.code == 2
    assert "job.yaml:5: capacity = spot is not known on platform = generic." in result.err
    assert "workdir=.. (override): workdir = .. is outside of code = ." in result.err


def test_fault_in_defaults_has_their_line(run_launcher: Launcher, here: Path) -> None:
    (here / "job.yaml").write_text(JOB.replace("cpu", "h100") + "placement: {preferred: rack}\n")
    (here / "defaults.yaml").write_text(
        "image: i\nplatform: gke\nnetwork:\n  l4: default\n  h100: efa\n"
    )
    result = run_launcher("render", "job.yaml", "--defaults", "defaults.yaml")
    assert result.code == 2
    of_job, of_cluster = (line for line in result.err.splitlines() if "hint" not in line)
    assert of_job.startswith("job.yaml:4: placement is done by Kueue")
    assert of_cluster == "defaults.yaml:5: network = efa does not exist on platform = gke."


def test_fault_is_located_where_its_hint_applies(run_launcher: Launcher, here: Path) -> None:
    text = JOB.replace("cpu", "h100") + "resources:\n  hugepages: 5Gi\n"
    (here / "job.yaml").write_text(text)
    (here / "defaults.yaml").write_text("image: i\nplatform: eks\nnetwork: {h100: efa}\n")
    result = run_launcher("render", "job.yaml", "--defaults", "defaults.yaml")
    message = next(line for line in result.err.splitlines() if "hugepages" in line)
    assert message.startswith(f"job.yaml:{text[: text.index('resources')].count(chr(10)) + 1}: ")


def test_code_folder_is_packed(run_launcher: Launcher, here: Path) -> None:
    (here / "train.py").write_text("print('one')\n")
    printed = [run_launcher("render", "job.yaml", "code=.", "image=i") for _ in range(2)]
    (here / "train.py").write_text("print('two')\n")
    printed.append(run_launcher("render", "job.yaml", "code=.", "image=i"))
    maps = [list(yaml.safe_load_all(result.out))[-1] for result in printed]
    assert maps[0] == maps[1] and maps[0]["metadata"]["name"] != maps[2]["metadata"]["name"]
    assert maps[0]["immutable"] is True and sorted(maps[0]["binaryData"]) == [
        "agent.pyz",
        "code.tar.gz",
    ]


def test_included_credential_file_is_packed(run_launcher: Launcher, here: Path) -> None:
    (here / "src").mkdir()
    (here / "src" / ".env.example").write_text("WANDB_API_KEY=\n")
    render = ("render", "job.yaml", "image=i", "workdir=src")
    result = run_launcher(*render, "code=src")
    assert result.code == 2 and ".env.example (by its name)" in result.err
    packed = run_launcher(*render, "code={folder: src, include: {.env.example: a template}}")
    assert packed.code == 0, packed.err
    assert "code.tar.gz" in list(yaml.safe_load_all(packed.out))[-1]["binaryData"]


def test_missing_code_folder_is_refused(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml", "code=nowhere", "image=i")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"code: {here / 'nowhere'} is not a folder.")


def test_namespace_option_sets_namespace(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml", "-n", "team-b", "--defaults", "defaults.yaml")
    assert [manifest["metadata"]["namespace"] for manifest in yaml.safe_load_all(result.out)] == [
        "team-b",
        "team-b",
    ]


def test_render_for_slurm_prints_script(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "--slurm", "job.yaml", "hosts=3", "--run-dir", "run")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith("#!/bin/bash\n") and "\n#SBATCH --nodes=3\n" in result.out
    assert f" run={here}/run\n" in result.out
    assert list(here.glob("run*")) == []


def test_render_for_slurm_keeps_job_file(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "--slurm", "job.yaml", "--run-dir", ".")
    assert (result.code, result.out) == (2, "")
    assert "the run would overwrite job.yaml" in result.err


def test_render_refuses_run_folder_of_pods(run_launcher: Launcher, here: Path) -> None:
    result = run_launcher("render", "job.yaml", "--run-dir", "run")
    assert result.code == 2 and "need --slurm" in result.err

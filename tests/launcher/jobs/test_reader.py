"""`status` and `logs --from-volume`, with a fake API server that runs the reading pod at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent.io.output import RankLog
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.defaults import DEFAULT_USER, ClusterDefaults, Defaults, User
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.jobs import volume as jobs_volume
from jaxlaunch.launcher.kubernetes import pod_rules
from jaxlaunch.launcher.kubernetes.kinds import JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.launcher.manifests.jobset import render, resolve
from jaxlaunch.records.summary import AttemptProgress, AttemptRecord, Summary
from jaxlaunch.records.verdict import verdict_for_code
from jaxlaunch.runs.layout import start_folder
from jaxlaunch.runs.run_folder import RunFolder, RunStarts
from tests.launcher import apiserver
from tests.launcher.apiserver import Handler, Server, refuse_with
from tests.launcher.invoke import CommandResult, launcher

SAVED = Defaults.model_validate({"checkpoint": {"claim": "checkpoints", "path": "/checkpoints"}})
AT = JOBSETS.path("team", "lm")
Call = Callable[..., CommandResult]


def make_jobset(defaults: Defaults = SAVED, **keys: Any) -> dict[str, Any]:
    """A stopped job of two hosts, without pods."""
    document = {
        "name": "lm",
        "namespace": "team",
        "image": "i",
        "hosts": 2,
        "accelerator": {"type": "cpu"},
    }
    spec = JobSpec.model_validate({**document, "command": ["a"], **keys})
    manifest = render(resolve(spec, ClusterDefaults(defaults)))[0]
    manifest["spec"]["suspend"] = True
    return manifest


@pytest.fixture
def call(
    server: Server,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Call:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.setattr(jobs_volume, "START_TIMEOUT_S", 1.0)
    server.put(AT, make_jobset())
    return lambda verb, *options: launcher(
        capsys, monkeypatch, verb, "lm", "--from-volume", *options
    )


@pytest.fixture
def folder(server: Server, tmp_path: Path) -> Path:
    """What the job's run folder holds, which a kubelet of sorts reads for each new JobSet."""
    folder_path = tmp_path / "run"

    def runs(handler: Handler) -> bool:
        """The program in the manifest, with the folder as it is here."""
        sent = handler.body
        (container,) = sent["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
            "containers"
        ]
        request = json.loads(container["command"][-1]) | {"folder": str(folder_path)}
        argv = [sys.executable, *container["command"][1:-1], json.dumps(request)]
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        pod = PODS.path("team", "reader")
        state = {"name": "main", "state": {"terminated": {"exitCode": 0}}}
        labels = {NAME_LABEL: sent["metadata"]["name"]}
        server.put(pod, {"metadata": {"labels": labels}, "status": {"containerStatuses": [state]}})
        server.put(f"{pod}/log", {"text": text})
        return False

    server.on("POST", "jobsets", runs)
    return folder_path


def fill_folder(folder: Path, uid: str) -> None:
    keeper = RunFolder(folder, pytest.fail)
    verdict = verdict_for_code(83, "rank 1 raised: X", rank=1)
    keeper.append_record(AttemptRecord(uid, 0, 1, "crash", 1, 10, 20, {}, verdict, 1.0, 2.0))
    progress = AttemptProgress(uid, 1, 2, started=3.0, at=1_795_000_000.0)
    seconds = {"step": 3.0, "init": 1.0}
    RunStarts(keeper, uid).write_summary(
        Summary(
            verdict_for_code(80, "saved at step 40"),
            step=40,
            seconds=seconds,
            restarts={"crash": 1},
            committed=40,
            of=progress,
        )
    )
    for rank in range(2):
        log = RankLog(start_folder(folder, 1), rank, 1 << 20, pytest.fail)
        for number in range(3):
            log.write_line(f"line {number}".encode())
        assert log._file is not None
        log._file.close()


def test_status_is_read_from_volume(server: Server, call: Call, folder: Path) -> None:
    fill_folder(folder, server.objects[AT]["metadata"]["uid"])
    result = call("status")
    assert result.code == 0, result.err
    assert result.out.splitlines()[:2] == [
        "preempted (80): saved at step 40",
        "lm: Stopped (generation 0, attempt 2)",
    ]
    assert (
        "step 40" in result.out
        and "75.0%" in result.out
        and "by the files on its volume" in result.out
    )
    assert server.stored("jobsets") == [AT]


def test_logs_are_read_from_volume(server: Server, call: Call, folder: Path) -> None:
    fill_folder(folder, server.objects[AT]["metadata"]["uid"])
    result = call("logs", "--previous")
    assert result.out.splitlines() == [
        f"[{rank}] line {number}" for rank in range(2) for number in range(3)
    ]
    assert (
        "launcher: attempt 1 of generation 0: crash (83): rank 1 raised: X"
        in result.err.splitlines()
    )
    assert server.stored("jobsets") == [AT]


def test_volume_lines_are_selected(server: Server, call: Call, folder: Path) -> None:
    fill_folder(folder, server.objects[AT]["metadata"]["uid"])
    assert call("logs", "--rank", "1", "--grep", "[01]$", "--tail", "1").out == "line 1\n"


def test_files_of_earlier_job_are_ignored(call: Call, folder: Path) -> None:
    fill_folder(folder, "5678")
    result = call("status")
    assert "the run folder has no summary of this job" in result.err
    assert "step 40" not in result.out


def test_reader_is_always_deleted(
    server: Server, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = call("status")  # nobody starts its pod
    assert result.code == 3 and "has not started after 1 s: read-lm-" in result.err
    assert server.stored("jobsets") == [AT]

    def pressed(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs_volume, "_wait_until_started", pressed)
    assert call("logs").code == 130
    assert server.stored("jobsets") == [AT] and server.count("DELETE", "jobsets") == 2


def test_missing_right_names_needed_rights(server: Server, call: Call) -> None:
    server.on("POST", "jobsets", refuse_with(403))
    result = call("status")
    assert (
        result.code == 3 and "reading a volume requires permission to create jobsets" in result.err
    )


@pytest.mark.parametrize(("status", "names_rights"), [(403, True), (422, False)])
def test_rejected_reader_is_not_deleted(
    server: Server, call: Call, status: int, names_rights: bool
) -> None:
    server.on("POST", "jobsets", refuse_with(status))
    server.on("DELETE", "jobsets", refuse_with(403))
    result = call("status")
    assert result.code == 3 and "could not be deleted" not in result.err
    assert server.count("DELETE", "jobsets") == 0
    assert ("requires permission" in result.err) is names_rights


def test_reader_drops_gang_annotations() -> None:
    manifest = make_jobset(
        slices=2,
        queue="q",
        placement={"required": "rack"},
        pod={"metadata": {"annotations": {"a.b/c": "d"}}},
    )
    manifest["metadata"]["uid"] = "1234"
    original = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"][
        "annotations"
    ]
    assert "kueue.x-k8s.io/podset-slice-size" in original
    folder_path = jobs_volume.reader_manifest(manifest, {"ranks": None})["spec"]["replicatedJobs"][
        0
    ]["template"]["spec"]["template"]
    assert folder_path["metadata"]["annotations"] == {"a.b/c": "d"}


def test_reader_pod_has_minimal_spec() -> None:
    keys = {
        "service_account": "trainer",
        "env": {"WORD": "x"},
        "volumes": [{"secret": "s", "path": "/secret"}],
    }
    manifest = make_jobset(**keys, node_selector={"kubernetes.io/arch": "arm64", "pool": "gpu"})
    manifest["metadata"]["uid"] = "1234"
    folder_path = jobs_volume.reader_manifest(manifest, {"ranks": None})
    job = folder_path["spec"]["replicatedJobs"][0]["template"]["spec"]
    spec = job["template"]["spec"]
    original = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    (container,), (volume,) = spec["containers"], spec["volumes"]
    assert (
        spec["securityContext"] == original["securityContext"]
        and spec["automountServiceAccountToken"] is False
    )
    assert container["securityContext"] == original["containers"][0]["securityContext"]
    assert container["image"] == "i" and "env" not in container
    assert volume["persistentVolumeClaim"] == {"claimName": "checkpoints"}
    assert container["volumeMounts"] == [
        {"name": volume["name"], "mountPath": "/checkpoints", "readOnly": True}
    ]
    assert spec["nodeSelector"] == {"kubernetes.io/arch": "arm64"}
    assert (
        folder_path["metadata"]["ownerReferences"][0]["uid"] == "1234"
        and folder_path["spec"]["ttlSecondsAfterFinished"]
    )
    assert "jaxlaunch.io/job" not in folder_path["metadata"]["labels"], "it is no job of its own"


@pytest.mark.parametrize("chosen", ["root", "privileged"])
def test_reader_of_root_job_is_not_root(chosen: User) -> None:
    manifest = make_jobset(SAVED.model_copy(update={"users": {"cpu": chosen}}))
    manifest["metadata"]["uid"] = "1234"
    pod = jobs_volume.reader_manifest(manifest, {"ranks": None})["spec"]["replicatedJobs"][0][
        "template"
    ]["spec"]["template"]
    assert (
        pod["spec"]["securityContext"]["runAsUser"]
        == pod["spec"]["securityContext"]["runAsGroup"]
        == DEFAULT_USER
    )
    assert pod_rules.strictest_level(pod) == "restricted"


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        (Defaults(), "has no run folder on a volume"),
        (Defaults.model_validate({"checkpoint": {"url": "gs://bucket/x"}}), "is in a bucket"),
    ],
    ids=["none", "bucket"],
)
def test_job_without_volume_is_refused(defaults: Defaults, message: str) -> None:
    with pytest.raises(UserError, match=message):
        jobs_volume.reader_manifest(make_jobset(defaults), {})


@pytest.mark.parametrize("options", [("-f",), ("--since", "5m")])
def test_unsupported_options_are_refused(call: Call, options: tuple[str, ...]) -> None:
    result = call("logs", *options)
    assert result.code == 2 and "cannot be combined" in result.err

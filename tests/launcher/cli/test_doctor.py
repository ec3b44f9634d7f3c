"""`launcher doctor` of a job that lacks something: it says so, and checks the rest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.launcher import apiserver
from tests.launcher.apiserver import Server
from tests.launcher.invoke import Launcher

DIGITS = Path(__file__).parents[3] / "examples" / "digits.yaml"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@pytest.fixture(autouse=True)
def kubeconfig(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = apiserver.write_kubeconfig(tmp_path, server.url, "team")
    monkeypatch.setenv("KUBECONFIG", str(config))
    server.put("/api/v1/namespaces/team", {"metadata": {"labels": {}}})


def run_doctor(run_launcher: Launcher, *arguments: str) -> tuple[int, dict[str, list[str]]]:
    """Return the exit code, and what each check says."""
    result = run_launcher("doctor", *arguments, "-o", "json")
    summaries: dict[str, list[str]] = {}
    for finding in json.loads(result.out):
        texts = [finding["level"], finding["what"], finding.get("fix", "")]
        summaries.setdefault(finding["check"], []).append(": ".join(filter(None, texts)))
    return result.code, summaries


def test_missing_image_and_checkpoint_folder_are_failures_among_others(
    run_launcher: Launcher,
) -> None:
    code, summaries = run_doctor(run_launcher, str(DIGITS))
    image, folder = summaries["job"]
    assert image.startswith("fail: ") and "image is missing" in image
    assert folder.startswith("fail: ") and "train.checkpoint.path is missing" in folder
    assert code in (2, 3) and {"clock", "jobset", "rights", "dry run"} <= summaries.keys()


def test_job_of_another_platform_is_replaced_by_smallest_one(
    run_launcher: Launcher, tmp_path: Path
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(
        "name: odd\nimage: i\naccelerator: {type: cpu}\ncommand: [a]\n"
        "volumes: [{bucket: gs://data, path: /b}]\n"
    )
    code, summaries = run_doctor(run_launcher, str(job))
    assert summaries["job"] and code in (2, 3)
    assert {"jobset", "rights", "dry run"} <= summaries.keys()


def test_fault_of_the_file_itself_is_a_failure_too(run_launcher: Launcher, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("name: odd\nimage: i\naccelerator: {type: cpu}\ncomand: [a]\n")
    code, summaries = run_doctor(run_launcher, str(job))
    assert code in (2, 3) and "comand" in " ".join(summaries["job"])
    assert {"jobset", "rights", "dry run"} <= summaries.keys()


def test_system_priority_classes_are_never_proposed(
    run_launcher: Launcher, server: Server, tmp_path: Path
) -> None:
    for name in ("system-cluster-critical", "system-node-critical"):
        server.put(f"{CLASSES}/{name}", {"value": 2_000_000_000})
    job = tmp_path / "job.yaml"
    text = "name: hi\nimage: i\naccelerator: {type: cpu}\ncommand: [a]\npriority: nosuchprio\n"
    job.write_text(text)
    code, summaries = run_doctor(run_launcher, str(job))
    (priority,) = summaries["priority"]
    assert code in (2, 3) and "nosuchprio does not exist" in priority
    assert "system-" not in priority and "leave priority: out" in priority
    server.put(f"{CLASSES}/team-high", {"value": 10})
    _, summaries = run_doctor(run_launcher, str(job))
    assert "use priority: team-high." in summaries["priority"][0]

"""Terminal escapes of a job or of the API server, through each command that shows them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxlaunch.launcher.kubernetes.kinds import JOBS, JOBSETS, PODS
from jaxlaunch.launcher.kubernetes.labels import JOB_LABEL
from jaxlaunch.records import log_lines
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import Launcher

EVIL = "\x1b]52;c;aGVsbG8=\x07\x1b[2J\x9b31m\r"
COMMANDS = {
    "logs": ("logs", "lm"),
    "previous": ("logs", "lm", "--previous"),
    "status": ("status", "lm"),
    "wide": ("status", "lm", "-o", "wide"),
    "explain": ("explain", "lm"),
    "explain as yaml": ("explain", "lm", "-o", "yaml"),
    "list": ("list", "-o", "wide"),
    "list as json": ("list", "-o", "json"),
    "no such job": ("status", EVIL),
    "no such file": ("validate", f"{EVIL}.yaml"),
}


@pytest.mark.parametrize("has_failed", [True, False], ids=["failed", "runs"])
@pytest.mark.parametrize("command", COMMANDS)
def test_output_contains_no_terminal_escapes(
    run_launcher: Launcher,
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    has_failed: bool,
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(apiserver.write_kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.chdir(tmp_path)
    status = objects.ended("Failed", EVIL) if has_failed else {}
    pods = [objects.over(0, 83, message=objects.farewell(83, EVIL, traceback=EVIL)), objects.pod(1)]
    for kind, api_object in (
        (JOBSETS, objects.jobset(status=status)),
        (JOBS, objects.job_object()),
        *((PODS, p) for p in pods),
    ):
        obj = apiserver.merge_patch(
            api_object, {"metadata": {"namespace": "team", "labels": {JOB_LABEL: "lm"}}}
        )
        server.put(kind.path("team", api_object["metadata"]["name"]), obj)
    records = [
        objects.past(82, EVIL),
        objects.beat(attempt=2, phase=EVIL, refused=[EVIL], overdue=EVIL),
    ]
    tail = log_lines.TailLine(generation=0, rank=0, lines=[EVIL])
    log = [*map(log_lines.format_line, (*records, tail)), f"[0] says {EVIL}", f"agent 0: {EVIL}"]
    text = "".join(
        f"2026-11-21T11:51:00Z {line}\n" if command == "logs" else f"{line}\n" for line in log
    )
    server.put(PODS.path("team", pods[0]["metadata"]["name"], "log"), {"text": text})
    result = run_launcher(*COMMANDS[command])
    text_out = result.out + result.err
    assert not {"\x1b", "\x07", "\x9b", "\r"}.intersection(text_out), text_out
    if "json" in command:
        json.loads(result.out)

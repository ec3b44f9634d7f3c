"""Whether a name is a run's on this machine or a job's on a cluster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch.launcher.kube.kinds import JOBSETS
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Server
from tests.launcher.invoke import Left, launcher

Call = Callable[..., Left]


@pytest.fixture
def call(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """A folder with the run lm, and a cluster with a job of that name and job other."""
    monkeypatch.setenv("KUBECONFIG", str(apiserver.kubeconfig(tmp_path, server.url, "team")))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "lm").mkdir(parents=True)
    (tmp_path / "runs" / "lm" / ".lock").touch()
    for name in ("lm", "other"):
        found = apiserver.merged(objects.jobset(), {"metadata": {"name": name, "namespace": "team"}})
        server.put(JOBSETS.path("team", name), found)
    return lambda *arguments: launcher(capsys, monkeypatch, *arguments)


def test_a_name_that_is_both_needs_a_word_and_no_other_does(call: Call) -> None:
    for verb in ("status", "explain", "logs", "stop"):
        both = call(verb, "lm")
        assert both.code == 2 and "lm is both a run on this machine and a job in namespace team." in both.err
    folder = str(Path("runs/lm").absolute())
    for which, found in (
        (("lm", "--local"), folder),
        (("runs/lm",), folder),
        (("lm", "--cluster"), None),
        (("lm", "-n", "team"), None),
        (("other",), None),
    ):
        assert json.loads(call("status", *which, "-o", "json").out)["folder"] == found, which
    assert call("status", "lm", "--local", "-n", "team").code == 2


def test_a_list_has_both_unless_one_is_asked_for(call: Call) -> None:
    assert [line.split()[:2] for line in call("list").out.splitlines()[1:]] == [
        ["(here)", "lm"],
        ["team", "lm"],
        ["team", "other"],
    ]
    assert [line.split()[0] for line in call("list", "--local").out.splitlines()] == ["NAME", "lm"]
    assert [line.split()[0] for line in call("list", "--cluster").out.splitlines()] == ["NAME", "lm", "other"]
    assert call("list", "runs", "-A").code == 0 and call("list", ".", "-A").code == 2


def test_a_run_is_shown_though_the_cluster_refuses(call: Call, server: Server) -> None:
    server.on("GET", "jobsets", *[lambda handler: handler.fail(403, "Forbidden", "no") or True] * 9)
    shown = call("list")
    assert shown.code == 3 and shown.out.splitlines()[1].split()[:2] == ["lm", "Failed"]

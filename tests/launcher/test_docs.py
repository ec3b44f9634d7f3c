"""The jobs on pages can be planned. `python -m tests.lint` checks the rest of the pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxlaunch.launcher.local import trainer_process
from tests.launcher.invoke import launcher
from tests.lint.documents import DOCS, jobs


@pytest.mark.extended
@pytest.mark.parametrize("command", ["validate", "plan"])
def test_first_tpu_job_fits_as_documented(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That on GPUs: tests/gang/test_tutorial.py."""
    page = (DOCS / "first-cluster-job.md").read_text()
    (tmp_path / "job.yaml").write_text(
        re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1]
    )
    assert f"launcher {command} job.yaml" in page
    assert launcher(capsys, monkeypatch, command, str(tmp_path / "job.yaml")).code == 0


@pytest.mark.extended
@pytest.mark.parametrize("job", [pytest.param(text, id=place) for place, text in jobs()])
def test_every_documented_job_can_be_planned(
    job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a job lacks for a cluster is a note, and an error with --cluster."""
    monkeypatch.setattr(trainer_process, "is_installed", lambda: False)
    (tmp_path / "job.yaml").write_text(job)
    done = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"))
    assert done.code == 0
    required = launcher(capsys, monkeypatch, "plan", str(tmp_path / "job.yaml"), "--cluster")
    assert required.code == (2 if "note: on a cluster: " in done.out else 0)

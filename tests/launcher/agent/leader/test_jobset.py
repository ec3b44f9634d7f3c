"""The annotation of the JobSet: retries after failures, and none after a refusal."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch.launcher.agent.leader.publishers import JobSetAnnotator, has_token
from jaxlaunch.records.log_lines import ProgressAnnotation

KNOWN = ProgressAnnotation("1234", 1.0, "running", 1, 0, step=7)


@pytest.fixture
def messages() -> list[str]:
    return []


def make_annotator(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], *answers: Any
) -> tuple[JobSetAnnotator, list[bytes]]:
    """Return an annotator whose server gives these answers, and the requests."""
    sent: list[bytes] = []
    waiting: Iterator[Any] = iter(answers)

    def patch(self: JobSetAnnotator, body: bytes) -> tuple[int, str]:
        sent.append(body)
        answer = next(waiting)
        if isinstance(answer, Exception):
            raise answer
        return answer, "patch is forbidden" if answer == 403 else ""

    monkeypatch.setattr(JobSetAnnotator, "_send_patch", patch)
    return JobSetAnnotator("lm", messages.append), sent


def test_failed_annotation_is_retried_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    faults = (TimeoutError("timed out"), ssl.SSLError("no"), 429, 503, 200)
    annotator, sent = make_annotator(monkeypatch, messages, *faults)
    for _ in faults:
        annotator.annotate(KNOWN)
    assert len(sent) == 5 and b"1234" in sent[0]
    (message,) = messages
    assert message.endswith(
        "the progress of the job cannot be written to its JobSet (patch jobsets lm): timed out"
    )


@pytest.mark.parametrize("code", [401, 403, 404, 409])
def test_refused_annotation_is_not_retried(
    monkeypatch: pytest.MonkeyPatch, messages: list[str], code: int
) -> None:
    annotator, sent = make_annotator(monkeypatch, messages, code)
    annotator.annotate(KNOWN)
    annotator.annotate(KNOWN)
    assert len(sent) == 1 and f"HTTP {code}" in messages[0]


def test_pod_without_token_writes_no_annotation(tmp_path: Path) -> None:
    assert not has_token(tmp_path)
    (tmp_path / "token").touch()
    assert has_token(tmp_path)


@pytest.mark.parametrize("port", [None, "https"])
def test_missing_address_of_the_api_server_is_logged(
    tmp_path: Path, messages: list[str], monkeypatch: pytest.MonkeyPatch, port: str | None
) -> None:
    monkeypatch.setattr(ssl, "create_default_context", lambda **options: None)
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    environ |= {} if port is None else {"KUBERNETES_SERVICE_PORT": port}
    annotator = JobSetAnnotator("lm", messages.append, tmp_path, environ)
    annotator.annotate(KNOWN)
    annotator.annotate(KNOWN)
    names = "KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT"
    assert len(messages) == 1
    assert messages[0].endswith(f"(patch jobsets lm): {names} are '10.0.0.1' and {port!r}")

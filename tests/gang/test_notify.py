"""A run whose webhook takes the first message and hangs for ever at the second."""

from __future__ import annotations

from pathlib import Path

from tests.gang.runs import Running, job
from tests.launcher.agent.test_notifier import Start, start, until

__all__ = ["start"]

PROGRAM = "import os, sys; sys.exit(3 * (os.environ['JAXLAUNCH_ATTEMPT'] == '1'))"


def test_a_webhook_that_hangs_changes_nothing_of_a_run(tmp_path: Path, start: Start) -> None:
    hook, _, _ = start(200, 0)
    document = job(
        command=["python", "-c", PROGRAM],
        secrets={"HOOK": {"name": "hook", "key": "url"}},
        notify={"url": "HOOK", "events": ["failure", "done"]},
    )
    address = f"http://127.0.0.1:{hook.server_port}/canary-3f9a77"
    with Running(tmp_path, document, env={"HOOK": address}) as running:
        ended = running.wait()
    until(lambda: len(hook.got) == 2)
    assert ended.code == 0, ended.stderr
    assert [(one["event"], one["attempt"], one["code"]) for one in hook.got] == [("failure", 1, 83), ("done", 2, 0)]
    written = [file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert not any(b"canary" in text for text in [*written, ended.stdout.encode(), ended.stderr.encode()])

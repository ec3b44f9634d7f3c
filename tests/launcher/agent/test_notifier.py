"""What host 0's agent tells a webhook, whatever the webhook does."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.leader import publishers
from jaxlaunch.launcher.agent.leader.publishers import GangView, Notifier
from jaxlaunch.records.verdict import verdict_for_code


class Hook(ThreadingHTTPServer):
    """Keeps what it receives. `answers` are its codes, the last for ever; 0: no answer."""

    daemon_threads = True

    def __init__(self, *answers: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = list(answers)
        self.got = list[dict[str, Any]]()
        self.never = threading.Event()


class _Handler(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        self.server.got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        answers = self.server.answers
        code = answers.pop(0) if len(answers) > 1 else answers[0]
        if not code:
            self.server.never.wait()
            return
        self.send_response(code)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


Start = Callable[..., tuple[Hook, Notifier, list[str]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setattr(publishers, "RETRY_INTERVAL_S", 0.0)
    monkeypatch.setattr(publishers, "CHECK_INTERVAL_S", 0.0)
    hooks: list[Hook] = []

    def begin(*answers: int, **requests: Any) -> tuple[Hook, Notifier, list[str]]:
        hook, messages = Hook(*answers), list[str]()
        hooks.append(hook)
        threading.Thread(target=hook.serve_forever, daemon=True).start()
        events = ["failure", "stall", "done", "best"]
        block = {"url": "HOOK", "format": "json", "events": events, "stall_s": 60.0, **requests}
        address = f"http://127.0.0.1:{hook.server_port}/canary"
        variables = {"HOOK": address, contract.NOTIFY: json.dumps(block)}
        return hook, Notifier("digits", variables, messages.append), messages

    yield begin
    for hook in hooks:
        hook.never.set()
        hook.shutdown()
        hook.server_close()


def wait_until(happened: Callable[[], object]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end, "it did not happen in two minutes"
        time.sleep(0.01)


def make_view(step: int, metrics: Mapping[str, Any] | None = None) -> GangView:
    return GangView("run", 1, "0", [], [], [], None, None, {}, step=step, metrics=metrics)


CRASH = verdict_for_code(contract.CRASH, "rank 3: <ValueError> & more", rank=3, step=7)
DONE = verdict_for_code(contract.DONE, "every process finished", step=9)


def test_each_requested_event_sends_one_message(start: Start) -> None:
    hook, notifier, messages = start(200)
    now = time.monotonic() + 1
    notifier.notify_verdict(CRASH, 1)
    for at, step, best in ((0, 3, None), (61, 3, None), (122, 3, None), (123, 4, 4), (124, 5, 4)):
        metrics = {"loss": 1.0, "eval_loss": 0.5} | ({} if best is None else {"best_step": best})
        notifier.check_progress(
            lambda step=step, metrics=metrics: make_view(step, metrics), now + at
        )
    notifier.notify_verdict(DONE, 2)
    wait_until(lambda: len(hook.got) == 4)
    failure, stall, best_step, done = hook.got
    assert [item["event"] for item in hook.got] == ["failure", "stall", "best", "done"]
    assert messages == []
    text = "digits ended attempt 1 at step 7: rank 3: <ValueError> & more (exit 83)"
    assert failure["text"] == text
    assert (failure["code"], failure["rank"], failure["job"]) == (83, 3, "digits")
    assert "without progress for 61 s" in stall["text"]
    assert best_step["metrics"] == {"eval_loss": 0.5}
    assert done["text"] == "digits is done at step 9: every process finished (exit 0)"


def test_slack_format_and_unrequested_events(start: Start) -> None:
    hook, notifier, _ = start(200, format="slack", events=["failure"])
    notifier.notify_verdict(DONE, 1)
    notifier.notify_verdict(CRASH, 2)
    wait_until(lambda: not notifier.is_busy(time.monotonic()) and hook.got)
    text = "digits ended attempt 2 at step 7: rank 3: &lt;ValueError&gt; &amp; more (exit 83)"
    assert hook.got == [{"text": text}]


def test_failed_message_is_tried_three_times_without_showing_the_address(start: Start) -> None:
    hook, notifier, messages = start(500, 500, 500, 404, 200)
    notifier.notify_verdict(CRASH, 1)
    notifier.notify_verdict(CRASH, 2)
    wait_until(lambda: len(hook.got) == 5)
    assert [item["attempt"] for item in hook.got] == [1, 1, 1, 2, 2]
    assert messages == ["notify: a message could not be sent: the server answers 500"]


def test_silent_webhook_blocks_nothing_and_is_bounded(start: Start) -> None:
    hook, notifier, _ = start(0)
    began = time.monotonic()
    for attempt in range(10_000):
        notifier.notify_verdict(CRASH, attempt)
    assert notifier._queue.qsize() <= publishers.MAX_QUEUED_MESSAGES
    notifier.begin_closing()
    assert notifier.is_busy(began)
    assert not notifier.is_busy(time.monotonic() + publishers.LAST_MESSAGE_TIMEOUT_S)
    wait_until(lambda: hook.got)


@pytest.mark.parametrize(
    "address", ["", "file:///etc/passwd", "canary", "http://", "http://[canary", "http://x y/\n"]
)
def test_invalid_webhook_address_is_reported_without_it(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishers, "RETRY_INTERVAL_S", 0.0)
    messages = list[str]()
    block = {"url": "HOOK", "format": "json", "events": ["failure"], "stall_s": 60.0}
    notifier = Notifier(
        "digits", {"HOOK": address, contract.NOTIFY: json.dumps(block)}, messages.append
    )
    notifier.notify_verdict(CRASH, 1)
    wait_until(lambda: messages)
    assert messages[0].startswith("notify: ") and (not address or address not in messages[0])


def test_job_without_notify_starts_no_thread() -> None:
    previous = threading.active_count()
    notifier = Notifier("digits", {}, pytest.fail)
    notifier.notify_verdict(CRASH, 1)
    notifier.check_progress(lambda: pytest.fail("looked"), time.monotonic() + 100)
    assert threading.active_count() == previous and not notifier.is_busy(time.monotonic())

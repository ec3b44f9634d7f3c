"""The dashboard of a cluster: who sees what, by which request, and that no token is stored."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import subprocess
import sys
import urllib.parse
import weakref
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxlaunch.launcher.errors import ApiError, UnreachableError
from jaxlaunch.launcher.kubernetes import kubeconfig
from jaxlaunch.launcher.report import server as page_server
from jaxlaunch.launcher.report import sweep_page, tokens, viewers
from jaxlaunch.launcher.report.cluster_jobs import JobPages, JobTable
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.report.sweep_page import SweepRow
from tests.launcher.invoke import launcher
from tests.launcher.report.serving import serving
from tests.launcher.report.test_page import page_data

ALICE, BOB, EVE, NOBODY = (
    f"eyJhbGciOi.{name}-_." + "x" * 900 for name in ("alice", "bob", "eve", "nobody")
)
MAY: Mapping[str, tuple[str, ...]] = {ALICE: ("team-a",), BOB: ("team-a", "team-b"), EVE: ()}
FORM = {"Content-Type": "application/x-www-form-urlencoded"}


class Api:
    """An API server's answer by token and namespace, and which tokens it was asked with."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.ended: set[str] = set()  # tokens that have expired
        self.is_silent = False
        # How often the jobs of a viewer were opened: once for each request or stream.
        self.opened = 0

    def __call__(self, token: str) -> Jobs:
        self.opened += 1
        return Jobs(self, token)

    def check_right(self, token: str, namespace: str) -> None:
        self.asked.add(token)
        if self.is_silent:
            raise UnreachableError("The API server cannot be reached.")
        if token not in MAY or token in self.ended:
            raise ApiError("Unauthorized", None, 401)
        if namespace not in MAY[token]:
            raise ApiError(f'jobsets is forbidden in the namespace "{namespace}"', None, 403)


class Jobs:
    """The jobs that the owner of a token may see: one in each of its namespaces."""

    def __init__(self, api: Api, token: str) -> None:
        self._api, self._token = api, token

    def read_job(self, namespace: str, name: str, *, has_rank_logs: bool = True) -> Report | None:
        self._api.check_right(self._token, namespace)
        return None

    def read_sweep(self, namespace: str, name: str) -> dict[str, Any] | None:
        self._api.check_right(self._token, namespace)
        row = SweepRow(f"job-of-{namespace}", {"seed": "1"}, f"job/{namespace}/job-of-{namespace}")
        is_there = name == "seeds"
        return sweep_page.make_page(name, "loss", False, [row]) if is_there else None

    def read_table(self, namespace: str) -> JobTable:
        self._api.check_right(self._token, namespace)
        row = {
            "id": "",
            "page": f"job/{namespace}/job-of-{namespace}",
            "name": f"job-of-{namespace}",
            "state": "running",
            "why": "",
            "step": 1,
        }
        more = {
            "steps": 2,
            "goodput": None,
            "restarts": 0,
            "age_s": 60.0,
            "owner": "",
            "where": namespace,
        }
        return JobTable([{**row, **more}], [], [])


class Answer(NamedTuple):
    status: int
    text: str
    headers: http.client.HTTPMessage


@pytest.fixture
def api() -> Api:
    return Api()


@pytest.fixture
def server(api: Api) -> Iterator[viewers.Server]:
    yield from served_api(api)


def served_api(api: Api) -> Iterator[viewers.Server]:
    with serving(viewers.Server(api, ["team-a", "team-b"], ["Jobs.example.org"])) as server_made:
        yield server_made


def send_request(
    server: viewers.Server, path: str = "/", body: bytes | None = None, **headers: str
) -> Answer:
    """Return the answer to a GET or POST, of a stream the first line; `_` in headers is `-`."""
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        client.request(
            "GET" if body is None else "POST", path, body, (FORM if body is not None else {}) | sent
        )
        answer = client.getresponse()
        is_stream = answer.headers["Content-Type"] == "text/event-stream"
        return Answer(
            answer.status,
            (answer.readline() if is_stream else answer.read()).decode(),
            answer.headers,
        )
    finally:
        client.close()


def sign_in(server: viewers.Server, token: str, **headers: str) -> Answer:
    return send_request(
        server, "/sign-in", urllib.parse.urlencode({"token": token}).encode(), **headers
    )


def read_cookie(answer: Answer) -> str:
    return str(answer.headers["Set-Cookie"]).partition(";")[0]


def job_names(answer: Answer) -> list[str]:
    assert answer.status == 200
    return [run["name"] for run in page_data(answer.text)["runs"]]


def test_viewers_see_what_their_tokens_may(server: viewers.Server, api: Api) -> None:
    first = send_request(server)
    assert (first.status, first.headers["WWW-Authenticate"]) == (401, "Bearer")
    assert (
        "Sign in to see your jobs." in first.text
        and '<input type="password" name="token"' in first.text
    )

    alice, bob = sign_in(server, f"\n{ALICE} \r\n"), sign_in(server, BOB)

    assert (alice.status, alice.headers["Location"]) == (303, "/")
    attributes = str(alice.headers["Set-Cookie"]).split("; ")[1:]
    assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert "eyJ" not in str(alice.headers["Set-Cookie"]) and ALICE not in read_cookie(alice)
    jobs = send_request(server, Cookie=read_cookie(alice))
    assert job_names(jobs) == ["job-of-team-a"]
    (left_out,) = page_data(jobs.text)["unread"]
    assert (
        left_out == "1 of 2 namespaces are left out: you may not list jobs there."
        and "team-b" not in jobs.text
    )
    assert job_names(send_request(server, Cookie=f"a=b; {read_cookie(bob)}")) == [
        "job-of-team-a",
        "job-of-team-b",
    ]
    assert job_names(
        send_request(server, Authorization=f"bearer {BOB}", Cookie=read_cookie(alice))
    ) == [
        "job-of-team-a",
        "job-of-team-b",
    ]
    assert job_names(send_request(server, Cookie=read_cookie(alice))) == ["job-of-team-a"]
    assert api.asked == {ALICE, BOB}


def test_invalid_token_sees_no_jobs(server: viewers.Server, api: Api) -> None:
    eve, nobody, none = sign_in(server, EVE), sign_in(server, NOBODY), sign_in(server, "  ")
    assert [eve.status, nobody.status, none.status] == [403, 401, 401]
    assert viewers.NO_RIGHTS in eve.text and viewers.NOT_ACCEPTED in nobody.text
    sent = [
        send_request(server, path, Authorization=f"Bearer {token}")
        for path in ("/", "/events")
        for token in (EVE, NOBODY)
    ]
    assert [entry.status for entry in sent] == [403, 401, 403, 401]
    answers = [
        eve,
        nobody,
        none,
        *sent,
        send_request(server, "/events"),
        send_request(server, "/runs"),
        send_request(server, "/?token=" + BOB),
    ]
    for status in answers:
        assert status.status in (401, 403, 404)
        assert (
            "job-of" not in status.text and "team-" not in status.text and "eyJ" not in status.text
        )
    assert (
        "Set-Cookie" not in eve.headers and "<form" not in sent[0].text
    )  # a form does not change a proxy's token

    cookie = read_cookie(sign_in(server, BOB))
    api.ended.add(BOB)
    over = send_request(server, Cookie=cookie)
    assert over.status == 401 and "job-of" not in over.text
    assert [text.rpartition("; ")[2] for text in over.headers.get_all("Set-Cookie", [])] == [
        "Max-Age=0"
    ] * 2
    api.is_silent = True
    assert send_request(server, Cookie=cookie).status == 503


def test_pages_follow_rights_of_token(server: viewers.Server, api: Api) -> None:
    """Pages of jobs and sweeps need the same rights as the table, and say nothing else."""
    cookie = read_cookie(sign_in(server, ALICE))
    row = page_data(send_request(server, Cookie=cookie).text)["runs"][0]
    assert row["page"] == "/job/team-a/job-of-team-a"
    sweep = send_request(server, "/sweep/team-a/seeds", Cookie=cookie)
    data = page_data(sweep.text)
    assert (data["home"], data["events"]) == ("/", "/sweep/team-a/seeds/events")
    assert data["runs"][0]["page"] == row["page"] and data["sign_out"] == "/sign-out"
    stream = send_request(server, "/sweep/team-a/seeds/events", Cookie=cookie)
    assert (stream.status, stream.text) == (200, "event: run\n")

    refused = {
        "/job/team-a/other": 404,
        "/job/team-b/job-of-team-b": 403,
        "/sweep/team-b/seeds": 403,
        "/job/kube-system/x": 403,
        "/job/team-a/a%2f..": 404,
        "/job/team-a/<script>": 404,
        "/job/team-a": 404,
        "/job/team-a/x/y": 404,
        "/job/../x": 404,
    }
    for path, status in refused.items():
        for end in ("", "/events"):
            answer = send_request(server, path + end, Cookie=cookie)
            assert answer.status == status, (path, answer)
            assert "<script>" not in answer.text and "job-of" not in answer.text
    # A comparison reads only jobs of namespaces that are shown, with the rights of the token.
    for jobs, status in {"team-a/other": 404, "kube-system/x": 404, "team-b/x": 403}.items():
        path = f"/compare?run=job/{jobs}&run=job/team-a/another"
        assert send_request(server, path, Cookie=cookie).status == status
    # A namespace that is not shown cannot be told from one without rights.
    hidden = [send_request(server, path, Cookie=cookie).text for path in list(refused)[1:4]]
    assert len(set(hidden)) == 1 and viewers.NO_PAGE in hidden[0]
    assert send_request(server, "/job/team-a/other").status == 401
    assert api.asked == {ALICE}


def test_link_to_page_leads_there_after_sign_in(server: viewers.Server) -> None:
    """A link on another site comes without the cookie, and the page offers the same link."""
    led = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    linked = send_request(server, "/sweep/team-a/seeds", **led)
    assert linked.status == 401 and '<a href="/sweep/team-a/seeds">' in linked.text
    assert send_request(server, "/sweep/team-a/seeds/events", **led).status == 403


def test_stream_keeps_what_it_has_read(
    server: viewers.Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request opens the jobs for itself, and a stream only once."""
    monkeypatch.setattr(viewers, "LIST_PERIOD_S", 0.01)
    monkeypatch.setattr(viewers, "MAX_STREAM_S", 0.2)
    for _ in range(2):
        send_request(server, Authorization=f"Bearer {ALICE}")
    assert api.opened == 2
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    client.request("GET", "/events", headers={"Authorization": f"Bearer {ALICE}"})
    assert client.getresponse().read().startswith(b"event: run")
    client.close()
    assert api.opened == 3


class Event(dict[str, Any]):
    """A dictionary to which a weak reference is possible."""


def test_stream_keeps_nothing_of_what_it_has_sent(
    server: viewers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many pages may be open, and each event may have a megabyte."""
    events, alive = list[weakref.ref[Event]](), list[int]()

    def read_table(jobs: JobPages) -> dict[str, Any] | viewers.Refusal:
        alive.append(sum(event() is not None for event in events))
        if len(alive) > 3:
            return viewers.Refusal(HTTPStatus.FORBIDDEN, viewers.NO_RIGHTS)
        event = Event(runs=len(alive))
        events.append(weakref.ref(event))
        return event

    monkeypatch.setattr(server, "read_table", read_table)
    monkeypatch.setattr(viewers, "LIST_PERIOD_S", 0.01)
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    client.request("GET", "/events", headers={"Authorization": f"Bearer {ALICE}"})
    assert client.getresponse().read().count(b"event: run") == 3
    client.close()
    assert alive == [0, 0, 0, 0]


def test_modules_of_the_dashboard_are_small() -> None:
    """The schema of a job takes 15 MB, and the cluster's dashboard reads no job.yaml."""
    script = "import sys, jaxlaunch.launcher.report.viewers; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script]).returncode == 0


def test_sign_in_cookie_is_secure(server: viewers.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for header in (
        {"X_Forwarded_Proto": "https"},
        {"Origin": "https://jobs.example.org", "Host": "jobs.example.org"},
    ):
        cookie = str(sign_in(server, ALICE, **header).headers["Set-Cookie"])
        assert cookie.startswith("__Host-jaxlaunch=") and cookie.endswith(
            "; Path=/; HttpOnly; SameSite=Strict; Secure"
        )
    cookie = cookie.partition(";")[0]
    assert job_names(send_request(server, Cookie=cookie)) == ["job-of-team-a"]

    for other in (
        f"jaxlaunch={ALICE}",
        f"{cookie[:-9]}AAAAAAAAA",
        "jaxlaunch=\u00fc",
        "jaxlaunch=",
    ):
        assert send_request(server, Cookie=other).status == 401
    ended = send_request(server, "/sign-out", Cookie=cookie)
    assert ended.status == 200 and len(ended.headers.get_all("Set-Cookie", [])) == 2
    monkeypatch.setattr(tokens, "SESSION_S", -1)
    assert "You are no longer signed in" in send_request(server, Cookie=cookie).text


def test_only_own_pages_under_configured_names_are_answered(
    server: viewers.Server, api: Api
) -> None:
    cookie, port = read_cookie(sign_in(server, ALICE)), server.server_address[1]
    led = {
        "Sec_Fetch_Site": "cross-site",
        "Sec_Fetch_Mode": "navigate",
        "Sec_Fetch_Dest": "document",
    }
    for right in (
        "localhost",
        f"127.0.0.1:{port}",
        "[::1]:8080",
        "jobs.example.org",
        "JOBS.example.org.:8443",
    ):
        assert job_names(
            send_request(server, Host=right, Origin=f"http://{right}", Cookie=cookie)
        ) == ["job-of-team-a"]
    linked = send_request(server, **led)
    assert linked.status == 401 and "if you have signed in already" in linked.text
    assert (
        "Set-Cookie" not in linked.headers
    )  # which would end a sign-in that the browser did not send along
    assert job_names(send_request(server, Authorization=f"Bearer {ALICE}", **led)) == [
        "job-of-team-a"
    ]
    hosts = (
        "evil.example",
        "localhost.evil.example",
        "evil@localhost",
        "localhost:x",
        "a b",
        "",
        "10.0.0.7:8080",
    )
    wrong: list[dict[str, str]] = [
        *({"Host": entry} for entry in hosts),
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": f"http://localhost:{port + 1}"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        led | {"Sec_Fetch_Dest": "iframe"},
    ]
    response = set(api.asked)
    api.asked.clear()
    refused = [send_request(server, Cookie=cookie, **entry) for entry in wrong]
    refused += [send_request(server, "/events", Cookie=cookie, **entry) for entry in [*wrong, led]]
    refused += [sign_in(server, BOB, **entry) for entry in [*wrong, led]]
    refused.append(send_request(server, "/sign-out", **led))
    assert {entry.status for entry in refused} == {403} and not api.asked and response == {ALICE}
    assert not [
        entry for entry in refused if "job-of" in entry.text or "Set-Cookie" in entry.headers
    ]
    assert send_request(server, "/healthz", Host="10.0.0.7:8080")[:2] == (200, "ok\n")


@pytest.mark.parametrize(
    "end",
    [
        " b",
        "\r\nX-Remote-User: admin",
        "\0b",
        "\u00e9",
        "\u202e",
        ";b",
        '"',
        "=a",
        "x" * 3000,
        "x" * 20_000,
        b"\xff\xfe",
    ],
    ids=lambda end: repr(end)[:16],
)
def test_invalid_token_is_not_forwarded(server: viewers.Server, api: Api, end: str | bytes) -> None:
    token = b"eyJ" + (end.encode() if isinstance(end, str) else end)
    in_form = send_request(server, "/sign-in", urllib.parse.urlencode({"token": token}).encode())
    assert (
        in_form.status == 401
        and 'role="alert"' in in_form.text
        and "eyJ" not in in_form.text
        and not api.asked
    )
    in_header = send_raw(
        server, b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + token
    )
    assert in_header.startswith(b"HTTP/1.1 401") and b"eyJ" not in in_header
    if token[3:] != b"x" * 3000:  # which is too long for a cookie, and not for a header
        assert api.asked <= {
            "eyJ"
        }  # what follows the end of a line is another header, which is not sent on
    assert job_names(send_request(server, Authorization=f"Bearer {ALICE}")) == ["job-of-team-a"]


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\n\r\ntoken=a", b"401"),
        (b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\ntoken=a", b"401"),
        (
            b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: "
            b"9999999999999999\r\n\r\ntoken=a",
            b"401",
        ),
        (
            b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 200000\r\n\r\ntoken=a",
            b"401",
        ),
        (
            b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1048583\r\n\r\ntoken="
            + b"x" * 1048577,
            b"401",
        ),
        (
            b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\n"
            + b"a=b&" * 5,
            b"401",
        ),
        (
            b"POST /sign-in HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n\r\n"
            + b"a=b&" * 10,
            b"401",
        ),
        (b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7\r\n\r\ntoken=a", b"404"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost", b"403"),
        (b"GET / HTTP/1.1", b"403"),
        (b"GET //[ HTTP/1.1\r\nHost: localhost", b"404"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Basic YTpi", b"401"),
        (
            b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
            b"a\r\nAuthorization: Bearer b",
            b"401",
        ),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + b"x" * 1_000_000, b"431"),
        (b"DELETE / HTTP/1.1\r\nHost: localhost", b"501"),
    ],
    ids=lambda entry: entry.decode()[:60] if len(entry) > 3 else entry.decode(),
)
def test_malformed_request_is_answered(
    server: viewers.Server, api: Api, request_: bytes, status: bytes
) -> None:
    assert send_raw(server, request_).split()[:2] == [b"HTTP/1.1", status]
    assert not api.asked


def test_connection_has_one_request(server: viewers.Server) -> None:
    """A proxy may use a connection for several viewers, and a browser uses one that has ended."""
    second = f"GET / HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {BOB}\r\n\r\n".encode()
    for first in (b"GET /healthz", b"GET /", b"POST /sign-in"):
        length = f"\r\nContent-Length: {0 if b'POST' in first else len(second)}\r\n\r\n".encode()
        answer = send_raw(server, first + b" HTTP/1.1\r\nHost: localhost" + length + second)
        assert (
            answer.count(b"HTTP/1.1 ") == answer.count(b"Connection: close\r\n") == 1
            and b"job-of" not in answer
        )
    assert sign_in(server, BOB).headers["Connection"] == "close"


def test_excess_connections_are_closed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(viewers, "MAX_CONNECTIONS", 2)
    for server in served_api(api):
        idle = [
            socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)
            for _ in range(3)
        ]
        assert idle[2].recv(1) == b""  # the third is closed
        for status in idle:
            status.close()
        while (
            send_raw(server, b"GET /healthz HTTP/1.1\r\nHost: localhost") == b""
        ):  # the threads of the others end
            pass


def send_raw(server: viewers.Server, request_: bytes) -> bytes:
    """Return the answer to raw bytes; the connection may end before all of them are read."""
    answer = b""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as client:
        with contextlib.suppress(OSError):
            client.sendall(request_ + b"\r\nConnection: close\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while part := client.recv(65536):
                answer += part
    return answer


def test_open_page_follows_rights_of_token(
    server: viewers.Server, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(viewers, "LIST_PERIOD_S", 0.02)
    monkeypatch.setattr(page_server, "KEEPALIVE_S", 0.0)
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    client.request("GET", "/events", headers={"Authorization": f"Bearer {ALICE}"})
    answer = client.getresponse()
    lines = [answer.readline() for _ in range(3)]
    assert (answer.status, lines[0], lines[2]) == (200, b"event: run\n", b"\n")
    (run,) = json.loads(lines[1].removeprefix(b"data: "))["runs"]
    assert run["name"] == "job-of-team-a"
    api.ended.add(ALICE)
    rest = [answer.readline() for _ in range(1000)]
    assert rest[-1] == b"" and b"job-of" not in b"".join(rest)  # it ends
    client.close()
    assert send_request(server, "/events", Authorization=f"Bearer {ALICE}").status == 401
    monkeypatch.setattr(viewers, "MAX_STREAM_S", 0.0)
    assert (
        send_request(server, "/events", Authorization=f"Bearer {BOB}").text == ""
    )  # the browser asks again


def test_api_server_address_may_be_ipv6(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kubeconfig, "CA_FILE", tmp_path / "ca.crt")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    (tmp_path / "ca.crt").write_text("")
    for host, server in {
        "fd00::1": "https://[fd00::1]:443",
        "10.96.0.1": "https://10.96.0.1:443",
    }.items():
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
        assert kubeconfig.pod_server_url() == server


def test_command_names_missing_settings(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for arguments, message in {
        "--in-cluster": "--in-cluster needs a namespace.",
        "runs --in-cluster -n a": "--in-cluster cannot be combined with the folder runs.",
        "--in-cluster --context c -n a": "--in-cluster cannot be combined with --context c.",
        "--in-cluster -n a": "This is not a pod of a cluster: KUBERNETES_SERVICE_HOST or "
        "KUBERNETES_SERVICE_PORT",
        "--accept-host a": "--accept-host is only for --in-cluster.",
    }.items():
        result = launcher(capsys, monkeypatch, "dashboard", *arguments.split())
        assert (
            result.err.startswith(message)
            and "hint: " in result.err
            and result.code == (3 if "pod" in message else 2)
        )

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.errors import UnreachableError
from jaxlaunch.launcher.report.cluster_jobs import JobTable
from jaxlaunch.launcher.report.run import Report
from jaxlaunch.launcher.report.server import RunCatalog, Server
from tests.launcher.report import made_runs
from tests.launcher.report.serving import serving
from tests.launcher.report.test_page import NASTY, page_data

SECRET = "nobody else's business"


def _job_row() -> dict:
    row = {
        "id": "",
        "page": "job/a/lm",
        "name": "lm",
        "state": "queued",
        "why": "lm waits for its queue",
        "step": None,
    }
    more = {
        "steps": None,
        "goodput": None,
        "restarts": 0,
        "age_s": 60.0,
        "owner": "research",
        "where": "namespace a",
    }
    return {**row, **more}


class Jobs:
    """A cluster with one job, whose page cannot be read."""

    def __init__(self, row: dict) -> None:
        self._row = row

    def read_table(self, namespace: str) -> JobTable:
        return JobTable([self._row], [], [f"the pods of namespace {namespace} cannot be read"])

    def read_job(self, namespace: str, name: str, *, has_rank_logs: bool = True) -> Report | None:
        assert name != ".."
        if name == "lm":
            raise UnreachableError("The API server cannot be reached.")
        return None

    def read_sweep(self, namespace: str, name: str) -> dict | None:
        return None


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    for name in ("first", "second", "<script>alert(1)<", "..\u202e"):
        made_runs.run(tmp_path / "runs" / name, points=40)
    (tmp_path / "secret").write_text(SECRET)
    (tmp_path / "runs" / "link").symlink_to(tmp_path)
    (tmp_path / "runs" / "no-run").mkdir()
    with serving(Server(RunCatalog(tmp_path / "runs", Jobs(_job_row()), ["a"]))) as server_made:
        yield server_made


def get(server: Server, path: str, **headers: str) -> tuple[int, str]:
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        client.putrequest("GET", path, skip_host="Host" in headers)
        for name, value in headers.items():
            client.putheader(name.replace("_", "-"), value)
        client.endheaders()
        answer = client.getresponse()
        return answer.status, answer.read().decode()
    finally:
        client.close()


def rows_of(server: Server) -> dict[str, dict]:
    return {run["name"]: run for run in page_data(get(server, f"/{server.token}/")[1])["runs"]}


def test_table_lists_runs_and_jobs(
    server: Server,
) -> None:
    runs = rows_of(server)

    assert set(runs) == {"first", "second", "<script>alert(1)<", "..\\u202e", "lm"}
    assert (runs["first"]["state"], runs["first"]["step"]) == ("done", 1000)
    assert runs["lm"]["page"] == f"/{server.token}/job/a/lm"
    # The page says why the cluster could not be read; other names and namespaces have none.
    unreachable = get(server, runs["lm"]["page"])
    assert unreachable == (503, "The API server cannot be reached.\n")
    assert get(server, f"{runs['lm']['page']}/events")[0] == 503
    for path in ("job/a/other", "job/b/lm", "job/a/other/x", "sweep/a/lm", "job/a", "job/a/.."):
        assert get(server, f"/{server.token}/{path}")[0] == 404, path
    status, text = get(server, runs["<script>alert(1)<"]["page"])
    assert status == 200 and text.count("<script") == 2
    jobs = "run=job/a/lm&run=job/a/other"
    assert get(server, f"/{server.token}/compare?{jobs}") == unreachable
    tables = "&".join(f"run={runs[name]['id']}" for name in ("first", "second"))
    assert [
        run["name"]
        for run in page_data(get(server, f"/{server.token}/compare?{tables}")[1])["runs"]
    ] == [
        "first",
        "second",
    ]


def test_sweep_is_a_group_with_its_own_page(tmp_path: Path) -> None:
    made_runs.sweep(tmp_path / "runs" / "lr-sweep")
    made_runs.run(tmp_path / "runs" / "alone", points=40)
    (tmp_path / "runs" / "link").symlink_to(tmp_path / "runs" / "lr-sweep")
    # A name of the file that leads out of the sweep is left out.
    with open(tmp_path / "runs" / "lr-sweep" / "sweep.jsonl", "a") as file:
        file.write('{"run": "../alone", "set": ["a=1"], "job": "x"}\n[1]\n{"run"\n')
    with serving(Server(RunCatalog(tmp_path / "runs", None))) as server:
        table = page_data(get(server, f"/{server.token}/")[1])
        (group,) = table["groups"]
        runs = {run["name"]: run for run in table["runs"]}
        assert set(runs) == {"alone", *(f"lr-sweep-{number:03}" for number in range(4))}
        first = runs["lr-sweep-000"]
        assert (first["group"], first["tags"]) == (group["id"], "team=vision")
        assert first["changes"] == {"train.optimizer.lr": "1e-3", "train.model.width": "8"}
        assert (first["metric"]["name"], first["metric"]["value"]) == ("eval/loss", 0.9)
        assert "group" not in runs["alone"] and runs["alone"]["metric"]["name"] == "eval/loss"
        assert len(runs["alone"]["metric"]["spark"]) == 2 and runs["alone"]["duration_s"] > 60
        status, text = get(server, group["page"])
        data = page_data(text)
        assert status == 200 and get(server, f"{group['page']}x")[0] == 404
        assert get(server, data["runs"][0]["page"])[0] == 200
    # The folder of the sweep alone shows the same.
    with serving(Server(RunCatalog(tmp_path / "runs" / "lr-sweep", None))) as server:
        alone = page_data(get(server, f"/{server.token}/")[1])
    assert len(alone["runs"]) == 4 and alone["groups"][0]["id"] == group["id"]
    # The best first; a run without the metric last.
    values = [run["value"] for run in data["runs"]]
    assert values == [0.3, 0.5, 0.9, 110.0, None] and data["runs"][-1]["state"] == "waiting"
    assert data["keys"] == ["train.optimizer.lr", "train.model.width"]


def test_requests_without_token_or_from_other_sites_are_refused(server: Server) -> None:
    own_headers = f"/{server.token}/"
    port = server.server_address[1]
    assert get(server, own_headers)[0] == 200
    assert get(server, own_headers, Origin=f"http://127.0.0.1:{port}")[0] == 200
    refused = [
        get(server, "/"),
        get(server, "/wrong/"),
        get(server, f"/{server.token[:-1]}/"),
        get(server, own_headers, Host="evil.example"),
        get(server, own_headers, Host=f"evil.example:{port}"),
        get(server, own_headers, Origin="http://evil.example"),
        get(server, own_headers, Origin="null"),
        get(server, own_headers, Sec_Fetch_Site="cross-site"),
        get(server, f"/{server.token}/events", Origin="http://evil.example"),
    ]
    assert {status for status, _ in refused} == {403}
    assert not any("first" in text for _, text in refused)


def test_paths_outside_folder_are_refused(server: Server) -> None:
    odd = [
        "..",
        "../secret",
        "%2e%2e/secret",
        "link",
        "no-run",
        "first",
        "....//secret",
        "%00",
        "a" * 5000,
        "%ff%fe",
        "?",
        "x\\..\\y",
    ]
    odd += [part.replace("/", "%2f") for part in odd] + [
        "%3Cscript%3E",
        NASTY[:8].replace("<", "%3C").replace(">", "%3E"),
    ]
    for name in odd:
        for path in (
            f"/{server.token}/run/{name}",
            f"/{server.token}/{name}",
            f"/{server.token}/run/{name}/events",
            f"/{server.token}/compare?run={name}&run={name}",
        ):
            status, text = get(server, path)
            assert status in (200, 404), path
            assert SECRET not in text and (status == 404 or page_data(text)["kind"] == "runs"), path


def test_links_in_run_are_not_followed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "7.json").write_text(json.dumps({"samples": [{"text": SECRET}]}))
    (tmp_path / "rows").write_text(
        json.dumps({"step": 1, "samples": [SECRET], SECRET: 1.0, "loss": 1.0}) + "\n"
    )
    (tmp_path / "job").write_text(f"name: {SECRET}\n")
    run = tmp_path / "runs" / "second"
    (run / "starts" / "1" / "logs").mkdir(parents=True)
    (run / "starts" / "1" / "logs" / "rank-0.log").symlink_to(tmp_path / "secret")
    (tmp_path / "steps" / "7").mkdir(parents=True)
    (tmp_path / "steps" / "7" / contract.MANIFEST).write_text(
        json.dumps({"manifest": {"files": {"a": [5, ""]}}})
    )
    links = {
        "checkpoints": "steps",
        "reported": "words",
        "samples.jsonl": "rows",
        "metrics.jsonl": "rows",
        "job.yaml": "job",
    }
    for name, other in links.items():
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / other)

    status, text = get(server, rows_of(server)["second"]["page"])

    assert status == 200 and SECRET not in text and page_data(text)["sentence"]["state"] == "done"
    assert page_data(text)["checkpoints"] == []
    (run / "checkpoints").unlink()
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / "7").symlink_to(tmp_path / "steps" / "7")
    (step,) = page_data(get(server, rows_of(server)["second"]["page"])[1])["checkpoints"]
    assert step["bytes"] is None


def test_open_page_receives_updates(server: Server, tmp_path: Path) -> None:
    runs = rows_of(server)
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    client.request("GET", f"{runs['first']['page']}/events")
    answer = client.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"

    assert [answer.readline()[:6] for _ in range(3)] == [
        b"event:",
        b"data: ",
        b"\n",
    ]  # how it stands
    with open(tmp_path / "runs" / "first" / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": 1001, "loss": 0.125, "time": made_runs.BEGAN + 60}) + "\n")

    assert answer.readline() == b"event: run\n"
    rows = json.loads(re.sub("^data: ", "", answer.readline().decode()))
    assert [axis[-1] for axis in rows["curves"]["loss"]][::2] == [1001, 0.125]
    answer.close()
    client.close()


def test_only_own_faults_are_printed(
    server: Server, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_connection(server.server_address[:2], timeout=30) as client:
        client.setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
        )  # leaves with a reset
        client.sendall(f"GET /{server.token}/ HTTP/1.1\r\n".encode())
    assert get(server, f"/{server.token}/")[0] == 200
    assert capsys.readouterr().err == ""

    # A row that is not JSON.
    monkeypatch.setattr(server.runs, "_jobs", {"a": Jobs(_job_row() | {"step": {1}})})
    monkeypatch.setattr(server.runs, "_table", None)
    with pytest.raises(http.client.RemoteDisconnected):
        get(server, f"/{server.token}/")
    assert "TypeError: Object of type set is not JSON serializable" in capsys.readouterr().err

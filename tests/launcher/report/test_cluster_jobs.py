"""Jobs of a cluster in the table and on their pages, with all rights and with few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.diagnose.explain.explanation import explain_job
from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import PODS
from jaxlaunch.launcher.report import cluster_jobs, compare
from jaxlaunch.launcher.report.cluster_jobs import ClusterJobs
from jaxlaunch.launcher.report.job_report import JobReport
from jaxlaunch.records import log_lines
from tests.launcher import apiserver, objects
from tests.launcher.apiserver import Fault, Handler, Server
from tests.launcher.report import made_jobs
from tests.launcher.report.made_jobs import beats, put_job


@pytest.fixture
def jobs(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterJobs:
    config = apiserver.write_kubeconfig(tmp_path, server.url, namespace="team")
    monkeypatch.setenv("KUBECONFIG", str(config))
    return ClusterJobs(Cluster.connect(), explain_job)


def forbid(server: Server, part: str) -> None:
    """Refuse every later GET of a path with this part, as RBAC does."""

    def fault(handler: Handler) -> bool:
        handler.fail(403, "Forbidden", f"{part} is forbidden: nobody may get {part}")
        return True

    server.on("GET", part, *[fault] * 100)


def read_page(jobs: ClusterJobs, name: str = "lm") -> dict[str, Any]:
    report = jobs.read_job("team", name)
    assert report is not None
    return report.to_json()


def log_requests(server: Server) -> list[dict[str, str]]:
    return [query for _, path, query in server.requests if path.endswith("/log")]


def test_row_has_metric_curve_tags_and_progress(server: Server, jobs: ClusterJobs) -> None:
    put_job(server, labels={"team": "vision", "example.com/cost": "7"})
    (row,) = jobs.read_table("team").rows
    assert (row["name"], row["state"], row["step"], row["steps"]) == ("lm", "running", 200, 1000)
    assert (row["page"], row["where"]) == ("job/team/lm", "namespace team")
    assert row["tags"] == "team=vision, example.com/cost=7"
    assert (row["metric"]["name"], row["metric"]["value"]) == ("eval/loss", 0.8)
    assert len(row["metric"]["spark"]) > 5 and row["duration_s"] > 0


def test_open_table_reads_only_what_is_new(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    jobs.read_table("team")
    assert [query.get("tailLines") for query in log_requests(server)] == ["4000", "50000"]
    server.requests.clear()
    path = PODS.path("team", "lm-w-0-0-abcde", "log")
    server.put(path, {"text": made_jobs.log_text(beats(21)[-1])})
    (row,) = jobs.read_table("team").rows
    assert [query.get("tailLines") for query in log_requests(server)] == ["4000"]
    assert row["step"] == 210 and len(row["metric"]["spark"]) > 5


def test_table_without_logs_has_the_recorded_value(server: Server, jobs: ClusterJobs) -> None:
    """Without pods/log the annotation on the JobSet has the newest metrics, without a curve."""
    put_job(server)
    path = next(path for path in server.objects if path.endswith("jobsets/lm"))
    uid = server.objects[path]["metadata"]["uid"]
    metrics = {"loss": 0.5, "eval_loss": 0.7}
    annotation = log_lines.ProgressAnnotation(
        uid, objects.NOW.timestamp(), "running", 1, 0, step=150, metrics=metrics
    )
    server.objects[path]["metadata"]["annotations"]["jaxlaunch.io/progress"] = annotation.to_json()
    forbid(server, "/log")
    table = jobs.read_table("team")
    assert table.rows[0]["metric"] == {"name": "eval/loss", "value": 0.7, "spark": []}
    assert "lm-w-0-0-abcde" in table.unread[0]


def test_time_limits_how_many_histories_are_read(
    server: Server, jobs: ClusterJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        put_job(server, name)
    monkeypatch.setattr(cluster_jobs, "HISTORY_TIMEOUT_S", 0.0)
    rows = jobs.read_table("team").rows
    # Without a curve, the metric is that of the newest heartbeat.
    assert [row["metric"]["spark"] for row in rows] == [[], [], []]
    assert [row["metric"]["value"] for row in rows] == [0.8] * 3
    monkeypatch.setattr(cluster_jobs, "HISTORY_TIMEOUT_S", 60.0)
    assert all(row["metric"]["spark"] for row in jobs.read_table("team").rows)


def test_sweep_is_a_group_with_the_keys_of_its_jobs(server: Server, jobs: ClusterJobs) -> None:
    done = objects.ended("Completed")
    for number, lr in enumerate(("1e-3", "1e-2")):
        name = f"lr-sweep-{number:03}"
        words = [f"train.optimizer.lr={lr}", f"name={name}", "labels.sweep=lr-sweep"]
        records = beats(20 + 10 * number)
        labels = {"sweep": "lr-sweep", "team": "vision"}
        put_job(server, name, records, labels=labels, words=words, status=done, is_over=True)
    put_job(server, "alone")
    table = jobs.read_table("team")
    (group,) = table.groups
    assert (group["name"], group["is_max"], group["page"]) == (
        "lr-sweep",
        False,
        "sweep/team/lr-sweep",
    )
    rows = {row["name"]: row for row in table.rows}
    assert "group" not in rows["alone"]
    first = rows["lr-sweep-000"]
    assert (first["group"], first["tags"]) == (group["id"], "team=vision")
    assert first["changes"] == {"train.optimizer.lr": "1e-3"}
    # Nothing has recorded the step of these jobs but their logs.
    assert (first["step"], first["steps"], first["state"]) == (200, 1000, "done")

    page = jobs.read_sweep("team", "lr-sweep")
    assert page is not None and jobs.read_sweep("team", "other") is None
    assert (page["metric"], page["mode"], page["keys"]) == (
        "eval/loss",
        "min",
        ["train.optimizer.lr"],
    )
    # The longer run has the lower loss, and is first.
    assert [run["name"] for run in page["runs"]] == ["lr-sweep-001", "lr-sweep-000"]
    assert page["runs"][0]["page"] == "job/team/lr-sweep-001"
    assert page["runs"][0]["value"] < 0.8 and len(page["runs"][0]["curve"][0]) > 5


def test_page_of_running_job(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    data = read_page(jobs)
    assert data["sentence"] == {
        "state": "running",
        "text": "Job lm has been running for 4 min 45 s at step 200 of 1000: eval/loss 0.8.",
        "todo": "",
    }
    assert {"loss", "eval/loss"} <= set(data["drawn"]) and "wall_s" not in data["drawn"]
    assert len(data["curves"]["loss"][0]) == 20 and data["left_s"] == pytest.approx(1120, rel=0.1)
    assert data["heat"]["ranks"] == 2 and data["heat"]["has_lag"] is False
    assert [row[0] for row in data["hosts"]] == ["0", "1"]
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1]
    assert data["ranks"][0]["tail"][0] == "line 0"
    # The records of the agent do not belong to a rank.
    assert not any("jaxlaunch" in line for rank in data["ranks"] for line in rank["tail"])
    assert data["explanation"]["headline"] == "lm runs: training at step 200 of 1000"
    assert "steps: 1000" in data["job"] and data["unread"] == {}


def test_page_of_failed_job_begins_with_its_cause(server: Server, jobs: ClusterJobs) -> None:
    verdict = made_jobs.ended(
        83,
        "rank 1 raised ValueError: boom",
        attempt=1,
        at=made_jobs.BEGAN + 290,
        rank=1,
        traceback="Traceback:\nValueError: boom",
    )
    failed = objects.ended("Failed", "FailedJobs", "jobset failed")
    put_job(server, records=[*beats(), verdict], status=failed, is_over=True)
    made_jobs.put_warning(server, "lm", "Evicted", "The node was low on memory")
    data = read_page(jobs)
    assert data["sentence"]["state"] == "failed"
    assert data["sentence"]["text"].startswith("Job lm failed")
    assert "boom" in data["sentence"]["text"]
    assert data["sentence"]["text"].endswith(". Newest: eval/loss 0.8.")
    assert [(row["cause"], row["code"]) for row in data["attempts"]] == [("crash", 83)]
    assert data["attempts"][0]["traceback"].endswith("ValueError: boom")
    assert (data["ranks"][0]["rank"], data["ranks"][0]["is_cause"]) == (1, True)


def test_page_of_done_job_begins_with_its_result(server: Server, jobs: ClusterJobs) -> None:
    verdict = made_jobs.ended(0, "every process finished", attempt=1, at=made_jobs.BEGAN + 286)
    status = objects.ended("Completed")
    put_job(server, records=[*beats(), verdict], status=status, is_over=True)
    data = read_page(jobs)
    assert data["sentence"]["text"] == "Job lm is done in 4 min 46 s: eval/loss 0.8."
    assert data["left_s"] is None and data["attempts"][-1]["cause"] == "done"


def test_page_of_queued_job_says_why_it_waits(server: Server, jobs: ClusterJobs) -> None:
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/lm"
    server.put(path, objects.jobset(1, queue="research", suspend=True))
    data = read_page(jobs)
    assert data["sentence"]["state"] in ("queued", "suspended")
    assert data["sentence"]["text"].startswith("Job lm ")
    assert data["curves"] == {} and data["attempts"] == [] and data["wall_s"] == 0.0
    assert data["unread"]["curves"] == ["No pod of this job has a log yet."]


def test_jobs_are_compared_by_keys_and_curves(server: Server, jobs: ClusterJobs) -> None:
    """Two jobs that differ in a key, and one whose pods and logs are gone, on one page."""
    put_job(server, "slow", beats(10))
    put_job(server, "fast", beats(20), train=made_jobs.TRAIN | {"batch": 64})
    ended = objects.ended("Completed")
    put_job(server, "gone", hosts=1, status=ended)
    del server.objects[PODS.path("team", "gone-w-0-0-abcde")]
    names = ("job/team/slow", "job/team/fast", "job/team/gone", "job/team/none", "job/team/../x")

    def read_report(run_id: str) -> JobReport | None:
        job = compare.parse_job_id(run_id)
        return None if job is None else jobs.read_job(*job, has_rank_logs=False)

    data = compare.compare_reports(read_report, names)

    assert data is not None
    assert [run["page"] for run in data["runs"]] == list(names[:3])
    slow, fast, gone = data["runs"]
    assert ("train.batch", ["–", "64", "–"]) in data["differs"]
    assert [run["curves"]["loss"][0][-1] for run in (slow, fast)] == [100, 200]
    assert gone["curves"] == {} and "logs with them" in gone["unread"]["curves"][0]
    # Only the logs of the leaders were read, once for the records and once for the curves.
    assert {path for _, path, _ in server.requests if path.endswith("/log")} == {
        PODS.path("team", f"{name}-w-0-0-abcde", "log") for name in ("slow", "fast")
    }


def test_missing_job_has_no_page(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    assert jobs.read_job("team", "other") is None


@pytest.mark.parametrize(
    ("part", "places"),
    [
        ("/log", {"time", "curves", "ranks"}),
        ("/pods", {"hosts"}),
        ("/events", {"explanation"}),
    ],
)
def test_missing_right_is_said_at_its_place(
    server: Server, jobs: ClusterJobs, part: str, places: set[str]
) -> None:
    put_job(server)
    forbid(server, part)
    data = read_page(jobs)
    assert set(data["unread"]) == places
    resource = {"/log": "pods/log", "/pods": "pods", "/events": "events"}[part]
    for sentences in data["unread"].values():
        (sentence,) = sentences
        assert sentence.startswith(f"{resource}: you may not ")
        assert sentence.endswith(" in namespace team.")
    assert data["sentence"]["text"].startswith("Job lm ")
    if part == "/log":
        # One refusal is enough: the logs of the other hosts are not asked for.
        tails = [query for query in log_requests(server) if query.get("tailLines") == "400"]
        assert len(tails) == 1 and data["hosts"]
    if part == "/events":
        assert data["curves"]["loss"]


# Reads that change an answer only if a namespace is being deleted. The role of a viewer lacks the
# right to them, and a refusal changes nothing.
OPTIONAL = {("get", "namespaces", "")}


def list_rights(role: str) -> set[tuple[str, str, str]]:
    """Return the verbs, resources and subresources of a Role in the chart's golden manifests."""
    path = Path(__file__).parents[2] / "helm" / "golden" / "everything.yaml"
    manifests = yaml.safe_load_all(path.read_text())
    kinds = [obj for obj in manifests if obj and obj["kind"] == "Role"]
    (rules,) = [obj["rules"] for obj in kinds if obj["metadata"]["name"] == role]
    return {
        (verb, *(name.split("/") + [""])[:2])
        for rule in rules
        for name in rule["resources"]
        for verb in rule["verbs"]
    }


def used_rights(server: Server) -> set[tuple[str, str, str]]:
    """Return the verbs, resources and subresources of the requests that the server got."""
    rights = set[tuple[str, str, str]]()
    for method, path, _ in server.requests:
        *_, resource, name, subresource = (path.partition("/namespaces/")[2] + "/////").split("/")[
            :4
        ]
        if path.startswith("/api") and resource:
            rights.add(("get" if name else "list", resource, subresource))
        elif path.startswith("/api"):
            rights.add(("get", "namespaces", ""))
        assert method == "GET", (method, path)
    return rights


def test_role_of_a_viewer_has_the_rights_of_all_pages(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    put_job(server, "over", status=objects.ended("Completed"), is_over=True)
    path = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/team/jobsets/queued"
    server.put(path, objects.jobset(1, name="queued", queue="research", suspend=True))
    jobs.read_table("team")
    jobs.read_sweep("team", "none")
    for name in ("lm", "over", "queued"):
        read_page(jobs, name)
    needed = used_rights(server) - OPTIONAL
    assert {("get", "pods", "log"), ("list", "events", ""), ("get", "jobsets", "")} <= needed
    assert needed <= list_rights("team-viewer")


def test_page_without_right_to_jobs_is_refused(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    forbid(server, "/jobsets")
    with pytest.raises(ApiError) as error:
        jobs.read_job("team", "lm")
    assert error.value.status == 403


def test_log_that_cannot_be_read_is_named(server: Server, jobs: ClusterJobs) -> None:
    put_job(server)
    fault: Fault = apiserver.refuse_with(404)
    server.on("GET", "/log", *[fault] * 100)
    data = read_page(jobs)
    assert data["unread"]["curves"][0].startswith("The log of pod lm-w-0-0-abcde could not be read")
    assert len(data["unread"]["ranks"]) == 2


def test_large_gang_has_the_logs_of_few_hosts(server: Server, jobs: ClusterJobs) -> None:
    put_job(server, hosts=16)
    data = read_page(jobs)
    assert data["unread"]["ranks"] == [
        "The logs of 8 more hosts are not shown here: launcher logs lm -n team --rank RANK"
    ]
    assert len(data["hosts"]) == 16

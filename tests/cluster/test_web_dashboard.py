"""The chart's dashboard on a real cluster shows viewers what their own token may see.

The table and the pages of jobs and sweeps are read with that token alone.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.launcher.report import viewers
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, start_launcher, write_project
from tests.cluster.harness.api import RefusedError
from tests.cluster.releases import Release, chart_values
from tests.cluster.waiting import has_condition, wait_until
from tests.helm.charts import Helm
from tests.launcher.report.test_page import page_data

pytestmark = pytest.mark.extended

WITHIN = "rbac.authorization.k8s.io/v1"
ODD = (
    "a\r\nX-Remote-User: system:admin",
    "a\0b",
    "t\u00f6ken",
    "\u202e",
    "x" * 1024 * 1024,
    "eyJ" * 5000,
)


# A step every half second, with a loss. Each rank says a line of its own.
TRAINS = """
import json, os, time
def say(**message):
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\\n")
print("this is rank", os.environ["JAX_PROCESS_ID"], flush=True)
say(phase="step", step=0, total=100000)
for step in range(1, 100000):
    time.sleep(0.5)
    say(phase="step", step=step)
    say(metrics={"loss": 10.0 / step}, of=step)
"""


@pytest.fixture
def other_namespace(cluster: Access) -> Iterator[str]:
    """Yield another team's namespace."""
    name = preparations.make_namespace(cluster, "restricted")
    yield name
    preparations.remove_namespace(cluster, name)


@pytest.fixture
def release(
    helm: Helm, cluster: Access, namespace: str, other_namespace: str, image: str
) -> Iterator[Release]:
    """Install the chart with a dashboard of both namespaces and a viewer of the first."""
    release = Release(helm, cluster, namespace)
    values_of_chart = chart_values(
        cluster, image, kueue={"enabled": False}, storage={"checkpoints": {"enabled": False}}
    )
    values_of_chart["rbac"] = {"viewers": [{"kind": "ServiceAccount", "name": "alice"}]}
    values_of_chart["webDashboard"] = {
        "enabled": True,
        "namespaces": [namespace, other_namespace],
        "hosts": ["jobs.example.org"],
        "apiServer": values_of_chart.get("test", {}).get("apiServer"),
    }
    release.install(values_of_chart)
    yield release
    release.uninstall()


def make_token(cluster: Access, namespace: str, name: str) -> str:
    """Return the token of a new ServiceAccount, as `kubectl create token` prints it."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    cluster.api.create(
        accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    )
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(cluster.api.create(f"{accounts}/{name}/token", request)["status"]["token"])


def make_other_viewer(
    cluster: Access, release: Release, namespace: str, folder: Path, left_out: str = ""
) -> str:
    """Return the token of a viewer of a namespace alone, without the right to one resource."""
    role = cluster.api.get(f"/apis/{WITHIN}/namespaces/{release.namespace}/roles/team-viewer")
    rules = [rule for rule in role["rules"] if rule["resources"] != [left_out]]
    folder.mkdir(exist_ok=True)
    config = yaml.safe_load(preparations.make_user(cluster, namespace, rules, folder).read_text())
    return str(config["users"][0]["user"]["token"])


def submit_waiting_job(
    cluster: Access, namespace: str, name: str, image: str, folder: Path
) -> None:
    """Submit a job that no node fits, which costs no container."""
    folder.mkdir()
    write_project(
        folder,
        namespace,
        {},
        name=name,
        image=image,
        command=["true"],
        node_selector={"none": "here"},
    )
    done = run_launcher(cluster, folder, "submit", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def submit_sweep(cluster: Access, namespace: str, image: str, folder: Path) -> None:
    """Submit a sweep of two jobs that no node fits."""
    folder.mkdir()
    keys = {"name": "base", "command": ["true"], "node_selector": {"none": "here"}}
    write_project(folder, namespace, {}, image=image, **keys)
    words = ("sweep", "job.yaml", "restarts.crash=1,2", "--name", "swept", "--cluster")
    done = run_launcher(cluster, folder, *words, "-n", namespace)
    assert done.returncode == 0, done.stdout + done.stderr


def submit_training(cluster: Access, namespace: str, image: str, folder: Path) -> None:
    """Submit a job of two ranks on one host that trains until it is deleted."""
    folder.mkdir()
    keys = {"name": "trains", "command": ["python", "-c", TRAINS], "processes_per_host": 2}
    accelerator = {"type": "cpu", "per_host": 2}
    write_project(folder, namespace, {}, image=image, accelerator=accelerator, **keys)
    done = run_launcher(cluster, folder, "submit", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def start_dashboard_pod(cluster: Access, release: Release) -> str:
    """Make the Deployment's pod, since the tests' cluster has no controller of Deployments."""
    pods = f"/api/v1/namespaces/{release.namespace}/pods"
    if cluster.is_ours:
        path = f"/apis/apps/v1/namespaces/{release.namespace}/deployments/team-web"
        template = cluster.api.get(path)["spec"]["template"]
        metadata = {**template["metadata"], "name": "web"}
        cluster.api.create(
            pods,
            {"apiVersion": "v1", "kind": "Pod", "spec": template["spec"], "metadata": metadata},
        )
    selector = "labelSelector=jaxlaunch.io%2Fweb-dashboard%3Dteam"
    pod_list = wait_until(
        lambda: cluster.api.get(f"{pods}?{selector}"),
        lambda seen: seen["items"] and has_condition("Ready")(seen["items"][0]),
        "the dashboard is ready",
    )
    return str(pod_list["items"][0]["metadata"]["name"])


@contextmanager
def forward_port(cluster: Access, namespace: str) -> Iterator[int]:
    """Yield a local port that leads to the Service, as docs/seeing-runs.md describes."""
    command = [
        cluster.kubectl_path,
        "port-forward",
        "--namespace",
        namespace,
        "service/team-web",
        ":80",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=cluster.env) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line.startswith("Forwarding from 127.0.0.1:"), line
            yield int(line.split()[2].rpartition(":")[2])
        finally:
            child.terminate()


def send_request(
    port: int, path: str = "/", body: Mapping[str, str] | None = None, **headers: str
) -> tuple[int, str, str]:
    """Return status, text and cookie of the answer to a GET, or to the POST of a form.

    The text of a stream is its first line.
    """
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    sent = {"Host": f"localhost:{port}"} | {
        name.replace("_", "-"): value for name, value in headers.items()
    }
    try:
        client.request(
            "GET" if body is None else "POST", path, body and urllib.parse.urlencode(body), sent
        )
        answer = client.getresponse()
        cookie = (answer.headers["Set-Cookie"] or "").partition(";")[0]
        # A stream does not end.
        is_stream = answer.headers["Content-Type"] == "text/event-stream"
        body = answer.readline() if is_stream else answer.read()
        return answer.status, body.decode(), cookie
    finally:
        client.close()


def job_names(shown: tuple[int, str, str]) -> list[str]:
    assert shown[0] == 200, shown
    return [run["name"] for run in page_data(shown[1])["runs"]]


def read_page(port: int, path: str, **headers: str) -> dict[str, Any]:
    """Return the data of a page that is shown."""
    status, text, _ = send_request(port, path, **headers)
    assert status == 200, (path, text[:2000])
    data: dict[str, Any] = page_data(text)
    return data


def assert_pages_follow_rights(
    port: int, namespaces: tuple[str, str], session_cookie: str, carol: str
) -> None:
    """Check the pages of the waiting jobs: alice's in the first namespace, carol's in the other."""
    namespace, elsewhere = namespaces
    ours, theirs = f"/job/{namespace}/ours", f"/job/{elsewhere}/theirs"
    page = read_page(port, ours, Cookie=session_cookie)
    assert page["sentence"]["text"].startswith("Job ours ") and page["sentence"]["state"] != "done"
    assert page["explanation"]["headline"].startswith("ours ") and page["curves"] == {}
    assert page["unread"]["curves"] == ["No pod of this job has a log yet."]
    assert read_page(port, theirs, Authorization=f"Bearer {carol}")["name"] == "theirs"
    for path in (theirs, f"{theirs}/events", f"/sweep/{elsewhere}/swept", "/job/kube-system/x"):
        status, text, _ = send_request(port, path, Cookie=session_cookie)
        assert status == 403 and viewers.NO_PAGE in text and '"theirs"' not in text, path
    assert send_request(port, f"/job/{namespace}/none", Cookie=session_cookie)[0] == 404
    assert send_request(port, ours)[0] == 401


def assert_sweep_is_a_group(port: int, namespace: str, session_cookie: str) -> None:
    """Check the row of the sweep, and its page."""
    table = read_page(port, "/", Cookie=session_cookie)
    (group,) = table["groups"]
    assert (group["name"], group["page"]) == ("swept", f"/sweep/{namespace}/swept")
    changes = {run["name"]: run["changes"] for run in table["runs"] if "group" in run}
    assert changes == {
        "swept-000": {"restarts.crash": "1"},
        "swept-001": {"restarts.crash": "2"},
    }
    page = read_page(port, group["page"], Cookie=session_cookie)
    assert page["keys"] == ["restarts.crash"] and len(page["runs"]) == 2
    assert page["runs"][0]["page"].startswith(f"/job/{namespace}/swept-00")


def assert_running_job_has_curves(
    port: int, namespace: str, session_cookie: str, without_logs: str
) -> None:
    """Check the page of the job that trains, for alice and for a viewer without pods/log."""
    path = f"/job/{namespace}/trains"
    page = wait_until(
        lambda: read_page(port, path, Cookie=session_cookie),
        # Its heartbeats are 15 s apart.
        lambda seen: len(seen["curves"].get("loss", [[]])[0]) >= 3,
        "the page has a curve",
    )
    steps, times, values = page["curves"]["loss"]
    assert steps == sorted(steps) and times == sorted(times) and values[-1] < values[0]
    assert page["sentence"]["state"] == "running" and "loss" in page["sentence"]["text"]
    assert page["steps"] == 100000 and page["heat"]["ranks"] == 2 and page["unread"] == {}
    assert {row["rank"] for row in page["ranks"]} == {0, 1}
    for row in page["ranks"]:
        assert row["tail"][0] == f"this is rank {row['rank']}", row
    (host,) = page["hosts"]
    assert host[1:4] == ["0-1", "yes", "Running"]
    stream = send_request(port, f"{path}/events", Cookie=session_cookie)
    assert stream[:2] == (200, "event: run\n")
    table = read_page(port, "/", Cookie=session_cookie)
    (row,) = [run for run in table["runs"] if run["name"] == "trains"]
    assert row["metric"]["name"] == "loss" and len(row["metric"]["spark"]) >= 3
    assert row["page"] == path and row["step"] > 0 and row["duration_s"] > 0

    page = read_page(port, path, Authorization=f"Bearer {without_logs}")
    missing = f"pods/log: you may not read logs in namespace {namespace}."
    assert page["unread"] == {"time": [missing], "curves": [missing], "ranks": [missing]}
    assert page["curves"] == {} and page["hosts"] and page["ranks"] == []
    assert page["explanation"]["headline"].startswith("trains ")


def assert_administrator_sees_both(
    cluster: Access, namespaces: tuple[str, str], folder: Path
) -> None:
    """Check the local dashboard, which reads with the rights of the kubeconfig."""
    with start_launcher(
        cluster,
        folder,
        "dashboard",
        *(word for namespace in namespaces for word in ("-n", namespace)),
    ) as child:
        try:
            assert child.stdout is not None
            address = urllib.parse.urlsplit(child.stdout.readline().strip())
            assert address.port is not None
            shown = send_request(address.port, address.path, Host=address.netloc)
            assert sorted(job_names(shown)) == ["ours", "theirs"]
        finally:
            child.send_signal(signal.SIGINT)


@pytest.mark.usefixtures("steady_nodes")
def test_dashboard_shows_what_the_viewer_may_see(
    cluster: Access,
    namespace: str,
    other_namespace: str,
    release: Release,
    base_image: str,
    tmp_path: Path,
) -> None:
    submit_waiting_job(cluster, namespace, "ours", base_image, tmp_path / "ours")
    submit_waiting_job(cluster, other_namespace, "theirs", base_image, tmp_path / "theirs")
    alice, bob = (make_token(cluster, namespace, name) for name in ("alice", "bob"))
    carol = make_other_viewer(cluster, release, other_namespace, tmp_path)
    pod = start_dashboard_pod(cluster, release)
    assert_administrator_sees_both(cluster, (namespace, other_namespace), tmp_path)
    with forward_port(cluster, namespace) as port:
        refused = {
            "no token": send_request(port),
            "bob": send_request(port, "/sign-in", {"token": bob}),
            "bob's stream": send_request(port, "/events", Authorization=f"Bearer {bob}"),
            "a wrong one": send_request(port, "/sign-in", {"token": alice[:-9] + "AAAAAAAAA"}),
            "another host": send_request(
                port, Host="evil.example", Authorization=f"Bearer {alice}"
            ),
            "another site": send_request(
                port, Origin="http://evil.example", Authorization=f"Bearer {alice}"
            ),
            **{
                f"odd {at}": send_request(port, "/sign-in", {"token": token})
                for at, token in enumerate(ODD)
            },
        }
        assert [answer[0] for answer in refused.values()] == [
            401,
            403,
            403,
            401,
            403,
            403,
            *[401] * len(ODD),
        ]
        assert "Sign in to see your jobs." in refused["no token"][1]
        assert viewers.NO_RIGHTS in refused["bob"][1]
        assert viewers.NOT_ACCEPTED in refused["a wrong one"][1]
        shown = "".join(text + cookie for _, text, cookie in refused.values())
        assert not [
            word
            for word in (">ours", '"ours"', "theirs", namespace, other_namespace, "eyJ")
            if word in shown
        ]

        status, _, session_cookie = send_request(port, "/sign-in", {"token": alice})
        assert status == 303 and alice not in session_cookie
        page = send_request(port, Cookie=session_cookie, Host="jobs.example.org")
        assert job_names(page) == ["ours"] and other_namespace not in page[1]
        assert page_data(page[1])["runs"][0]["where"] == f"namespace {namespace}"
        raised = {
            "Impersonate_User": "admin",
            "Impersonate_Group": "system:masters",
            "X_Remote_User": "system:admin",
        }
        assert job_names(send_request(port, Cookie=session_cookie, **raised)) == ["ours"]
        with ThreadPoolExecutor(
            4
        ) as pool:  # two viewers at the same time, each over and over again
            requests = [
                ({"Cookie": session_cookie}, "ours"),
                ({"Authorization": f"Bearer {carol}"}, "theirs"),
            ] * 8
            answers = pool.map(
                lambda request: (job_names(send_request(port, **request[0])), request[1]), requests
            )
        assert {(tuple(seen), expected_names) for seen, expected_names in answers} == {
            (("ours",), "ours"),
            (("theirs",), "theirs"),
        }

        namespaces = namespace, other_namespace
        assert_pages_follow_rights(port, namespaces, session_cookie, carol)
        submit_training(cluster, namespace, base_image, tmp_path / "trains")
        submit_sweep(cluster, namespace, base_image, tmp_path / "swept")
        assert_sweep_is_a_group(port, namespace, session_cookie)
        folder = tmp_path / "few"
        few = make_other_viewer(cluster, release, namespace, folder, left_out="pods/log")
        assert_running_job_has_curves(port, namespace, session_cookie, few)
        cluster.api.delete(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets/trains")

        cluster.api.delete(f"/apis/{WITHIN}/namespaces/{namespace}/rolebindings/team-viewer")
        wait_until(
            lambda: send_request(port, Cookie=session_cookie),
            lambda seen: seen[0] == 403 and '"ours"' not in seen[1],
            "her right ends",
        )
    output = cluster.kubectl("logs", pod, "--namespace", namespace)
    assert (
        output
        == f"launcher: serving the jobs of {namespace}, {other_namespace} on port 8080 to viewers "
        "who sign in\n"
    )
    assert_dashboard_has_no_rights(cluster, namespace, pod, tmp_path)


def assert_dashboard_has_no_rights(cluster: Access, namespace: str, pod: str, folder: Path) -> None:
    """Check that the dashboard's pod has no token and its account no right to see a job."""
    token_folder = "/var/run/secrets/kubernetes.io/serviceaccount"
    listing = cluster.kubectl("exec", pod, "--namespace", namespace, "--", "ls", token_folder)
    assert listing.split() == ["ca.crt"]
    spec: dict[str, Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("team-web", False)
    itself = preparations.impersonate(
        cluster, f"system:serviceaccount:{namespace}:team-web", namespace, folder
    )
    with pytest.raises(RefusedError, match="403"):
        itself.api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets")

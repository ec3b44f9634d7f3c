"""The chart's dashboard on a real cluster: each viewer sees by their own token what the API server lets it see."""

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
from tests.cluster.command import launcher, project, started
from tests.cluster.harness.api import Refused
from tests.cluster.releases import Release, values
from tests.cluster.waiting import has, until
from tests.helm.charts import Helm
from tests.launcher.report.test_page import data_of

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


@pytest.fixture
def elsewhere(cluster: Access) -> Iterator[str]:
    """Another team's namespace."""
    name = preparations.make_namespace(cluster, "restricted")
    yield name
    preparations.remove_namespace(cluster, name)


@pytest.fixture
def release(
    helm: Helm, cluster: Access, namespace: str, elsewhere: str, image: str
) -> Iterator[Release]:
    """The chart with its dashboard of both namespaces, whose only viewer is a ServiceAccount of the first."""
    found = Release(helm, cluster, namespace)
    given = values(
        cluster, image, kueue={"enabled": False}, storage={"checkpoints": {"enabled": False}}
    )
    given["rbac"] = {"viewers": [{"kind": "ServiceAccount", "name": "alice"}]}
    given["webDashboard"] = {
        "enabled": True,
        "namespaces": [namespace, elsewhere],
        "hosts": ["jobs.example.org"],
        "apiServer": given.get("test", {}).get("apiServer"),
    }
    found.install(given)
    yield found
    found.uninstall()


def token_of(cluster: Access, namespace: str, name: str) -> str:
    """The token of a new ServiceAccount, as `kubectl create token` prints it."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    cluster.api.create(
        accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}
    )
    request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
    return str(cluster.api.create(f"{accounts}/{name}/token", request)["status"]["token"])


def viewer_elsewhere(cluster: Access, release: Release, elsewhere: str, folder: Path) -> str:
    """The token of somebody with the chart's rights of a viewer in the other namespace alone."""
    role = cluster.api.get(f"/apis/{WITHIN}/namespaces/{release.namespace}/roles/team-viewer")
    config = yaml.safe_load(
        preparations.make_user(cluster, elsewhere, role["rules"], folder).read_text()
    )
    return str(config["users"][0]["user"]["token"])


def waiting_job(cluster: Access, namespace: str, name: str, image: str, folder: Path) -> None:
    """A job that no node is for: it costs no container."""
    folder.mkdir()
    project(
        folder,
        namespace,
        {},
        name=name,
        image=image,
        command=["true"],
        node_selector={"none": "here"},
    )
    done = launcher(cluster, folder, "submit", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr


def its_pod(cluster: Access, release: Release) -> str:
    """The ready pod of the Deployment, made by hand in the tests' cluster, which has no controller of Deployments."""
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
    found = until(
        lambda: cluster.api.get(f"{pods}?{selector}"),
        lambda seen: seen["items"] and has("Ready")(seen["items"][0]),
        "the dashboard is ready",
    )
    return str(found["items"][0]["metadata"]["name"])


@contextmanager
def forwarded(cluster: Access, namespace: str) -> Iterator[int]:
    """A port of this machine that leads to the Service, as docs/seeing-runs.md says."""
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
            told = child.stdout.readline()
            assert told.startswith("Forwarding from 127.0.0.1:"), told
            yield int(told.split()[2].rpartition(":")[2])
        finally:
            child.terminate()


def ask(
    port: int, path: str = "/", body: Mapping[str, str] | None = None, **headers: str
) -> tuple[int, str, str]:
    """Status, text and cookie of the answer to a GET, or to the POST of a form."""
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
        return answer.status, answer.read().decode(), cookie
    finally:
        client.close()


def names(shown: tuple[int, str, str]) -> list[str]:
    assert shown[0] == 200, shown
    return [run["name"] for run in data_of(shown[1])["runs"]]


def administrator_sees_both(cluster: Access, namespaces: tuple[str, str], folder: Path) -> None:
    """The dashboard of one's own machine reads them with the rights of one's own kubeconfig."""
    with started(
        cluster, folder, "dashboard", *(word for each in namespaces for word in ("-n", each))
    ) as child:
        try:
            assert child.stdout is not None
            address = urllib.parse.urlsplit(child.stdout.readline().strip())
            assert address.port is not None
            shown = ask(address.port, address.path, Host=address.netloc)
            assert sorted(names(shown)) == ["ours", "theirs"]
        finally:
            child.send_signal(signal.SIGINT)


@pytest.mark.usefixtures("steady_nodes")
def test_a_viewer_sees_through_the_dashboard_what_their_own_token_may_see_and_nobody_else_anything(
    cluster: Access,
    namespace: str,
    elsewhere: str,
    release: Release,
    base_image: str,
    tmp_path: Path,
) -> None:
    waiting_job(cluster, namespace, "ours", base_image, tmp_path / "ours")
    waiting_job(cluster, elsewhere, "theirs", base_image, tmp_path / "theirs")
    alice, bob = (token_of(cluster, namespace, name) for name in ("alice", "bob"))
    carol = viewer_elsewhere(cluster, release, elsewhere, tmp_path)
    pod = its_pod(cluster, release)
    administrator_sees_both(cluster, (namespace, elsewhere), tmp_path)
    with forwarded(cluster, namespace) as port:
        refused = {
            "no token": ask(port),
            "bob": ask(port, "/sign-in", {"token": bob}),
            "bob's stream": ask(port, "/events", Authorization=f"Bearer {bob}"),
            "a wrong one": ask(port, "/sign-in", {"token": alice[:-9] + "AAAAAAAAA"}),
            "another host": ask(port, Host="evil.example", Authorization=f"Bearer {alice}"),
            "another site": ask(
                port, Origin="http://evil.example", Authorization=f"Bearer {alice}"
            ),
            **{
                f"odd {at}": ask(port, "/sign-in", {"token": token}) for at, token in enumerate(ODD)
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
            for word in (">ours", '"ours"', "theirs", namespace, elsewhere, "eyJ")
            if word in shown
        ]

        status, _, kept = ask(port, "/sign-in", {"token": alice})
        assert status == 303 and alice not in kept
        page = ask(port, Cookie=kept, Host="jobs.example.org")
        assert names(page) == ["ours"] and elsewhere not in page[1]
        assert data_of(page[1])["runs"][0]["where"] == f"namespace {namespace}"
        raised = {
            "Impersonate_User": "admin",
            "Impersonate_Group": "system:masters",
            "X_Remote_User": "system:admin",
        }
        assert names(ask(port, Cookie=kept, **raised)) == ["ours"]
        with ThreadPoolExecutor(
            4
        ) as pool:  # two viewers at the same time, each over and over again
            asked = [
                ({"Cookie": kept}, "ours"),
                ({"Authorization": f"Bearer {carol}"}, "theirs"),
            ] * 8
            answers = pool.map(lambda one: (names(ask(port, **one[0])), one[1]), asked)
        assert {(tuple(seen), own) for seen, own in answers} == {
            (("ours",), "ours"),
            (("theirs",), "theirs"),
        }

        cluster.api.delete(f"/apis/{WITHIN}/namespaces/{namespace}/rolebindings/team-viewer")
        until(
            lambda: ask(port, Cookie=kept),
            lambda seen: seen[0] == 403 and '"ours"' not in seen[1],
            "her right ends",
        )
    said = cluster.kubectl("logs", pod, "--namespace", namespace)
    assert (
        said == f"launcher: serving the jobs of {namespace}, {elsewhere} on port 8080 to viewers "
        "who sign in\n"
    )
    has_nothing_of_its_own(cluster, namespace, pod, tmp_path)


def has_nothing_of_its_own(cluster: Access, namespace: str, pod: str, folder: Path) -> None:
    """Its pod has no token, and its ServiceAccount, whoever had one, no right to see a job."""
    there = "/var/run/secrets/kubernetes.io/serviceaccount"
    found = cluster.kubectl("exec", pod, "--namespace", namespace, "--", "ls", there)
    assert found.split() == ["ca.crt"]
    spec: dict[str, Any] = cluster.api.get(f"/api/v1/namespaces/{namespace}/pods/{pod}")["spec"]
    assert (spec["serviceAccountName"], spec["automountServiceAccountToken"]) == ("team-web", False)
    itself = preparations.impersonating(
        cluster, f"system:serviceaccount:{namespace}:team-web", namespace, folder
    )
    with pytest.raises(Refused, match="403"):
        itself.api.get(f"/apis/jobset.x-k8s.io/v1alpha2/namespaces/{namespace}/jobsets")

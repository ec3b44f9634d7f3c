"""`launcher submit`, `stop` and `delete` on a real cluster."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.errors import ApiError
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.kinds import CONFIGMAPS, JOBSETS, NETWORK_POLICIES, PODS, Kind
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.command import launcher, project
from tests.cluster.gangs import PATIENCE_S, Gang, program, until
from tests.cluster.proxy import Proxy
from tests.found import shows
from tests.launcher import apiserver

CANARY = "canary-51c6e0"
QUICK = ["python", "-c", "print('done here')"]
NOWHERE = {"node_selector": {"no-such-node": "here"}}  # its pods cost nothing


class Here:
    """A folder with a job in a namespace, and the command line there."""

    def __init__(self, access: Access, namespace: str, folder: Path, image: str) -> None:
        self.access, self.namespace, self.folder, self.image = access, namespace, folder, image
        self.cluster = Cluster.connect()

    def write(self, **job: Any) -> None:
        project(self.folder, self.namespace, {}, **({"image": self.image} | job))

    def launcher(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = launcher(self.access, self.folder, *arguments)
        assert "Traceback" not in done.stderr
        return done

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.launcher("submit", "job.yaml", *arguments)

    @property
    def gang(self) -> Gang:
        return Gang(self.cluster, self.namespace, "mine")

    def there(self, kind: Kind) -> list[dict[str, Any]]:
        return [
            one
            for one in self.cluster.list(kind, self.namespace)
            if one["metadata"]["name"] != "kube-root-ca.crt"
        ]


@pytest.fixture
def here(
    cluster: Access,
    namespace: str,
    tmp_path: Path,
    base_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> Here:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    here = Here(cluster, namespace, tmp_path, base_image)
    here.write(command=QUICK)
    return here


# --- submit ---------------------------------------------------------------------------------------


def test_a_job_is_three_writes_of_which_the_jobset_is_the_first(here: Here) -> None:
    here.write(command=QUICK, **NOWHERE)
    with apiserver.serving(Proxy(here.access.api)) as proxy:
        env = here.access.env | {"KUBECONFIG": str(proxy.kubeconfig(here.folder, here.namespace))}
        done = subprocess.run(
            [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "submit", "job.yaml"],
            env=env,
            cwd=here.folder,
            check=True,
        )
        written = [
            (method, path.split("/")[-1])
            for method, path, query in proxy.requests
            if method != "GET" and "dryRun" not in query
        ]
    assert done.returncode == 0
    writes = [one for one in written if one[1] != "selfsubjectaccessreviews"]
    assert writes == [("POST", "jobsets"), ("POST", "networkpolicies"), ("POST", "configmaps")]


def test_the_same_job_three_times_at_once_is_one_jobset(here: Here) -> None:
    here.write(command=QUICK, **NOWHERE)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: here.submit(), range(3)))
    assert sorted(one.stdout.split()[1] for one in done) == ["created", "unchanged", "unchanged"]
    assert owners(here) == {here.gang.jobset["metadata"]["uid"]}
    assert (len(here.there(NETWORK_POLICIES)), len(here.there(CONFIGMAPS))) == (1, 1)


def test_a_finished_job_is_replaced_with_all_it_owns(here: Here) -> None:
    assert here.submit("--wait").returncode == 0
    first = here.gang.jobset["metadata"]["uid"]
    assert here.submit().returncode == 2
    again = here.submit("--replace", "--wait", "--follow")
    assert again.returncode == 0
    assert again.stdout == "jobset.jobset.x-k8s.io/mine replaced\n[0] done here\n"
    second = here.gang.jobset["metadata"]["uid"]
    assert first != second
    until("only the new owner is left", lambda: owners(here) == {second})


def owners(here: Here) -> set[str]:
    owned = [*here.there(NETWORK_POLICIES), *here.there(CONFIGMAPS)]
    return {reference["uid"] for one in owned for reference in one["metadata"]["ownerReferences"]}


def test_the_server_judges_a_dry_run_and_keeps_nothing(here: Here) -> None:
    done = here.submit("--dry-run=server")
    assert done.returncode == 0
    assert "jobset.jobset.x-k8s.io/mine created (server dry run)" in done.stdout
    here.write(command=QUICK, pod={"spec": {"hostNaem": "x"}})
    refused = here.submit("--dry-run=server")
    assert refused.returncode == 3
    assert "hostNaem" in refused.stderr
    assert here.there(JOBSETS) == here.there(CONFIGMAPS) == here.there(NETWORK_POLICIES) == []


def test_the_cluster_defaults_supply_what_the_job_leaves_out(here: Here) -> None:
    defaults = {
        "defaults.yaml": yaml.safe_dump({"image": here.image, "labels": {"of": "the-defaults"}})
    }
    metadata = {"name": "jaxlaunch", "namespace": here.namespace}
    here.cluster.create(
        CONFIGMAPS,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": defaults},
    )
    here.write(command=QUICK, image=None, agent="inject", **NOWHERE)
    done = here.submit()
    assert done.returncode == 0, done.stderr
    assert f"the cluster defaults are in ConfigMap {here.namespace}/jaxlaunch" in done.stderr
    assert here.gang.jobset["metadata"]["labels"]["of"] == "the-defaults"


# --- what is asked before -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("queue=nobody", "LocalQueue nobody does not exist in namespace"),
        (
            "priority=nobody",
            "PriorityClass nobody does not exist: pods that name it are rejected.\n  hint: use ",
        ),
        ("namespace=nowhere", "Namespace nowhere does not exist: nothing can be created in it."),
    ],
)
def test_a_name_that_the_server_would_take_for_granted_is_refused(
    here: Here, key: str, said: str
) -> None:
    preparations.make_queue(here.access, here.namespace, {"cpu": "1"}, name="few")
    refused = here.submit(key)
    assert refused.returncode == 2
    assert said in refused.stderr
    assert here.there(JOBSETS) == []


def as_user(here: Here, rules: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> str:
    """Lets the command line act as a user with these rights; gives the token."""
    file = preparations.make_user(here.access, here.namespace, rules, here.folder)
    here.access = Access(file, here.access.kubectl_path, here.access.is_ours)
    monkeypatch.setenv("KUBECONFIG", str(file))
    here.cluster = Cluster.connect()
    token: str = json.loads(file.read_text())["users"][0]["user"]["token"]
    return token


def test_rights_that_are_missing_are_named_all_at_once(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = {
        "apiGroups": ["jobset.x-k8s.io"],
        "resources": ["jobsets"],
        "verbs": ["get", "list"],
    }
    token = as_user(here, [may_read], monkeypatch)
    refused = here.submit()
    assert refused.returncode == 3
    missing = (
        "create jobsets.jobset.x-k8s.io, create networkpolicies.networking.k8s.io, get "
        "networkpolicies."
    )
    assert f"Missing RBAC permissions in namespace {here.namespace}: {missing}" in refused.stderr
    assert token not in refused.stdout + refused.stderr
    assert here.there(JOBSETS) == []
    with pytest.raises(ApiError) as forbidden:  # what the server itself says of it
        here.cluster.create(JOBSETS, {"metadata": {"name": "mine", "namespace": here.namespace}})
    shows('cannot create resource "jobsets"', forbidden.value.message)


def test_a_cluster_without_jobset_is_told_by_kubectl(here: Here) -> None:
    manifests = here.submit("--dry-run").stdout
    groups = [one for one in here.access.api.get("/apis")["groups"] if one["name"] != JOBSETS.group]

    def without_jobset(handler: apiserver.Handler) -> bool:
        if handler.at == "/apis":
            handler.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        return handler.at == "/apis"

    with apiserver.serving(Proxy(here.access.api)) as proxy:
        # One for each group that kubectl asks for, and more.
        proxy.on("GET", "/apis", *[without_jobset] * 200)
        env = here.access.env | {"KUBECONFIG": str(proxy.kubeconfig(here.folder, here.namespace))}
        options = ("--dry-run=server", "--validate=false", f"--cache-dir={here.folder}")
        command = [f"{here.access.kubectl_path}", "apply", *options, "-f", "-"]
        done = subprocess.run(command, input=manifests, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ensure CRDs are installed first" in done.stderr, done.stderr
    shows('no matches for kind "JobSet"', done.stderr)


def test_the_rights_that_are_asked_for_are_enough(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.write(command=QUICK)
    rendered = list(yaml.safe_load_all(here.submit("--dry-run").stdout))
    needed = checks.submit_rights(rendered, replace=True, watch=True)
    rules = [
        {
            "apiGroups": [one.kind.group],
            "resources": [one.kind.plural + (f"/{one.subresource}" if one.subresource else "")],
            "verbs": [one.verb],
        }
        for one in needed
    ]
    as_user(here, rules, monkeypatch)
    for arguments in ((), ("--replace",)):
        done = here.submit("--wait", "--follow", *arguments)
        assert done.returncode == 0, done.stderr
        assert "[0] done here\n" in done.stdout


def break_ca(config: dict[str, Any]) -> None:
    del config["clusters"][0]["cluster"]["certificate-authority-data"]


def break_token(config: dict[str, Any]) -> None:
    config["users"][0]["user"] = {"token": CANARY}


def break_port(config: dict[str, Any]) -> None:
    server = urlsplit(config["clusters"][0]["cluster"]["server"])
    config["clusters"][0]["cluster"]["server"] = f"https://{server.hostname}:1"


def break_user(config: dict[str, Any]) -> None:
    config["users"][0]["user"]["as"] = "nobody-in-particular"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (break_ca, "is not trusted: unable to get local issuer certificate"),
        (break_token, "does not accept the credentials of context"),
        (break_port, "cannot be reached: Connection refused"),
        (break_user, "Missing RBAC permissions in namespace"),
    ],
)
def test_a_wrong_way_to_the_server_is_named(
    here: Here, fault: Callable[[dict[str, Any]], None], said: str
) -> None:
    config = yaml.safe_load(here.access.kubeconfig.read_text())
    fault(config)
    file = here.folder / "broken.conf"
    file.write_text(json.dumps(config))
    here.access = Access(file, here.access.kubectl_path, here.access.is_ours)
    refused = here.submit()
    assert (refused.returncode, refused.stdout) == (3, "")
    assert said in refused.stderr
    assert CANARY not in refused.stderr
    if fault is break_ca:
        shows("The API server … is not trusted", refused.stderr)
    if fault is break_token:
        shows("does not accept the credentials of context", refused.stderr)
    if fault is break_port:
        shows("The API server … cannot be reached", refused.stderr)


# --- stop, delete ---------------------------------------------------------------------------------


def test_a_job_that_is_stopped_saves_and_goes_on_from_there(here: Here, checkpoints: Path) -> None:
    volumes = [{"claim": "checkpoints", "path": "/ckpt"}]
    here.write(command=program("counts.py", "/ckpt"), volumes=volumes, hosts=2)
    here.submit()
    here.gang.runs()
    here.gang.says("begins at step 0")
    stopped = here.launcher("stop", "mine", "-n", here.namespace)
    assert (stopped.returncode, stopped.stdout) == (0, "jobset.jobset.x-k8s.io/mine stopped\n")
    assert "saved" in stopped.stderr
    until("its pods are removed", lambda: not here.there(PODS))
    saved = int((checkpoints / "count-0").read_text())
    again = here.submit("--wait", "--follow")
    assert again.returncode == 0
    assert again.stdout.splitlines()[0] == "jobset.jobset.x-k8s.io/mine resumed"
    assert f"[0] begins at step {saved}\n" in again.stdout
    # Whether the Job was seen to end by its pods' 80, or was gone by then, is luck.
    assert here.gang.counters[1] == 0


def test_ctrl_c_ends_the_waiting_and_not_the_job(here: Here) -> None:
    here.write(command=QUICK, **NOWHERE)
    waiting = subprocess.Popen(
        [
            sys.executable,
            "-m",
            "jaxlaunch.launcher.cli.main",
            "submit",
            "job.yaml",
            "--wait",
            "--follow",
        ],
        cwd=here.folder,
        env=here.access.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "jobset.jobset.x-k8s.io/mine created\n"
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 130
    assert (
        f"mine keeps running. `launcher logs -n {here.namespace} -f mine` shows its lines again"
        in err
    )
    assert "Traceback" not in err
    assert here.gang.status.get("terminalState") is None


def test_a_deleted_job_leaves_nothing(here: Here) -> None:
    here.write(command=["python", "-c", "import time; time.sleep(600)"])
    here.submit()
    here.gang.runs()
    refused = here.launcher("delete", "mine", "-n", here.namespace)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    (bundle,) = here.there(CONFIGMAPS)
    deleted = here.launcher("delete", "mine", "-n", here.namespace, "--yes")
    assert deleted.returncode == 0
    assert deleted.stdout.splitlines() == [
        "jobset.jobset.x-k8s.io/mine deleted",
        "networkpolicy.networking.k8s.io/mine deleted",
        f"configmap/{bundle['metadata']['name']} deleted",
    ]
    assert here.there(JOBSETS) == here.there(PODS) == []
    until(
        "what it owned is collected",
        lambda: not [*here.there(NETWORK_POLICIES), *here.there(CONFIGMAPS)],
    )


# --- secrets --------------------------------------------------------------------------------------

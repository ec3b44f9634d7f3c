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
from tests.cluster.command import run_launcher, write_project
from tests.cluster.gangs import PATIENCE_S, Gang, program_command, wait_for
from tests.cluster.proxy import Proxy
from tests.found import shows
from tests.launcher import apiserver

CANARY = "canary-51c6e0"
QUICK = ["python", "-c", "print('done here')"]
NOWHERE = {"node_selector": {"no-such-node": "here"}}  # its pods cost nothing


class JobFolder:
    """A folder with a job in a namespace, and the command line there."""

    def __init__(self, access: Access, namespace: str, folder: Path, image: str) -> None:
        self.access, self.namespace, self.folder, self.image = access, namespace, folder, image
        self.cluster = Cluster.connect()

    def write(self, **job: Any) -> None:
        write_project(self.folder, self.namespace, {}, **({"image": self.image} | job))

    def launcher(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = run_launcher(self.access, self.folder, *arguments)
        assert "Traceback" not in done.stderr
        return done

    def submit(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.launcher("submit", "job.yaml", *arguments)

    @property
    def gang(self) -> Gang:
        return Gang(self.cluster, self.namespace, "mine")

    def list_objects(self, kind: Kind) -> list[dict[str, Any]]:
        return [
            item
            for item in self.cluster.list(kind, self.namespace)
            if item["metadata"]["name"] != "kube-root-ca.crt"
        ]


@pytest.fixture
def job_folder(
    cluster: Access,
    namespace: str,
    tmp_path: Path,
    base_image: str,
    monkeypatch: pytest.MonkeyPatch,
) -> JobFolder:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    job_folder = JobFolder(cluster, namespace, tmp_path, base_image)
    job_folder.write(command=QUICK)
    return job_folder


# --- submit ---------------------------------------------------------------------------------------


def test_job_is_three_writes_and_the_jobset_is_the_first(job_folder: JobFolder) -> None:
    job_folder.write(command=QUICK, **NOWHERE)
    with apiserver.serve_in_thread(Proxy(job_folder.access.api)) as proxy:
        env = job_folder.access.env | {
            "KUBECONFIG": str(proxy.kubeconfig(job_folder.folder, job_folder.namespace))
        }
        done = subprocess.run(
            [sys.executable, "-m", "jaxlaunch.launcher.cli.main", "submit", "job.yaml"],
            env=env,
            cwd=job_folder.folder,
            check=True,
        )
        written = [
            (method, path.split("/")[-1])
            for method, path, query in proxy.requests
            if method != "GET" and "dryRun" not in query
        ]
    assert done.returncode == 0
    writes = [request for request in written if request[1] != "selfsubjectaccessreviews"]
    assert writes == [("POST", "jobsets"), ("POST", "networkpolicies"), ("POST", "configmaps")]


def test_concurrent_submissions_make_one_jobset(job_folder: JobFolder) -> None:
    job_folder.write(command=QUICK, **NOWHERE)
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: job_folder.submit(), range(3)))
    assert sorted(result.stdout.split()[1] for result in done) == [
        "created",
        "unchanged",
        "unchanged",
    ]
    assert owner_uids(job_folder) == {job_folder.gang.jobset["metadata"]["uid"]}
    assert (
        len(job_folder.list_objects(NETWORK_POLICIES)),
        len(job_folder.list_objects(CONFIGMAPS)),
    ) == (1, 1)


def test_finished_job_is_replaced_with_its_objects(job_folder: JobFolder) -> None:
    assert job_folder.submit("--wait").returncode == 0
    first = job_folder.gang.jobset["metadata"]["uid"]
    assert job_folder.submit().returncode == 2
    replaced = job_folder.submit("--replace", "--wait", "--follow")
    assert replaced.returncode == 0
    assert replaced.stdout == "jobset.jobset.x-k8s.io/mine replaced\n[0] done here\n"
    second = job_folder.gang.jobset["metadata"]["uid"]
    assert first != second
    wait_for("only the new owner is left", lambda: owner_uids(job_folder) == {second})


def owner_uids(job_folder: JobFolder) -> set[str]:
    owned = [*job_folder.list_objects(NETWORK_POLICIES), *job_folder.list_objects(CONFIGMAPS)]
    return {reference["uid"] for item in owned for reference in item["metadata"]["ownerReferences"]}


def test_dry_run_is_checked_by_the_server_and_stores_nothing(job_folder: JobFolder) -> None:
    done = job_folder.submit("--dry-run=server")
    assert done.returncode == 0
    assert "jobset.jobset.x-k8s.io/mine created (server dry run)" in done.stdout
    job_folder.write(command=QUICK, pod={"spec": {"hostNaem": "x"}})
    refused = job_folder.submit("--dry-run=server")
    assert refused.returncode == 3
    assert "hostNaem" in refused.stderr
    assert (
        job_folder.list_objects(JOBSETS)
        == job_folder.list_objects(CONFIGMAPS)
        == job_folder.list_objects(NETWORK_POLICIES)
        == []
    )


def test_cluster_defaults_complete_the_job(job_folder: JobFolder) -> None:
    defaults = {
        "defaults.yaml": yaml.safe_dump(
            {"image": job_folder.image, "labels": {"of": "the-defaults"}}
        )
    }
    metadata = {"name": "jaxlaunch", "namespace": job_folder.namespace}
    job_folder.cluster.create(
        CONFIGMAPS,
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": defaults},
    )
    job_folder.write(command=QUICK, image=None, agent="inject", **NOWHERE)
    done = job_folder.submit()
    assert done.returncode == 0, done.stderr
    assert f"the cluster defaults are in ConfigMap {job_folder.namespace}/jaxlaunch" in done.stderr
    assert job_folder.gang.jobset["metadata"]["labels"]["of"] == "the-defaults"


# --- what is asked before -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("queue=nobody", "LocalQueue nobody does not exist in namespace"),
        (
            "priority=nobody",
            "PriorityClass nobody does not exist: pods that name it are rejected.\n  hint: leave ",
        ),
        ("namespace=nowhere", "Namespace nowhere does not exist: nothing can be created in it."),
    ],
)
def test_missing_objects_are_refused_before_submission(
    job_folder: JobFolder, key: str, message: str
) -> None:
    preparations.make_queue(job_folder.access, job_folder.namespace, {"cpu": "1"}, name="few")
    refused = job_folder.submit(key)
    assert refused.returncode == 2
    assert message in refused.stderr
    assert job_folder.list_objects(JOBSETS) == []


def act_as_user(
    job_folder: JobFolder, rules: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> str:
    """Let the command line act as a user with these rights; return the token."""
    file = preparations.make_user(job_folder.access, job_folder.namespace, rules, job_folder.folder)
    job_folder.access = Access(file, job_folder.access.kubectl_path, job_folder.access.is_ours)
    monkeypatch.setenv("KUBECONFIG", str(file))
    job_folder.cluster = Cluster.connect()
    token: str = json.loads(file.read_text())["users"][0]["user"]["token"]
    return token


def test_all_missing_rights_are_named(
    job_folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_read = {
        "apiGroups": ["jobset.x-k8s.io"],
        "resources": ["jobsets"],
        "verbs": ["get", "list"],
    }
    token = act_as_user(job_folder, [may_read], monkeypatch)
    refused = job_folder.submit()
    assert refused.returncode == 3
    missing = (
        "create jobsets.jobset.x-k8s.io, create networkpolicies.networking.k8s.io, get "
        "networkpolicies."
    )
    assert (
        f"Missing RBAC permissions in namespace {job_folder.namespace}: {missing}" in refused.stderr
    )
    assert token not in refused.stdout + refused.stderr
    assert job_folder.list_objects(JOBSETS) == []
    with pytest.raises(ApiError) as forbidden:  # what the server itself says of it
        job_folder.cluster.create(
            JOBSETS, {"metadata": {"name": "mine", "namespace": job_folder.namespace}}
        )
    shows('cannot create resource "jobsets"', forbidden.value.message)


def test_cluster_without_jobset_is_reported(job_folder: JobFolder) -> None:
    manifests = job_folder.submit("--dry-run").stdout
    groups = [
        group
        for group in job_folder.access.api.get("/apis")["groups"]
        if group["name"] != JOBSETS.group
    ]

    def without_jobset(handler: apiserver.Handler) -> bool:
        if handler.at == "/apis":
            handler.answer(200, {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        return handler.at == "/apis"

    with apiserver.serve_in_thread(Proxy(job_folder.access.api)) as proxy:
        # One for each group that kubectl asks for, and more.
        proxy.on("GET", "/apis", *[without_jobset] * 200)
        env = job_folder.access.env | {
            "KUBECONFIG": str(proxy.kubeconfig(job_folder.folder, job_folder.namespace))
        }
        options = ("--dry-run=server", "--validate=false", f"--cache-dir={job_folder.folder}")
        command = [f"{job_folder.access.kubectl_path}", "apply", *options, "-f", "-"]
        done = subprocess.run(command, input=manifests, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "ensure CRDs are installed first" in done.stderr, done.stderr
    shows('no matches for kind "JobSet"', done.stderr)


def test_required_rights_are_sufficient(
    job_folder: JobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_folder.write(command=QUICK)
    rendered = list(yaml.safe_load_all(job_folder.submit("--dry-run").stdout))
    needed = checks.submit_rights(rendered, replace=True, watch=True)
    rules = [
        {
            "apiGroups": [right.kind.group],
            "resources": [
                right.kind.plural + (f"/{right.subresource}" if right.subresource else "")
            ],
            "verbs": [right.verb],
        }
        for right in needed
    ]
    act_as_user(job_folder, rules, monkeypatch)
    for arguments in ((), ("--replace",)):
        done = job_folder.submit("--wait", "--follow", *arguments)
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
    ("fault", "message"),
    [
        (break_ca, "is not trusted: unable to get local issuer certificate"),
        (break_token, "does not accept the credentials of context"),
        (break_port, "cannot be reached: Connection refused"),
        (break_user, "Missing RBAC permissions in namespace"),
    ],
)
def test_wrong_kubeconfig_is_explained(
    job_folder: JobFolder, fault: Callable[[dict[str, Any]], None], message: str
) -> None:
    config = yaml.safe_load(job_folder.access.kubeconfig.read_text())
    fault(config)
    file = job_folder.folder / "broken.conf"
    file.write_text(json.dumps(config))
    job_folder.access = Access(file, job_folder.access.kubectl_path, job_folder.access.is_ours)
    refused = job_folder.submit()
    assert (refused.returncode, refused.stdout) == (3, "")
    assert message in refused.stderr
    assert CANARY not in refused.stderr
    if fault is break_ca:
        shows("The API server … is not trusted", refused.stderr)
    if fault is break_token:
        shows("does not accept the credentials of context", refused.stderr)
    if fault is break_port:
        shows("The API server … cannot be reached", refused.stderr)


# --- stop, delete ---------------------------------------------------------------------------------


def test_stopped_job_saves_and_resumes(job_folder: JobFolder, checkpoints: Path) -> None:
    volumes = [{"claim": "checkpoints", "path": "/ckpt"}]
    job_folder.write(command=program_command("counts.py", "/ckpt"), volumes=volumes, hosts=2)
    job_folder.submit()
    job_folder.gang.wait_until_running()
    job_folder.gang.wait_for_line("begins at step 0")
    stopped = job_folder.launcher("stop", "mine", "-n", job_folder.namespace)
    assert (stopped.returncode, stopped.stdout) == (0, "jobset.jobset.x-k8s.io/mine stopped\n")
    assert "saved" in stopped.stderr
    wait_for("its pods are removed", lambda: not job_folder.list_objects(PODS))
    saved = int((checkpoints / "count-0").read_text())
    resumed = job_folder.submit("--wait", "--follow")
    assert resumed.returncode == 0
    assert resumed.stdout.splitlines()[0] == "jobset.jobset.x-k8s.io/mine resumed"
    assert f"[0] begins at step {saved}\n" in resumed.stdout
    # Whether the Job was seen to end by its pods' 80, or was gone by then, is luck.
    assert job_folder.gang.counters[1] == 0


def test_ctrl_c_ends_the_wait_but_not_the_job(job_folder: JobFolder) -> None:
    job_folder.write(command=QUICK, **NOWHERE)
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
        cwd=job_folder.folder,
        env=job_folder.access.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == "jobset.jobset.x-k8s.io/mine created\n"
    waiting.send_signal(signal.SIGINT)
    _, err = waiting.communicate(timeout=PATIENCE_S)
    assert waiting.returncode == 130
    command = f"launcher logs -n {job_folder.namespace} -f mine"
    assert f"mine keeps running. `{command}` shows its lines again" in err
    assert "Traceback" not in err
    assert job_folder.gang.status.get("terminalState") is None


def test_deleted_job_leaves_nothing(job_folder: JobFolder) -> None:
    job_folder.write(command=["python", "-c", "import time; time.sleep(600)"])
    job_folder.submit()
    job_folder.gang.wait_until_running()
    refused = job_folder.launcher("delete", "mine", "-n", job_folder.namespace)
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    (bundle,) = job_folder.list_objects(CONFIGMAPS)
    deleted = job_folder.launcher("delete", "mine", "-n", job_folder.namespace, "--yes")
    assert deleted.returncode == 0
    assert deleted.stdout.splitlines() == [
        "jobset.jobset.x-k8s.io/mine deleted",
        "networkpolicy.networking.k8s.io/mine deleted",
        f"configmap/{bundle['metadata']['name']} deleted",
    ]
    assert job_folder.list_objects(JOBSETS) == job_folder.list_objects(PODS) == []
    wait_for(
        "what it owned is collected",
        lambda: (
            not [*job_folder.list_objects(NETWORK_POLICIES), *job_folder.list_objects(CONFIGMAPS)]
        ),
    )


# --- secrets --------------------------------------------------------------------------------------

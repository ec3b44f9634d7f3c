"""The environment of a rank in a pod and under `launcher run`, which one function makes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.job.defaults import Defaults
from tests.cluster.access import Access
from tests.cluster.command import run_launcher, write_project
from tests.cluster.gangs import Object, Workspace, make_workspace, wait_for
from tests.gang.runs import LAUNCHER

# No packet to this address is answered, like those to a proxy that admits only some clients.
PROXY = "http://192.0.2.99:3128"
EXCEPTIONS = "localhost,127.0.0.1,.svc,.cluster.local,10.0.0.0/8"
PROXIES = {name: PROXY for name in ("HTTPS_PROXY", "HTTP_PROXY", "https_proxy", "http_proxy")}
JOINS = """
import jax
jax.distributed.initialize()
from jax.experimental import multihost_utils
multihost_utils.sync_global_devices("joined")
print("rank", jax.process_index(), "of", jax.process_count(), flush=True)
"""
PROGRAM = (
    "import json, os\nimport mypkg, extra\n"
    "print('ENVIRON', json.dumps(dict(os.environ)), flush=True)\n" + JOINS
)
FILES = {
    "project/train.py": PROGRAM,
    "project/src/mypkg.py": "",
    "project/lib/more/extra.py": "",
    # A module of the shell or of the image is not one of the job.
    "project/src/hidden.py": "",
}
JOB = {
    "hosts": 2,
    "code": "project",
    "env": {"PYTHONPATH": "src:/code/lib/more", "NO_PROXY": EXCEPTIONS, **PROXIES},
    "timeouts": {"rendezvous": "2m", "init": "2m"},
    "restarts": {"crash": 0, "in_place": 0},
}

# The differences between both places. All other variables are equal.
# A pod has these alone: of Kubernetes, and of the JobSet.
ONLY_IN_A_POD = {
    *("JAXLAUNCH_CODE", "JAXLAUNCH_GANG_SECRET", "JAXLAUNCH_NODE", "JAXLAUNCH_POD_IP"),
    *("JAX_MTLS_CERT_FILE", "JAX_MTLS_KEY_FILE", "JAX_MTLS_CA_FILE", "JAX_MTLS_PEER_URI_PREFIX"),
    # Of the image, and the defaults for a numeric user.
    *("HOSTNAME", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "USER"),
}
OF_KUBERNETES = re.compile(r"KUBERNETES_\w+")
# `launcher run` sets these alone: what it is to its agents, and the run folder, which this job has
# in no pod.
ONLY_HERE = {
    *("JAXLAUNCH_OUTPUT_PATIENCE", "JAXLAUNCH_PARENT", "JAXLAUNCH_RUN_DIR", "JAXLAUNCH_STARTED"),
    "JAXLAUNCH_TAKE_OVER",
    # Python sets it in the launcher, where the shell has no locale.
    "LC_CTYPE",
}
# These have other values: addresses, identities, and paths of this machine.
OTHER_VALUES = {
    *("JAXLAUNCH_LEADER", "JAXLAUNCH_UID", "JAXLAUNCH_POD_UID", "JAXLAUNCH_JOB"),
    *("JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS", "JAXLAUNCH_REPORTER"),
    *("JAXLAUNCH_METRICS", "JAXLAUNCH_STACKS", "JAXLAUNCH_PROFILE", "JAXLAUNCH_PROGRESS_FD"),
    *("JAXLAUNCH_PROGRESS", "JAXLAUNCH_FIRST_PYTHON"),
    *("PATH", "HOME", "PWD", "SHLVL", "_"),
}


def read_environ(output: str, rank: int = 0) -> dict[str, str]:
    """Return the variables that the program of a rank has printed."""
    match = re.search(rf"^\[{rank}\] ENVIRON (.*)$", output, re.MULTILINE)
    assert match is not None, output
    environ: dict[str, str] = json.loads(match[1])
    return environ


def without_places(environ: Mapping[str, str], code: Path) -> dict[str, str]:
    """Return the variables with the folders of both places, and the names of the gang, replaced."""
    texts = {
        name: re.sub(r"[^:]*/site(?=:)", "SITE", value.replace(str(code), "/code"))
        for name, value in environ.items()
    }
    hosts = set(contract.gang_hosts(environ))
    for name in ("no_proxy", "NO_PROXY", "no_grpc_proxy"):
        entries = texts[name].split(",")
        assert hosts <= set(entries), (name, hosts)
        is_own = [entry in hosts or entry.endswith(".svc.cluster.local") for entry in entries]
        kept = [entry for entry, own in zip(entries, is_own, strict=True) if not own]
        texts[name] = ",".join(kept)
    return texts


def test_rank_has_the_same_environment_in_a_pod_and_here(
    cluster: Access, namespace: str, bare_image: str, tmp_path: Path
) -> None:
    """Check a src layout, proxies that would keep the processes from joining, and all the rest."""
    folder = write_project(tmp_path, namespace, FILES, image=bare_image, **JOB)
    submitted = run_launcher(cluster, folder, "submit", "job.yaml", "--wait", "--follow")
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    assert "[0] rank 0 of 2" in submitted.stdout and "[1] rank 1 of 2" in submitted.stdout
    pod = read_environ(submitted.stdout)
    status = run_launcher(cluster, folder, "status", "mine", "-n", namespace, "-o", "json")
    assert json.loads(status.stdout)["restarts"]["total"] == 0, status.stdout

    shell = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": "/nowhere"}
    ran = subprocess.run(
        [*LAUNCHER, "run", "job.yaml"], cwd=folder, env=shell, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    here = read_environ(ran.stdout)

    pod, here = without_places(pod, Path("/code")), without_places(here, folder / "project")
    only_in_a_pod = {name for name in pod.keys() - here.keys() if not OF_KUBERNETES.match(name)}
    assert only_in_a_pod <= ONLY_IN_A_POD
    assert here.keys() - pod.keys() <= ONLY_HERE
    common = {name for name in pod.keys() & here.keys() if pod[name] != here[name]}
    assert common <= OTHER_VALUES, {name: (pod[name], here[name]) for name in common}
    assert pod["PYTHONPATH"] == here["PYTHONPATH"] == "SITE:/code:src:/code/lib/more"
    shutil.rmtree(folder / "runs")


@pytest.fixture(scope="module")
def workspace(cluster: Access, bare_image: str) -> Iterator[Workspace]:
    with make_workspace(cluster, bare_image) as workspace:
        yield workspace


def test_gang_runs_in_pods_whose_address_cannot_be_bound(workspace: Workspace) -> None:
    def change_address(jobset: Object) -> None:
        (job,) = jobset["spec"]["replicatedJobs"]
        container = job["template"]["spec"]["template"]["spec"]["containers"][0]
        for variable in container["env"]:
            if variable["name"] == contract.POD_IP:
                del variable["valueFrom"]
                variable["value"] = "192.0.2.7"

    gang = workspace.start(
        "unbound",
        Defaults(),
        change_address,
        hosts=2,
        command=["python", "-c", JOINS],
        restarts={"in_place": 0, "crash": 1},
        resources={"cpu": "50m", "memory": "400Mi"},
    )
    assert (gang.wait_for_end(), gang.counters) == ("Completed", (0, 0))
    texts = [line.text for line in gang.read_lines()]
    assert any(
        "the pod's address, 192.0.2.7, is not one of its interfaces" in text for text in texts
    )


def test_explain_names_ranks_that_wait_in_initialize_and_the_proxies(workspace: Workspace) -> None:
    late = "import os, time\nif os.environ['JAX_PROCESS_ID'] == '0': time.sleep(3600)\n" + JOINS
    workspace.start(
        "late",
        Defaults(),
        hosts=2,
        command=["python", "-c", late],
        env={"HTTPS_PROXY": PROXY},
        resources={"cpu": "50m", "memory": "400Mi"},
    )
    waits = "late runs: rank 1 waits in jax.distributed.initialize for rank 0"
    headline = f"{waits}; HTTPS_PROXY names a proxy"
    wait_for("the answer", lambda: headline in workspace.launcher("explain", "late").stdout)

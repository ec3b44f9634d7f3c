"""Rendering: whole manifests against golden files, and what no manifest may ever lack or hold.

After a change that is meant: GOLDEN=write pytest tests/launcher/manifests/test_jobset.py, and read
the diff.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.accelerators import ACCELERATORS
from jaxlaunch.contract import Action
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.kubernetes import labels
from jaxlaunch.launcher.manifests import code, network
from jaxlaunch.launcher.manifests.code import Bundle
from jaxlaunch.launcher.manifests.jobset import prepare, render, resolve
from jaxlaunch.launcher.platforms import table
from jaxlaunch.launcher.yaml import writer
from tests.golden import compare, compare_difference, difference, patched
from tests.launcher import matrix

ROOT = Path(__file__).parents[3]
GOLDEN = Path(__file__).parent / "golden"
CASES = Path(__file__).parent / "cases"
EXAMPLES = ROOT / "k8s" / "examples"
DEFAULTS = ".defaults.yaml"


def jobs_in(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.yaml")) if not path.name.endswith(DEFAULTS)]


FILES = [*jobs_in(CASES), *jobs_in(EXAMPLES)]
COMBINATIONS = list(matrix.combinations())
SMALL = (
    "name: x\nimage: registry.example/train:1\naccelerator: {type: cpu}\ncommand: [python, "
    "train.py]\n"
)
# What any of these grants is beyond the restricted Pod Security Standard.
PRIVILEGED = {
    "cpu-hostnetwork",
    "h100-tcpxo-gke",
    "h200-gib-gke",
    "b200-gib-gke",
    "h200-rdma-dra-gke",
    "gb200-nvlink-gke",
    "gb300-rdma-dra-gke",
} | {"v5e-root", "v5e-privileged", "h100-rdma-root"}


def manifests(path: Path) -> list[dict[str, Any]]:
    beside = path.with_name(path.stem + DEFAULTS)
    spec = load.load_job(path)
    return render(
        resolve(spec, defaults.load_defaults(beside if beside.exists() else None)), brought(spec)
    )


def brought(spec: load.JobSpec) -> Bundle | None:
    """What a job brings where it asks for it, with contents that no change of ours changes."""
    agent = b"agent" if spec.agent == "inject" else None
    code = b"code" if spec.code is not None else None
    return None if agent is None and code is None else Bundle(agent, code)


def rendered(text: str, cluster: ClusterDefaults | None = None) -> dict[str, Any]:
    """The JobSet of a job in a text."""
    return prepare(load.read_job_text(text), cluster or ClusterDefaults()).manifests[0]


def rendered_with(spec: load.JobSpec, archive: Bundle) -> dict[str, Any]:
    return render(resolve(spec, ClusterDefaults()), archive)[0]


def spec_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """The spec of its one replicated job's Job."""
    (one,) = manifest["spec"]["replicatedJobs"]
    assert isinstance(found := one["template"]["spec"], dict)
    return found


def pod_of(manifest: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(found := spec_of(manifest)["template"]["spec"], dict)
    return found


def env_of(manifest: dict[str, Any]) -> dict[str, Any]:
    """Variables of the main container, as the kubelet expands them; what comes from elsewhere as it is written."""
    main = pod_of(manifest)["containers"][0]
    return {
        one["name"]: one.get("value", "").replace("$$", "$") or one["valueFrom"]
        for one in main["env"]
    }


WHOLES = {GOLDEN / f"{one.name}.yaml": one.manifests() for one in matrix.PLAIN}


@pytest.mark.parametrize("golden", WHOLES, ids=lambda path: path.stem)
def test_the_plainest_job_renders_to_its_golden_manifests(golden: Path) -> None:
    compare(WHOLES[golden], golden)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_job_differs_from_the_plainest_as_its_golden_file_says(path: Path) -> None:
    compare_difference(manifests(path), GOLDEN / path.parent.name / f"{path.stem}.diff", WHOLES)


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda one: one.name)
def test_a_combination_differs_from_the_plainest_as_its_golden_file_says(
    combination: matrix.Combination,
) -> None:
    compare_difference(
        combination.manifests(), GOLDEN / "matrix" / f"{combination.name}.diff", WHOLES
    )


def test_every_accelerator_and_every_option_is_combined_and_they_are_many() -> None:
    pairs = {
        (kind, where)
        for where, known in table.NODES.items()
        for kind in known
        if not matrix.is_plain(kind, where)
    }
    assert {(one.kind, one.where) for one in COMBINATIONS} == pairs
    assert {one.option for one in COMBINATIONS} == set(matrix.OPTIONS)
    assert len(COMBINATIONS) + len(FILES) >= 60


def test_every_golden_file_has_its_job() -> None:
    differences = [f"{path.parent.name}/{path.stem}" for path in FILES] + [
        f"matrix/{one.name}" for one in COMBINATIONS
    ]
    names = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.*")}
    assert names == {path.name for path in WHOLES} | {f"{name}.diff" for name in differences}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rendering_twice_gives_the_same_and_changes_nothing(path: Path) -> None:
    spec, cluster = load.load_job(path), ClusterDefaults()
    if (beside := path.with_name(path.stem + DEFAULTS)).exists():
        cluster = defaults.load_defaults(beside)
    before = spec.model_dump_json(), cluster.values.model_dump_json()
    first, second = (render(resolve(spec, cluster), brought(spec)) for _ in range(2))
    assert first == second
    first[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ].clear()
    assert render(resolve(spec, cluster), brought(spec)) == second
    assert (spec.model_dump_json(), cluster.values.model_dump_json()) == before


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_gang_ends_as_a_whole_and_where_its_peers_wait_a_lost_pod_is_made_again_alone(
    path: Path,
) -> None:
    manifest = manifests(path)[0]
    spec, pod = spec_of(manifest), pod_of(manifest)
    assert manifest["spec"]["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    assert (spec["podReplacementPolicy"], pod["restartPolicy"]) == ("Failed", "Never")
    assert spec["completions"] == spec["parallelism"]
    hosts = spec["completions"] * manifest["spec"]["replicatedJobs"][0]["replicas"]
    (job,) = (
        json.loads(one["value"])
        for one in pod["containers"][0]["env"]
        if one["name"] == contract.JOB
    )
    waits, dispensable = job["replaces"], hosts - min(job.get("sizes", [hosts]))
    assert waits is (
        hosts > 1
        and "google.com/tpu" not in str(pod["containers"])
        and spec.get("backoffLimit") != 0
    )
    actions = {rule["action"] for rule in spec["podFailurePolicy"]["rules"]}
    if waits:
        assert actions == {"FailJob", "Ignore"} and "backoffLimit" not in spec
        charged = manifest["spec"]["failurePolicy"]["maxRestarts"]
        assert (spec["backoffLimitPerIndex"], spec["maxFailedIndexes"]) == (charged, dispensable)
        assert ("successPolicy" in spec) is (dispensable > 0), (
            "a pod that is not needed may never succeed"
        )
    else:
        assert actions == {"FailJob"} and spec["backoffLimit"] == 0
    gone = [
        one
        for one in pod["tolerations"]
        if one.get("effect") == "NoExecute" and "tolerationSeconds" in one
    ]
    assert [one["tolerationSeconds"] for one in gone] == [30, 30]


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (
        one
        for one in [*pod["containers"], *pod.get("initContainers", [])]
        if one["name"] != "sidecar"
    )


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in PRIVILEGED], ids=lambda path: path.stem
)
def test_pods_meet_the_restricted_pod_security_standard(path: Path) -> None:
    pod = pod_of(manifests(path)[0])
    assert not pod.keys() & {"hostNetwork", "hostPID", "hostIPC"}
    is_tpu = "google.com/tpu" in str(
        pod["containers"]
    )  # root by default, which alone the standard forbids
    assert (
        pod["securityContext"]["runAsNonRoot"]
        is (pod["securityContext"]["runAsUser"] > 0)
        is not is_tpu
    )
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    assert kinds <= {"emptyDir", "persistentVolumeClaim", "secret", "configMap", "csi"}
    for container in containers(pod):
        security = container["securityContext"]
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert (
            security["allowPrivilegeEscalation"] is False
            and security["readOnlyRootFilesystem"] is True
        )
        assert "runAsUser" not in security and "privileged" not in security


def answer(manifest: dict[str, Any], message: str, reason: str = "PodFailurePolicy") -> str:
    """What JobSet does about a failed Job: the first rule that matches, else a counted restart."""
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [""])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return str(rule["action"])
    return Action.RESTART.value


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("code", sorted(set(contract.OUTCOMES) - {contract.DONE}))
def test_jobset_answers_every_exit_code_as_the_contract_says(code: int, hosts: int) -> None:
    """With the words in which the Job controller reports a failure."""
    manifest = rendered(SMALL + f"hosts: {hosts}\n")
    rule = next(
        rule for rule in spec_of(manifest)["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    )
    is_left_to_the_job = hosts > 1 and contract.agent_exit_code(code, leaves_alone=False) != code
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod_of(manifest)["containers"][0]["name"]
    message = (
        f"Container main for pod team/x-w-0-0-abcde failed with exit code {code} matching "
        "FailJob rule at index 1"
    )
    if code not in rule["onExitCodes"]["values"]:
        message, reason = "Job has reached the specified backoff limit", "BackoffLimitExceeded"
    else:
        reason = "PodFailurePolicy"
    assert answer(manifest, message, reason) == contract.OUTCOMES[code].action.value
    assert (code in rule["onExitCodes"]["values"]) or hosts == 1 or is_left_to_the_job


def test_a_pod_that_dies_or_leaves_alone_is_made_again_and_only_what_died_is_charged() -> None:
    decided, disrupted, left = spec_of(rendered(SMALL + "hosts: 2\n"))["podFailurePolicy"]["rules"]
    values = decided["onExitCodes"]["values"]
    assert values == [code for code in contract.OUTCOMES if 0 < code < 128]
    assert {contract.agent_exit_code(code, leaves_alone=False) for code in range(1, 256)} & {
        contract.LEFT
    } == set()
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )
    assert (left["action"], left["onExitCodes"]["values"]) == ("Ignore", [contract.LEFT])


def test_an_evicted_pod_is_never_charged() -> None:
    message = (
        "Pod team/x-w-0-0-abcde has condition DisruptionTarget matching FailJob rule at index 0"
    )
    manifest = rendered(SMALL)
    assert answer(manifest, message) == Action.RESTART_UNCHARGED.value
    assert (
        spec_of(manifest)["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"]
        == "DisruptionTarget"
    )


def test_a_job_past_its_deadline_is_not_started_again() -> None:
    manifest = rendered(SMALL + "deadline: 90s\n")
    assert spec_of(manifest)["activeDeadlineSeconds"] == 90
    assert (
        answer(manifest, "Job was active longer than specified deadline", "DeadlineExceeded")
        == "FailJobSet"
    )


def test_the_agent_can_read_what_the_pod_tells_it() -> None:
    """The agent's own reader, on the environment of host 5 of 2 × 4."""
    from jaxlaunch.launcher.agent.gang import config

    manifest = rendered(
        SMALL.replace("{type: cpu}", "{type: cpu, per_host: 2}")
        + "hosts: 4\nslices: 2\ngrace: 20s\n"
    )
    found = {name: value for name, value in env_of(manifest).items() if isinstance(value, str)}
    told = {
        contract.SLICE: "1",
        contract.INDEX: "1",
        contract.UID: "u",
        contract.GENERATION: "3",
        contract.POD_IP: "10.4.0.7",
    }
    read = config.read_config({**found, **told})
    assert (read.leader_address, read.host, read.hosts, read.generation) == (
        ("x-w-0-0.x", network.LEADER_PORT),
        5,
        8,
        3,
    )
    assert (read.job.command, read.job.grace_s, read.job.metrics_port) == (
        ("python", "train.py"),
        20.0,
        9400,
    )
    assert not read.is_local and read.listen_address == "10.4.0.7"
    fields = env_of(manifest)
    for name in (
        contract.SLICE,
        contract.UID,
        contract.GENERATION,
        contract.POD_UID,
        contract.POD_IP,
        contract.NODE,
    ):
        assert "fieldRef" in fields[name]


def test_values_reach_the_program_as_they_are_written() -> None:
    """The kubelet expands $(NAME) in variables."""
    manifest = rendered(
        SMALL.replace("train.py]", "train.py, $(HOME)]") + "env: {A: $(HOME) costs $$5}\n"
    )
    raw = {one["name"]: one.get("value") for one in pod_of(manifest)["containers"][0]["env"]}
    assert raw["A"] == "$$(HOME) costs $$$$5"
    assert json.loads(env_of(manifest)[contract.JOB])["command"] == [
        "python",
        "train.py",
        "$(HOME)",
    ]


def test_the_train_block_reaches_the_pod_with_its_checkpoint_folder() -> None:
    text = "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, steps: 10}\n"
    cluster = defaults.parse_defaults("{image: i, checkpoint: {claim: runs, path: /runs}}")
    manifest = rendered(text, cluster)
    spec = json.loads(env_of(manifest)[contract.TRAIN_SPEC])
    assert spec == {"task": "my.tasks:Mine", "steps": 10, "checkpoint": {"path": "/runs/x"}}
    assert env_of(manifest)[contract.RUN_DIR] == "/runs/x/.jaxlaunch"
    mounts = {
        one["name"]: one["mountPath"] for one in pod_of(manifest)["containers"][0]["volumeMounts"]
    }
    assert mounts == {"tmp": "/tmp", "volume-0": "/runs"}


def test_a_bucket_is_no_folder_but_keeps_the_run_s_memory() -> None:
    cluster = defaults.parse_defaults("{image: i, checkpoint: {url: gs://runs/all}}")
    manifest = rendered(
        "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, steps: 10}\n", cluster
    )
    assert json.loads(env_of(manifest)[contract.TRAIN_SPEC])["checkpoint"] == {
        "path": "gs://runs/all/x"
    }
    assert contract.RUN_DIR not in env_of(manifest)
    assert env_of(manifest)[contract.RUN_URL] == "gs://runs/all/x/.jaxlaunch"


def test_the_cluster_defaults_claim_is_mounted_once_where_a_checkpoint_lies_on_it() -> None:
    cluster = defaults.parse_defaults("{image: i, checkpoint: {claim: runs, path: /runs}}")
    text = (
        "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, checkpoint: {path: %s}}\n"
    )
    assert len(pod_of(rendered(text % "/runs/other", cluster))["volumes"]) == 2
    mounted = text % "/runs/other" + "volumes: [{claim: mine, path: /runs}]\n"
    claims = [
        one["persistentVolumeClaim"] for one in pod_of(rendered(mounted, cluster))["volumes"][1:]
    ]
    assert claims == [{"claimName": "mine"}]
    assert len(pod_of(rendered(text % "gs://team-b/x", cluster))["volumes"]) == 1


def test_a_secret_appears_by_reference_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    (case,) = [path for path in FILES if path.stem == "volumes-secrets-init-pod"]
    text = writer.render_documents(manifests(case))
    assert "canary" not in text
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert env_of(manifests(case)[0])["WANDB_API_KEY"] == reference


def test_the_cluster_defaults_compile_cache_is_mounted_and_told_to_jobs_that_name_none() -> None:
    cluster = defaults.parse_defaults(
        "{image: i, checkpoint: {url: gs://runs}, compile_cache: {claim: compiled}}"
    )
    text = "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine}\n"
    manifest = rendered(text, cluster)
    assert json.loads(env_of(manifest)[contract.TRAIN_SPEC])["compile_cache"] == "/compile-cache"
    assert {"name": "volume-0", "mountPath": "/compile-cache"} in pod_of(manifest)["containers"][0][
        "volumeMounts"
    ]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "compiled"}} in pod_of(
        manifest
    )["volumes"]
    none = rendered(text.replace("Mine}", "Mine, compile_cache: null}"), cluster)
    assert json.loads(env_of(none)[contract.TRAIN_SPEC])["compile_cache"] is None
    own = rendered(text.replace("Mine}", "Mine, compile_cache: gs://mine}"), cluster)
    assert json.loads(env_of(own)[contract.TRAIN_SPEC])["compile_cache"] == "gs://mine"
    assert [volume["name"] for volume in pod_of(own)["volumes"]] == ["tmp"]


def test_the_cluster_defaults_service_account_is_for_jobs_that_name_none_and_mounts_no_token() -> (
    None
):
    cluster = defaults.parse_defaults("{image: i, service_account: everyone}")
    pod = pod_of(rendered(SMALL, cluster))
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("everyone", False)
    pod = pod_of(rendered(SMALL + "service_account: mine\n", cluster))
    assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == ("mine", True)


def test_the_cluster_defaults_network_is_for_jobs_on_its_accelerator_that_name_none() -> None:
    cluster = defaults.parse_defaults(
        "{image: i, network: {h100: hostnetwork, a100: {profile: rdma, resource: rdma/ib}}}"
    )
    h100 = "name: x\naccelerator: {type: h100}\ncommand: [python, train.py]\n"
    assert pod_of(rendered(h100, cluster))["hostNetwork"] is True
    assert "hostNetwork" not in pod_of(rendered(h100 + "network: default\n", cluster))
    assert "hostNetwork" not in pod_of(rendered(SMALL, cluster))
    limits = pod_of(rendered(h100.replace("h100", "a100"), cluster))["containers"][0]["resources"][
        "limits"
    ]
    assert limits["rdma/ib"] == "1"


def test_a_token_is_mounted_only_for_a_service_account() -> None:
    assert pod_of(rendered(SMALL))["automountServiceAccountToken"] is False
    pod = pod_of(rendered(SMALL + "service_account: trainer\n"))
    assert (pod["automountServiceAccountToken"], pod["serviceAccountName"]) == (True, "trainer")


def test_a_job_says_otherwise_than_our_defaults_for_the_program() -> None:
    text = SMALL.replace("type: cpu", "type: l4") + "env: {HOME: /home/me, JAX_PLATFORMS: cuda}\n"
    found = env_of(rendered(text))
    assert (found["HOME"], found["JAX_PLATFORMS"]) == ("/home/me", "cuda")
    secret = env_of(
        rendered(
            text.replace("env: {HOME: /home/me, ", "secrets: {HOME: {name: s, key: k}}\nenv: {")
        )
    )
    assert secret["HOME"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_only_slices_that_span_hosts_are_placed_exclusively() -> None:
    text = SMALL + "platform: gke\n"
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"

    def annotations(accelerator: str, more: str = "") -> Mapping[str, str]:
        found = rendered(text.replace("{type: cpu}", accelerator) + more)["metadata"]["annotations"]
        assert isinstance(found, dict)
        return found

    assert annotations("{type: v6e, topology: 4x4}")[key] == "cloud.google.com/gke-nodepool"
    assert key not in annotations("{type: v6e, topology: 2x2}")
    assert key not in annotations(
        "{type: v6e, topology: 4x4}", "queue: q\nplacement: {required: rack}\n"
    )
    # What Kueue only prefers must not put two slices' hosts into one node pool.
    assert key in annotations(
        "{type: v6e, topology: 4x4}", "queue: q\nplacement: {preferred: rack}\n"
    )
    assert key not in annotations("{type: cpu}", "hosts: 4\n")


TOPOLOGY = {2: "2x2", 3: "2x2x1"}  # the smallest whose hosts have all their chips


@pytest.mark.parametrize("where", table.PLATFORMS)
@pytest.mark.parametrize("kind", ACCELERATORS)
def test_every_accelerator_is_asked_for_or_refused_on_every_platform(kind: str, where: str) -> None:
    shape = TOPOLOGY.get(ACCELERATORS[kind].dimensions)
    topology = "" if shape is None else f", topology: {shape}"
    text = SMALL.replace("{type: cpu}", f"{{type: {kind}{topology}}}") + f"platform: {where}\n"
    if kind not in table.NODES[where]:
        with pytest.raises(
            UserError, match=f"accelerator.type = {kind} is not known on platform = {where}"
        ):
            rendered(text)
        return
    spec, pod = load.parse_job(text), pod_of(rendered(text))
    resources = {
        "cpu": None,
        "cuda": "nvidia.com/gpu",
        "rocm": "amd.com/gpu",
        "tpu": "google.com/tpu",
    }
    resource = resources[spec.accelerator.platform]
    if resource is None:
        assert "resources" not in pod["containers"][0] and "nodeSelector" not in pod
    else:
        amount = {resource: str(spec.accelerator.per_host)}
        assert pod["containers"][0]["resources"] == {"requests": amount, "limits": amount}
        assert (("nodeSelector" in pod) != ("affinity" in pod)) is (kind != "gpu")
        assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    if spec.accelerator.platform == "tpu":
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape


def test_a_job_s_node_selector_chooses_among_the_nodes_that_fit() -> None:
    text = SMALL.replace("cpu", "a100") + "platform: gke\n"
    assert "affinity" in pod_of(rendered(text))
    chosen = rendered(
        text + "node_selector: {cloud.google.com/gke-accelerator: nvidia-a100-80gb}\n"
    )
    assert pod_of(chosen)["nodeSelector"] == {
        "cloud.google.com/gke-accelerator": "nvidia-a100-80gb"
    }
    assert "affinity" not in pod_of(chosen)


def test_jobs_that_share_hosts_do_not_share_ports() -> None:
    text = SMALL + "network: hostnetwork\n"
    ports = {
        port["containerPort"]
        for name in ("x", "y", "z")
        for port in pod_of(rendered(text.replace("name: x", f"name: {name}")))["containers"][0][
            "ports"
        ]
    }
    assert len(ports) == 6 and all(20000 <= port < 30000 for port in ports)
    assert (
        len(render(resolve(load.parse_job(text), ClusterDefaults()))) == 1
    )  # a policy would not hold there, and promise that it does


def test_the_policy_lets_in_the_gang_and_prometheus() -> None:
    _, policy = render(
        resolve(
            load.parse_job(SMALL), defaults.parse_defaults("prometheus: {namespace: monitoring}")
        )
    )
    gang = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "x"}}
    own, scrape = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == gang and own == {"from": [{"podSelector": gang}]}
    assert scrape["ports"] == [{"protocol": "TCP", "port": network.METRICS_PORT}]
    assert scrape["from"][0]["namespaceSelector"]["matchLabels"] == {
        "kubernetes.io/metadata.name": "monitoring"
    }
    assert (
        len(render(resolve(load.parse_job(SMALL + "network_policy: false\n"), ClusterDefaults())))
        == 1
    )


def test_the_spec_hash_tells_jobs_apart_and_nothing_else() -> None:
    def digest(text: str) -> str:
        return str(rendered(text)["metadata"]["annotations"][labels.SPEC_HASH])

    assert digest(SMALL) == digest("# a comment\n" + SMALL) != digest(SMALL + "grace: 61s\n")


def test_a_job_that_cannot_run_there_is_refused_with_everything_at_once() -> None:
    text = (
        SMALL.replace("image: registry.example/train:1\n", "")
        + "placement: {preferred: rack}\ncapacity: spot\n"
    )
    with pytest.raises(UserError) as error:
        rendered(text)
    assert "placement is done by Kueue" in str(error.value)
    assert "image is missing" in str(error.value)
    assert "capacity = spot is not known on platform = generic." in str(error.value)


def test_an_image_of_the_jobs_own_gets_the_agent_that_travels_with_it() -> None:
    spec = load.parse_job(SMALL + "code: src\nworkdir: src/sub\n")
    _, _, shared = render(resolve(spec, ClusterDefaults()), Bundle(b"agent", b"code"))
    main = pod_of(rendered_with(spec, Bundle(b"agent", b"code")))["containers"][0]
    assert main["command"] == ["python3", "-I", "/jaxlaunch/agent.pyz"]
    assert (
        shared["binaryData"] == {"agent.pyz": "YWdlbnQ=", "code.tar.gz": "Y29kZQ=="}
        and shared["immutable"]
    )
    assert (
        json.loads(env_of(rendered_with(spec, Bundle(b"agent", b"code")))[contract.JOB])["workdir"]
        == "/code/sub"
    )


@pytest.mark.parametrize(
    ("text", "brings"),
    [
        (SMALL, True),
        (SMALL + "agent: image\n", False),
        (
            SMALL.replace("image: registry.example/train:1\n", ""),
            False,
        ),  # that of the defaults holds us
        (
            SMALL.replace("command: [python, train.py]", "train: {task: 'a:B'}"),
            False,
        ),  # the trainer's holds us
        (
            SMALL.replace("command: [python, train.py]", "train: {task: 'a:B'}")
            + "agent: inject\n",
            True,
        ),
    ],
)
def test_the_agent_travels_where_the_image_need_not_hold_it(text: str, brings: bool) -> None:
    found = code.build_bundle(resolve(load.parse_job(text), ClusterDefaults()).code, Path())
    assert (found is not None and found.agent is not None) == brings


def test_what_is_brought_is_named_by_all_that_it_holds() -> None:
    names = {
        Bundle(b"a", b"b").name,
        Bundle(b"a").name,
        Bundle(None, b"a").name,
        Bundle(b"ab", b"").name,
    }
    assert len(names) == 4 and all(re.fullmatch("jaxlaunch-[0-9a-f]{12}", name) for name in names)


@pytest.mark.parametrize(
    "variables", ["null", "{}", "[{name: JAXLAUNCH_LEADER, value: x}]", "[{name: TRAIN_SPEC}]"]
)
def test_the_pod_escape_cannot_take_our_variables_away(variables: str) -> None:
    text = SMALL + f"pod: {{spec: {{containers: [{{name: main, env: {variables}}}]}}}}\n"
    with pytest.raises(UserError, match=r"pod\.spec\.containers\.0\.env"):
        load.parse_job(text)


def test_a_difference_that_fits_nowhere_is_no_golden_file() -> None:
    old = ["kind: A", "spec:", "  a: 1", "  b: 2"]
    hunks = difference(old, ["kind: A", "spec:", "  a: 2", "  b: 2", "  c: 3"])
    assert hunks == ["@@ A.spec @@", "-  a: 1", "+  a: 2", "@@ A.spec @@", "   b: 2", "+  c: 3"]
    assert patched(old, hunks) == ["kind: A", "spec:", "  a: 2", "  b: 2", "  c: 3"]
    with pytest.raises(ValueError, match="a hunk that fits nowhere:\n-  a: 1"):
        patched(["kind: A", "spec:", "  a: 3", "  b: 2"], hunks)


def test_a_single_host_of_efa_asks_for_the_least_interfaces_and_pins_nothing() -> None:
    text = (
        "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100, per_host: 1}\nplatform: "
        "eks\nnetwork: efa\n"
    )
    (pod,) = [
        job["template"]["spec"]["template"]["spec"]
        for job in rendered(text)["spec"]["replicatedJobs"]
    ]
    (main,) = pod["containers"]
    assert main["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    (job,) = [json.loads(one["value"]) for one in main["env"] if one["name"] == contract.JOB]
    assert job["pinning"] is None


@pytest.mark.parametrize(
    ("network", "added"), [("default", ["DAC_OVERRIDE"]), ("efa", ["DAC_OVERRIDE", "IPC_LOCK"])]
)
def test_root_goes_on_with_the_files_of_another_user(network: str, added: list[str]) -> None:
    text = (
        "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100}\nhosts: 2\nnetwork: "
        f"{network}\n"
    )
    cluster = defaults.parse_defaults("{platform: eks, users: {h100: root}}")
    (pod,) = [
        job["template"]["spec"]["template"]["spec"]
        for job in rendered(text, cluster)["spec"]["replicatedJobs"]
    ]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": added,
    }

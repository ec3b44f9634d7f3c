"""Rendering: manifests against golden files, and rules that all manifests follow.

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
from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.job.defaults import ClusterDefaults
from jaxlaunch.launcher.jobs.status import hosts
from jaxlaunch.launcher.kubernetes import labels
from jaxlaunch.launcher.kubernetes.labels import NAME_LABEL
from jaxlaunch.launcher.kubernetes.objects import pod_template
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
    *("cpu-hostnetwork", "h100-tcpxo-gke", "h200-gib-gke", "b200-gib-gke", "h200-rdma-dra-gke"),
    *("gb200-nvlink-gke", "gb300-rdma-dra-gke"),
} | {"v5e-root", "v5e-privileged", "h100-rdma-root"}


def render_file(path: Path) -> list[dict[str, Any]]:
    defaults_file = path.with_name(path.stem + DEFAULTS)
    spec = load.load_job(path)
    return render(
        resolve(spec, defaults.load_defaults(defaults_file if defaults_file.exists() else None)),
        make_bundle(spec),
    )


def make_bundle(spec: load.JobSpec) -> Bundle | None:
    """What a job brings where it asks for it, with contents that no change of ours changes."""
    agent = b"agent" if spec.agent == "inject" else None
    code = b"code" if spec.code is not None else None
    return None if agent is None and code is None else Bundle(agent, code)


def render_text(text: str, cluster: ClusterDefaults | None = None) -> dict[str, Any]:
    """The JobSet of a job in a text."""
    return prepare(load.read_job_text(text), cluster or ClusterDefaults()).manifests[0]


def render_with_bundle(spec: load.JobSpec, archive: Bundle) -> dict[str, Any]:
    return render(resolve(spec, ClusterDefaults()), archive)[0]


def job_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    """The spec of its one replicated job's Job."""
    (replicated_job,) = manifest["spec"]["replicatedJobs"]
    assert isinstance(job := replicated_job["template"]["spec"], dict)
    return job


def pod_spec(manifest: dict[str, Any]) -> dict[str, Any]:
    assert isinstance(pod := job_spec(manifest)["template"]["spec"], dict)
    return pod


def environment(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return the variables of the main container, as the kubelet expands them."""
    main = pod_spec(manifest)["containers"][0]
    return {
        variable["name"]: variable.get("value", "").replace("$$", "$") or variable["valueFrom"]
        for variable in main["env"]
    }


PLAIN_MANIFESTS = {
    GOLDEN / f"{combination.name}.yaml": combination.manifests() for combination in matrix.PLAIN
}


@pytest.mark.parametrize("golden", PLAIN_MANIFESTS, ids=lambda path: path.stem)
def test_plain_job_matches_golden_manifests(golden: Path) -> None:
    compare(PLAIN_MANIFESTS[golden], golden)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_job_matches_golden_difference(path: Path) -> None:
    compare_difference(
        render_file(path), GOLDEN / path.parent.name / f"{path.stem}.diff", PLAIN_MANIFESTS
    )


@pytest.mark.parametrize("combination", COMBINATIONS, ids=lambda combination: combination.name)
def test_combination_matches_golden_difference(combination: matrix.Combination) -> None:
    compare_difference(
        combination.manifests(), GOLDEN / "matrix" / f"{combination.name}.diff", PLAIN_MANIFESTS
    )


def test_combinations_cover_accelerators_and_options() -> None:
    pairs = {
        (kind, platform)
        for platform, kinds in table.NODES.items()
        for kind in kinds
        if not matrix.is_like_gpu(kind, platform)
    }
    assert {(combination.kind, combination.platform) for combination in COMBINATIONS} == pairs
    assert {combination.option for combination in COMBINATIONS} == set(matrix.OPTIONS)
    assert len(COMBINATIONS) + len(FILES) >= 60


ROLES = """
name: rl
platform: gke
image: registry.example/train:1
queue: research
accelerator: {type: cpu}
volumes: [{claim: runs, path: /runs}]
agent: image
jobs:
  trainer:
    ends: true
    hosts: 2
    accelerator: {type: v5e, topology: 2x4}
    command: [python, train.py]
    needs: {sampler: started}
  sampler: {command: [python, sample.py], restarts: {crash: 2}}
  evaluator: {may_fail: true, command: [python, evaluate.py], restarts: {crash: 0}}
"""


def test_roles_are_replicated_jobs_of_one_jobset() -> None:
    file = load.read_job_text(ROLES, may_have_roles=True)
    prepared = prepare(file, ClusterDefaults(), "team")
    assert [manifest["kind"] for manifest in prepared.manifests] == ["JobSet", "NetworkPolicy"]
    jobset, policy = prepared.manifests
    assert {manifest["metadata"]["name"] for manifest in prepared.manifests} == {"rl"}
    assert policy["spec"]["podSelector"]["matchLabels"] == {NAME_LABEL: "rl"}
    spec = jobset["spec"]
    assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["trainer"]}
    assert spec["failurePolicy"]["maxRestarts"] == 5
    jobs = {job["name"]: job for job in spec["replicatedJobs"]}
    assert list(jobs) == ["sampler", "evaluator", "trainer"]
    for rule in spec["failurePolicy"]["rules"]:
        assert rule["targetReplicatedJobs"] == list(jobs)
    # A role that is needed comes first, as JobSet demands.
    assert jobs["trainer"]["dependsOn"] == [{"name": "sampler", "status": "Ready"}]
    limits = {
        name: job["template"]["spec"].get("backoffLimitPerIndex") for name, job in jobs.items()
    }
    assert limits == {"sampler": 2, "evaluator": 2**31 - 1, "trainer": None}
    # The pod template of the JobSet is that of the role that ends the job.
    assert pod_template(jobset) == jobs["trainer"]["template"]["spec"]["template"]
    environment = hosts.read_environment(hosts.select_role(jobset, "sampler"))
    assert environment[contract.LEADER] == "rl-sampler-0-0.rl:9401"
    assert environment[contract.ROLE] == "sampler"
    addresses = environment[contract.role_addresses_variable("trainer")]
    assert addresses == "rl-trainer-0-0.rl,rl-trainer-0-1.rl"
    assert environment[contract.role_folder_variable("trainer")].endswith("/rl-trainer")
    agents = {name: hosts.read_agent_job(hosts.select_role(jobset, name)) for name in jobs}
    assert [agent.replaces for agent in agents.values()] == [True, True, False]
    assert [agent.may_fail for agent in agents.values()] == [False, True, False]
    assert all(agent.is_role for agent in agents.values())
    # All roles restart with the JobSet.
    assert [agent.crash_limit for agent in agents.values()] == [5, 5, 5]


def test_faults_of_roles_on_a_cluster_name_the_role() -> None:
    text = ROLES.replace("image: registry.example/train:1\n", "")
    with pytest.raises(JobFaultsError) as faults:
        prepare(load.read_job_text(text, may_have_roles=True), ClusterDefaults())
    names = {fault.message.partition(":")[0] for fault in faults.value.faults}
    assert names == {"jobs.sampler", "jobs.evaluator", "jobs.trainer"}


def test_every_golden_file_has_a_job() -> None:
    differences = [f"{path.parent.name}/{path.stem}" for path in FILES] + [
        f"matrix/{combination.name}" for combination in COMBINATIONS
    ]
    names = {path.relative_to(GOLDEN).as_posix() for path in GOLDEN.rglob("*.*")}
    expected = {path.name for path in PLAIN_MANIFESTS} | {f"{name}.diff" for name in differences}
    assert names == expected


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_rendering_is_pure(path: Path) -> None:
    spec, cluster = load.load_job(path), ClusterDefaults()
    if (defaults_file := path.with_name(path.stem + DEFAULTS)).exists():
        cluster = defaults.load_defaults(defaults_file)
    original = spec.model_dump_json(), cluster.values.model_dump_json()
    first, second = (render(resolve(spec, cluster), make_bundle(spec)) for _ in range(2))
    assert first == second
    first[0]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][
        0
    ].clear()
    assert render(resolve(spec, cluster), make_bundle(spec)) == second
    assert (spec.model_dump_json(), cluster.values.model_dump_json()) == original


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_restart_rules_of_every_job(path: Path) -> None:
    manifest = render_file(path)[0]
    spec, pod = job_spec(manifest), pod_spec(manifest)
    assert manifest["spec"]["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    assert (spec["podReplacementPolicy"], pod["restartPolicy"]) == ("Failed", "Never")
    assert spec["completions"] == spec["parallelism"]
    hosts = spec["completions"] * manifest["spec"]["replicatedJobs"][0]["replicas"]
    (job,) = (
        json.loads(variable["value"])
        for variable in pod["containers"][0]["env"]
        if variable["name"] == contract.JOB
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
    lost_node_tolerations = [
        toleration
        for toleration in pod["tolerations"]
        if toleration.get("effect") == "NoExecute" and "tolerationSeconds" in toleration
    ]
    assert [toleration["tolerationSeconds"] for toleration in lost_node_tolerations] == [30, 30]


def containers(pod: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from (
        container
        for container in [*pod["containers"], *pod.get("initContainers", [])]
        if container["name"] != "sidecar"
    )


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.stem not in PRIVILEGED], ids=lambda path: path.stem
)
def test_pods_are_restricted(path: Path) -> None:
    pod = pod_spec(render_file(path)[0])
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
        assert security["allowPrivilegeEscalation"] is False
        assert security["readOnlyRootFilesystem"] is True
        assert "runAsUser" not in security and "privileged" not in security


def jobset_action(manifest: dict[str, Any], message: str, reason: str = "PodFailurePolicy") -> str:
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
def test_exit_codes_have_the_action_of_the_contract(code: int, hosts: int) -> None:
    """With the words in which the Job controller reports a failure."""
    manifest = render_text(SMALL + f"hosts: {hosts}\n")
    rule = next(
        rule for rule in job_spec(manifest)["podFailurePolicy"]["rules"] if "onExitCodes" in rule
    )
    is_left_to_the_job = (
        hosts > 1 and contract.agent_exit_code(code, does_gang_continue=False) != code
    )
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"]["containerName"] == pod_spec(manifest)["containers"][0]["name"]
    message = (
        f"Container main for pod team/x-w-0-0-abcde failed with exit code {code} matching "
        "FailJob rule at index 1"
    )
    if code not in rule["onExitCodes"]["values"]:
        message, reason = "Job has reached the specified backoff limit", "BackoffLimitExceeded"
    else:
        reason = "PodFailurePolicy"
    assert jobset_action(manifest, message, reason) == contract.OUTCOMES[code].action.value
    assert (code in rule["onExitCodes"]["values"]) or hosts == 1 or is_left_to_the_job


def test_only_failed_pods_are_charged() -> None:
    decided, disrupted, leaving = job_spec(render_text(SMALL + "hosts: 2\n"))["podFailurePolicy"][
        "rules"
    ]
    values = decided["onExitCodes"]["values"]
    assert values == [code for code in contract.OUTCOMES if 0 < code < 128]
    assert {contract.agent_exit_code(code, does_gang_continue=False) for code in range(1, 256)} & {
        contract.LEFT_GANG
    } == set()
    assert (disrupted["action"], disrupted["onPodConditions"][0]["type"]) == (
        "Ignore",
        "DisruptionTarget",
    )
    assert (leaving["action"], leaving["onExitCodes"]["values"]) == ("Ignore", [contract.LEFT_GANG])


def test_eviction_is_not_charged() -> None:
    message = (
        "Pod team/x-w-0-0-abcde has condition DisruptionTarget matching FailJob rule at index 0"
    )
    manifest = render_text(SMALL)
    assert jobset_action(manifest, message) == Action.RESTART_UNCHARGED.value
    assert (
        job_spec(manifest)["podFailurePolicy"]["rules"][0]["onPodConditions"][0]["type"]
        == "DisruptionTarget"
    )


def test_deadline_fails_the_jobset() -> None:
    manifest = render_text(SMALL + "deadline: 90s\n")
    assert job_spec(manifest)["activeDeadlineSeconds"] == 90
    assert (
        jobset_action(manifest, "Job was active longer than specified deadline", "DeadlineExceeded")
        == "FailJobSet"
    )


def test_agent_reads_environment_of_pod() -> None:
    """The agent's own reader, on the environment of host 5 of 2 × 4."""
    from jaxlaunch.launcher.agent.gang import config

    manifest = render_text(
        SMALL.replace("{type: cpu}", "{type: cpu, per_host: 2}")
        + "hosts: 4\nslices: 2\ngrace: 20s\n"
    )
    variables = {
        name: value for name, value in environment(manifest).items() if isinstance(value, str)
    }
    pod_values = {
        contract.SLICE: "1",
        contract.INDEX: "1",
        contract.UID: "u",
        contract.GENERATION: "3",
        contract.POD_IP: "10.4.0.7",
    }
    config_of_host = config.read_config({**variables, **pod_values})
    assert (
        config_of_host.leader_address,
        config_of_host.host,
        config_of_host.hosts,
        config_of_host.generation,
    ) == (("x-w-0-0.x", network.LEADER_PORT), 5, 8, 3)
    assert (
        config_of_host.job.command,
        config_of_host.job.grace_s,
        config_of_host.job.metrics_port,
    ) == (("python", "train.py"), 20.0, 9400)
    assert not config_of_host.is_local and config_of_host.listen_address == "10.4.0.7"
    fields = environment(manifest)
    for name in (
        contract.SLICE,
        contract.UID,
        contract.GENERATION,
        contract.POD_UID,
        contract.POD_IP,
        contract.NODE,
    ):
        assert "fieldRef" in fields[name]


def test_values_with_dollars_are_escaped() -> None:
    """The kubelet expands $(NAME) in variables."""
    manifest = render_text(
        SMALL.replace("train.py]", "train.py, $(HOME)]") + "env: {A: $(HOME) costs $$5}\n"
    )
    raw = {
        variable["name"]: variable.get("value")
        for variable in pod_spec(manifest)["containers"][0]["env"]
    }
    assert raw["A"] == "$$(HOME) costs $$$$5"
    assert json.loads(environment(manifest)[contract.JOB])["command"] == [
        "python",
        "train.py",
        "$(HOME)",
    ]


def test_train_block_has_checkpoint_folder() -> None:
    text = "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, steps: 10}\n"
    cluster = defaults.parse_defaults("{image: i, checkpoint: {claim: runs, path: /runs}}")
    manifest = render_text(text, cluster)
    spec = json.loads(environment(manifest)[contract.TRAIN_SPEC])
    assert spec == {"task": "my.tasks:Mine", "steps": 10, "checkpoint": {"path": "/runs/x"}}
    assert environment(manifest)[contract.RUN_DIR] == "/runs/x/.jaxlaunch"
    mounts = {
        mount["name"]: mount["mountPath"]
        for mount in pod_spec(manifest)["containers"][0]["volumeMounts"]
    }
    assert mounts == {"tmp": "/tmp", "volume-0": "/runs"}


def test_bucket_stores_the_run_folder() -> None:
    cluster = defaults.parse_defaults("{image: i, checkpoint: {url: gs://runs/all}}")
    manifest = render_text(
        "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, steps: 10}\n", cluster
    )
    expected = {"path": "gs://runs/all/x"}
    assert json.loads(environment(manifest)[contract.TRAIN_SPEC])["checkpoint"] == expected
    assert contract.RUN_DIR not in environment(manifest)
    assert environment(manifest)[contract.RUN_URL] == "gs://runs/all/x/.jaxlaunch"


def test_checkpoint_claim_is_mounted_once() -> None:
    cluster = defaults.parse_defaults("{image: i, checkpoint: {claim: runs, path: /runs}}")
    text = (
        "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine, checkpoint: {path: %s}}\n"
    )
    assert len(pod_spec(render_text(text % "/runs/other", cluster))["volumes"]) == 2
    mounted = text % "/runs/other" + "volumes: [{claim: mine, path: /runs}]\n"
    claims = [
        volume["persistentVolumeClaim"]
        for volume in pod_spec(render_text(mounted, cluster))["volumes"][1:]
    ]
    assert claims == [{"claimName": "mine"}]
    assert len(pod_spec(render_text(text % "gs://team-b/x", cluster))["volumes"]) == 1


def test_secrets_are_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "canary-0123456789")
    (case,) = [path for path in FILES if path.stem == "volumes-secrets-init-pod"]
    text = writer.render_documents(render_file(case))
    assert "canary" not in text
    reference = {"secretKeyRef": {"name": "wandb", "key": "api-key"}}
    assert environment(render_file(case)[0])["WANDB_API_KEY"] == reference


def test_compile_cache_of_defaults_is_mounted() -> None:
    cluster = defaults.parse_defaults(
        "{image: i, checkpoint: {url: gs://runs}, compile_cache: {claim: compiled}}"
    )
    text = "name: x\naccelerator: {type: cpu}\ntrain: {task: my.tasks:Mine}\n"
    manifest = render_text(text, cluster)
    expected = "/compile-cache"
    assert json.loads(environment(manifest)[contract.TRAIN_SPEC])["compile_cache"] == expected
    assert {"name": "volume-0", "mountPath": "/compile-cache"} in pod_spec(manifest)["containers"][
        0
    ]["volumeMounts"]
    assert {"name": "volume-0", "persistentVolumeClaim": {"claimName": "compiled"}} in pod_spec(
        manifest
    )["volumes"]
    without_cache = render_text(text.replace("Mine}", "Mine, compile_cache: null}"), cluster)
    assert json.loads(environment(without_cache)[contract.TRAIN_SPEC])["compile_cache"] is None
    with_cache = render_text(text.replace("Mine}", "Mine, compile_cache: gs://mine}"), cluster)
    assert json.loads(environment(with_cache)[contract.TRAIN_SPEC])["compile_cache"] == "gs://mine"
    assert [volume["name"] for volume in pod_spec(with_cache)["volumes"]] == ["tmp"]


def test_only_the_service_account_of_the_job_has_a_token() -> None:
    cluster = defaults.parse_defaults("{image: i, service_account: everyone}")
    assert pod_spec(render_text(SMALL))["automountServiceAccountToken"] is False
    for text, name, has_token in (
        ("", "everyone", False),
        ("service_account: mine\n", "mine", True),
    ):
        pod = pod_spec(render_text(SMALL + text, cluster))
        assert (pod["serviceAccountName"], pod["automountServiceAccountToken"]) == (name, has_token)


def test_network_of_defaults_is_per_accelerator() -> None:
    cluster = defaults.parse_defaults(
        "{image: i, network: {h100: hostnetwork, a100: {profile: rdma, resource: rdma/ib}}}"
    )
    h100 = "name: x\naccelerator: {type: h100}\ncommand: [python, train.py]\n"
    assert pod_spec(render_text(h100, cluster))["hostNetwork"] is True
    assert "hostNetwork" not in pod_spec(render_text(h100 + "network: default\n", cluster))
    assert "hostNetwork" not in pod_spec(render_text(SMALL, cluster))
    limits = pod_spec(render_text(h100.replace("h100", "a100"), cluster))["containers"][0][
        "resources"
    ]["limits"]
    assert limits["rdma/ib"] == "1"


def test_job_overrides_default_variables() -> None:
    text = SMALL.replace("type: cpu", "type: l4") + "env: {HOME: /home/me, JAX_PLATFORMS: cuda}\n"
    variables = environment(render_text(text))
    assert (variables["HOME"], variables["JAX_PLATFORMS"]) == ("/home/me", "cuda")
    secret = environment(
        render_text(
            text.replace("env: {HOME: /home/me, ", "secrets: {HOME: {name: s, key: k}}\nenv: {")
        )
    )
    assert secret["HOME"] == {"secretKeyRef": {"name": "s", "key": "k"}}


def test_exclusive_placement_of_slices() -> None:
    text = SMALL + "platform: gke\n"
    key = "alpha.jobset.sigs.k8s.io/exclusive-topology"

    def annotations(accelerator: str, more: str = "") -> Mapping[str, str]:
        annotations_of_jobset = render_text(text.replace("{type: cpu}", accelerator) + more)[
            "metadata"
        ]["annotations"]
        assert isinstance(annotations_of_jobset, dict)
        return annotations_of_jobset

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


@pytest.mark.parametrize("platform", table.PLATFORMS)
@pytest.mark.parametrize("kind", ACCELERATORS)
def test_accelerators_are_requested_or_refused(kind: str, platform: str) -> None:
    shape = TOPOLOGY.get(ACCELERATORS[kind].dimensions)
    topology = "" if shape is None else f", topology: {shape}"
    if kind == "plugin":
        topology = ", resource: aws.amazon.com/neuron"
    text = SMALL.replace("{type: cpu}", f"{{type: {kind}{topology}}}") + f"platform: {platform}\n"
    if kind not in table.NODES[platform]:
        with pytest.raises(
            UserError, match=f"accelerator.type = {kind} is not known on platform = {platform}"
        ):
            render_text(text)
        return
    spec, pod = load.parse_job(text), pod_spec(render_text(text))
    resources = {
        "cpu": None,
        "cuda": "nvidia.com/gpu",
        "rocm": "amd.com/gpu",
        "tpu": "google.com/tpu",
        "plugin": "aws.amazon.com/neuron",
    }
    resource = resources[spec.accelerator.platform]
    if resource is None:
        assert "resources" not in pod["containers"][0] and "nodeSelector" not in pod
    else:
        amount = {resource: str(spec.accelerator.per_host)}
        assert pod["containers"][0]["resources"] == {"requests": amount, "limits": amount}
        assert (("nodeSelector" in pod) != ("affinity" in pod)) is bool(ACCELERATORS[kind].models)
        assert {"key": resource, "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    if spec.accelerator.platform == "tpu":
        assert pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"] == shape


def test_node_selector_chooses_among_nodes() -> None:
    text = SMALL.replace("cpu", "a100") + "platform: gke\n"
    assert "affinity" in pod_spec(render_text(text))
    chosen = render_text(
        text + "node_selector: {cloud.google.com/gke-accelerator: nvidia-a100-80gb}\n"
    )
    expected = {"cloud.google.com/gke-accelerator": "nvidia-a100-80gb"}
    assert pod_spec(chosen)["nodeSelector"] == expected
    assert "affinity" not in pod_spec(chosen)


def test_host_network_ports_differ_between_jobs() -> None:
    text = SMALL + "network: hostnetwork\n"
    ports = {
        port["containerPort"]
        for name in ("x", "y", "z")
        for port in pod_spec(render_text(text.replace("name: x", f"name: {name}")))["containers"][
            0
        ]["ports"]
    }
    assert len(ports) == 6 and all(20000 <= port < 30000 for port in ports)
    assert (
        len(render(resolve(load.parse_job(text), ClusterDefaults()))) == 1
    )  # a policy would not hold there, and promise that it does


def test_network_policy_admits_gang_and_prometheus() -> None:
    _, policy = render(
        resolve(
            load.parse_job(SMALL), defaults.parse_defaults("prometheus: {namespace: monitoring}")
        )
    )
    gang = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "x"}}
    gang_rule, scrape = policy["spec"]["ingress"]
    assert policy["spec"]["podSelector"] == gang and gang_rule == {"from": [{"podSelector": gang}]}
    assert scrape["ports"] == [{"protocol": "TCP", "port": network.METRICS_PORT}]
    expected = {"kubernetes.io/metadata.name": "monitoring"}
    assert scrape["from"][0]["namespaceSelector"]["matchLabels"] == expected
    assert (
        len(render(resolve(load.parse_job(SMALL + "network_policy: false\n"), ClusterDefaults())))
        == 1
    )


def test_spec_hash_ignores_comments() -> None:
    def digest(text: str) -> str:
        return str(render_text(text)["metadata"]["annotations"][labels.SPEC_HASH])

    assert digest(SMALL) == digest("# a comment\n" + SMALL) != digest(SMALL + "grace: 61s\n")


def test_all_faults_are_reported_at_once() -> None:
    text = (
        SMALL.replace("image: registry.example/train:1\n", "")
        + "placement: {preferred: rack}\ncapacity: spot\n"
    )
    with pytest.raises(UserError) as error:
        render_text(text)
    assert "placement is done by Kueue" in str(error.value)
    assert "image is missing" in str(error.value)
    assert "capacity = spot is not known on platform = generic." in str(error.value)


def test_injected_agent_and_code_are_mounted() -> None:
    spec = load.parse_job(SMALL + "code: src\nworkdir: src/sub\n")
    _, _, shared = render(resolve(spec, ClusterDefaults()), Bundle(b"agent", b"code"))
    main = pod_spec(render_with_bundle(spec, Bundle(b"agent", b"code")))["containers"][0]
    assert main["command"] == ["python3", "-I", "/jaxlaunch/agent.pyz"]
    assert shared["binaryData"] == {"agent.pyz": "YWdlbnQ=", "code.tar.gz": "Y29kZQ=="}
    assert shared["immutable"]
    assert (
        json.loads(environment(render_with_bundle(spec, Bundle(b"agent", b"code")))[contract.JOB])[
            "workdir"
        ]
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
def test_agent_is_injected_into_foreign_images(text: str, brings: bool) -> None:
    bundle = code.build_bundle(resolve(load.parse_job(text), ClusterDefaults()).code, Path())
    assert (bundle is not None and bundle.agent is not None) == brings


def test_bundle_name_is_a_digest() -> None:
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
def test_pod_cannot_remove_launcher_variables(variables: str) -> None:
    text = SMALL + f"pod: {{spec: {{containers: [{{name: main, env: {variables}}}]}}}}\n"
    with pytest.raises(UserError, match=r"pod\.spec\.containers\.0\.env"):
        load.parse_job(text)


def test_golden_difference_must_apply() -> None:
    old = ["kind: A", "spec:", "  a: 1", "  b: 2"]
    hunks = difference(old, ["kind: A", "spec:", "  a: 2", "  b: 2", "  c: 3"])
    assert hunks == ["@@ A.spec @@", "-  a: 1", "+  a: 2", "@@ A.spec @@", "   b: 2", "+  c: 3"]
    assert patched(old, hunks) == ["kind: A", "spec:", "  a: 2", "  b: 2", "  c: 3"]
    with pytest.raises(ValueError, match="a hunk that fits nowhere:\n-  a: 1"):
        patched(["kind: A", "spec:", "  a: 3", "  b: 2"], hunks)


def test_single_efa_host_requests_one_interface() -> None:
    text = (
        "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100, per_host: 1}\nplatform: "
        "eks\nnetwork: efa\n"
    )
    (pod,) = [
        job["template"]["spec"]["template"]["spec"]
        for job in render_text(text)["spec"]["replicatedJobs"]
    ]
    (main,) = pod["containers"]
    assert main["resources"]["limits"]["vpc.amazonaws.com/efa"] == "1"
    (job,) = [
        json.loads(variable["value"])
        for variable in main["env"]
        if variable["name"] == contract.JOB
    ]
    assert job["pinning"] is None


@pytest.mark.parametrize(
    ("network", "added"), [("default", ["DAC_OVERRIDE"]), ("efa", ["DAC_OVERRIDE", "IPC_LOCK"])]
)
def test_root_gets_needed_capabilities(network: str, added: list[str]) -> None:
    text = (
        "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100}\nhosts: 2\nnetwork: "
        f"{network}\n"
    )
    cluster = defaults.parse_defaults("{platform: eks, users: {h100: root}}")
    (pod,) = [
        job["template"]["spec"]["template"]["spec"]
        for job in render_text(text, cluster)["spec"]["replicatedJobs"]
    ]
    assert pod["containers"][0]["securityContext"]["capabilities"] == {
        "drop": ["ALL"],
        "add": added,
    }

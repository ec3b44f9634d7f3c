"""The chart's admission policy: what a submitter may not write, and who is not judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness.api import MERGE, Api, Call, RefusedError
from tests.cluster.releases import Release, chart_values
from tests.cluster.waiting import wait_until
from tests.helm.charts import Helm

Object = dict[str, Any]
OURS = {"app.kubernetes.io/managed-by": "jaxlaunch"}
JOBSET = "jobset.sigs.k8s.io/jobset-name"
BASES = {
    "JobSet": "/apis/jobset.x-k8s.io/v1alpha2",
    "Job": "/apis/batch/v1",
    "Pod": "/api/v1",
    "Secret": "/api/v1",
    "ConfigMap": "/api/v1",
    "NetworkPolicy": "/apis/networking.k8s.io/v1",
}
CLASSES = [{"name": "high", "value": 10}]
ALICE, CI, ROBOT, OPERATOR = "alice", "system:serviceaccount:default:ci", "robot", "operator"


@dataclass(frozen=True)
class PolicyNamespace:
    """A namespace without Pod Security, so that only the release's policy refuses."""

    cluster: Access
    namespace: str
    folder: Path
    release: Release

    def access(self, user: str) -> Access:
        return preparations.impersonate(self.cluster, user, self.namespace, self.folder)

    def path(self, kind: str, name: str = "") -> str:
        plural = "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"
        return f"{BASES[kind]}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, api: Api, manifest: Object) -> Object:
        """Create an object in a dry run."""
        answer: Object = api.create(f"{self.path(manifest['kind'])}?dryRun=All", manifest)
        return answer

    def refusal(self, api: Api, call: Call) -> str:
        """Return the policy's message without the server's preface."""
        with pytest.raises(RefusedError) as refused:
            api.call(*call)
        preface = (
            f"ValidatingAdmissionPolicy '{self.namespace}.team' with binding "
            f"'{self.namespace}.team' denied request: "
        )
        _, is_policy, words = str(refused.value).partition(preface)
        assert is_policy and refused.value.status == 422, refused.value
        return words


def make_manifest(
    kind: str, spec: Object | None = None, labels: Object | None = None, name: str = "evil"
) -> Object:
    version = BASES[kind].removeprefix("/apis/").removeprefix("/api/")
    document: Object = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels or {}},
    }
    return document | ({} if spec is None else {"spec": spec})


def make_pod(**spec: Any) -> Object:
    basic = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}]}
    return make_manifest("Pod", basic | {"securityContext": {"runAsNonRoot": True}} | spec)


def make_job(**spec: Any) -> Object:
    return make_manifest("Job", {"template": {"spec": make_pod(**spec)["spec"]}})


def make_jobset(**spec: Any) -> Object:
    """Return a JobSet whose second template has this spec."""
    parts = [
        {"name": name, "replicas": 1, "template": {"spec": make_job(**spec_of_job)["spec"]}}
        for name, spec_of_job in (("w", {}), ("x", spec))
    ]
    return make_manifest("JobSet", {"replicatedJobs": parts})


def make_network_policy(labels: Object, selected: Object, **spec: Any) -> Object:
    return make_manifest(
        "NetworkPolicy", {"podSelector": selected, "ingress": [{}], **spec}, labels
    )


@pytest.fixture(scope="module")
def stage(
    helm: Helm, cluster: Access, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PolicyNamespace]:
    namespace = preparations.make_namespace(cluster, "privileged")
    stage = PolicyNamespace(
        cluster, namespace, tmp_path_factory.mktemp("users"), Release(helm, cluster, namespace)
    )
    users: list[Object] = [{"kind": "User", "name": name} for name in (ALICE, OPERATOR)]
    users += [
        {"kind": "ServiceAccount", "name": "ci", "namespace": "default"},
        {"kind": "ServiceAccount", "name": ROBOT},
    ]
    exempt = {"admissionPolicy": {"exempt": [{"kind": "User", "name": OPERATOR}]}}
    stage.release.install(
        chart_values(
            cluster,
            kueue={"enabled": False},
            rbac={"submitters": users},
            priorityClasses=CLASSES,
            **exempt,
        )
    )
    admin = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "admin"}}
    try:
        cluster.api.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", admin)
        grant_rights(cluster, namespace, users)
        alice = stage.access(ALICE).api
        wait_until(
            lambda: is_accepted(stage, alice, make_jobset(hostPID=True)),
            lambda seen: not seen,
            "the policy is in force",
        )
        yield stage
    finally:
        stage.release.uninstall()
        preparations.remove_namespace(cluster, namespace)


def grant_rights(cluster: Access, namespace: str, users: list[Object]) -> None:
    """Allow what the chart's Role does not, so that the policy refuses it."""
    rights = "rbac.authorization.k8s.io"
    rules = [
        {"apiGroups": [""], "resources": ["pods", "secrets"], "verbs": ["create"]},
        {"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["delete"]},
        {"apiGroups": ["networking.k8s.io"], "resources": ["networkpolicies"], "verbs": ["patch"]},
    ]
    role = {
        "apiVersion": f"{rights}/v1",
        "kind": "Role",
        "metadata": {"name": "more"},
        "rules": rules,
    }
    subjects = [
        {"namespace": namespace, **user} if user["kind"] == "ServiceAccount" else user
        for user in users
    ]
    binding = {
        "apiVersion": f"{rights}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "more"},
        "roleRef": {"apiGroup": rights, "kind": "Role", "name": "more"},
        "subjects": subjects,
    }
    for kind, body in (("roles", role), ("rolebindings", binding)):
        cluster.api.create(f"/apis/{rights}/v1/namespaces/{namespace}/{kind}", body)


def is_accepted(stage: PolicyNamespace, api: Api, document: Object) -> bool:
    try:
        stage.create(api, document)
    except RefusedError:
        return False
    return True


HOST_PATH = {
    "volumes": [{"name": "h", "hostPath": {"path": "/var/run"}}, {"name": "t", "emptyDir": {}}]
}
PRIVILEGED = {"name": "root", "image": "i", "securityContext": {"privileged": True}}
ROOT = (
    "root is not allowed in namespace NS. Set runAsNonRoot: true, or ASK name the accelerator in "
    "defaults.users, or "
    "set admissionPolicy.root=true."
)
ADDED = (
    "to add SYS_ADMIN, IPC_LOCK is not allowed in namespace NS. Leave capabilities out, or ASK set "
    "admissionPolicy.privileged=true."
)


def secured_container(resource: str | None = None, amount: str = "1", **security: Any) -> Object:
    """Return a container with this securityContext and an amount of the resource."""
    resources = (
        {}
        if resource is None
        else {"resources": {"limits": {resource: amount}, "requests": {resource: amount}}}
    )
    return {"name": "main", "image": "i", "securityContext": security} | resources


PRIORITY = (
    "priority class {} is not allowed in namespace NS: it may preempt other teams' pods. Leave "
    "it out, use "
    "NS.team.high, or ASK add it to admissionPolicy.priorityClasses."
)
TOLERATES = (
    "to tolerate {} is not allowed in namespace NS. Name the taints of the nodes that the pods are "
    "for, or ASK add a "
    "system taint to admissionPolicy.systemTaints."
)
NODE = "nodeName is not allowed in namespace NS: it bypasses the scheduler. Use nodeSelector."
DEADLINE = (
    "activeDeadlineSeconds of a pod is not allowed in namespace NS: it moves the pod to the "
    "ResourceQuotas of scope "
    "Terminating. Set it on the Job (`deadline:`)."
)
LABELLED = (
    "pods in namespace NS may not be labelled {}: controllers, Services and NetworkPolicies know "
    "by it whose pods they "
    "are. Leave it out."
)
WEB_DASHBOARD = "jaxlaunch.io/web-dashboard"
WHOSE = (
    "the label {} says whose job it is, and may not be changed in namespace NS. Leave it as it is."
)
OWNED = (
    "ownerReferences are not allowed in namespace NS: only controllers make one object "
    "another's. Leave them out."
)
SCHEDULER = (
    "scheduler own is not allowed in namespace NS. Leave schedulerName out, or ASK add it to "
    "admissionPolicy.schedulers."
)
PLACES = {"JobSet": "JobSet evil, replicatedJob x", "Job": "Job evil", "Pod": "Pod evil"}


def with_toleration(key: str | None, **fields: Any) -> Object:
    return {
        "tolerations": [{"operator": "Exists", **({} if key is None else {"key": key}), **fields}]
    }


def with_labels(kind: str, **labels: str) -> Object:
    """Return pods with these labels, or a Pod; `__` stands for a slash, and `_` for a dot."""
    labels_of_pod = {
        key.replace("__", "/").replace("_", "."): value for key, value in labels.items()
    }
    document = {"JobSet": make_jobset, "Job": make_job, "Pod": make_pod}[kind]()
    if kind == "Pod":
        document["metadata"]["labels"] = labels_of_pod
    template = {
        "JobSet": lambda: document["spec"]["replicatedJobs"][1]["template"]["spec"],
        "Job": lambda: document["spec"],
    }
    if kind in template:
        template[kind]()["template"]["metadata"] = {"labels": labels_of_pod}
    return document


def with_metadata(document: Object, **metadata: Any) -> Object:
    document["metadata"] |= metadata
    return document


OWNER = [{"apiVersion": "v1", "kind": "ConfigMap", "name": "kube-root-ca.crt", "uid": "1234"}]
SYSTEM_TAINTS = (
    "node-role.kubernetes.io/control-plane",
    "node.kubernetes.io/unschedulable",
    "node.kubernetes.io/unreachable",
    "node.cloudprovider.kubernetes.io/uninitialized",
    "ToBeDeletedByClusterAutoscaler",
    "karpenter.sh/disrupted",
)
# What reaches beyond the team: priorities, nodes, schedulers, taints, quotas, and what belongs to
# somebody else.
BEYOND: list[tuple[Object, str]] = [
    *(
        (made(priorityClassName=name), f"{made()['kind']} evil: {PRIORITY.format(name)}")
        for made in (make_jobset, make_job, make_pod)
        for name in ("system-node-critical", "system-cluster-critical")
    ),
    *(
        (
            with_metadata(made(), labels={"kueue.x-k8s.io/priority-class": "theirs"}),
            f"{made()['kind']} evil: {PRIORITY.format('theirs')}",
        )
        for made in (make_jobset, make_job)
    ),
    *(
        (made(nodeName="node-0"), f"{PLACES[made()['kind']]}: {NODE}")
        for made in (make_jobset, make_job, make_pod)
    ),
    *(
        (made(schedulerName="own"), f"{made()['kind']} evil: {SCHEDULER}")
        for made in (make_jobset, make_job, make_pod)
    ),
    *(
        (made(**with_toleration(None)), f"{made()['kind']} evil: {TOLERATES.format('every taint')}")
        for made in (make_jobset, make_job, make_pod)
    ),
    *(
        (make_jobset(**with_toleration(key)), f"JobSet evil: {TOLERATES.format(key)}")
        for key in SYSTEM_TAINTS
    ),
    (
        make_jobset(**with_toleration("node.kubernetes.io/unreachable", effect="NoSchedule")),
        f"JobSet evil: {TOLERATES.format('node.kubernetes.io/unreachable')}",
    ),
    (
        make_jobset(
            **with_toleration(
                "node.kubernetes.io/not-ready", effect="NoExecute", tolerationSeconds=10**9
            )
        ),
        f"JobSet evil: {TOLERATES.format('node.kubernetes.io/not-ready')}",
    ),
    *(
        (made(activeDeadlineSeconds=60), f"{PLACES[made()['kind']]}: {DEADLINE}")
        for made in (make_jobset, make_job, make_pod)
    ),
    *(  # with its own name too, for the release of a dashboard may be called so
        (
            with_labels(kind, **{"jaxlaunch_io__web-dashboard": "evil"}),
            f"{kind} evil: {LABELLED.format(WEB_DASHBOARD)}",
        )
        for kind in ("JobSet", "Job", "Pod")
    ),
    *(
        (
            with_labels(kind, **{key.replace(".", "_").replace("/", "__"): "other"}),
            f"{kind} evil: {LABELLED.format(key)}",
        )
        for kind in ("JobSet", "Job", "Pod")
        for key in (
            JOBSET,
            "batch.kubernetes.io/job-name",
            "kueue.x-k8s.io/managed",
            "jaxlaunch.io/job",
            "controller-uid",
        )
        if kind != "Job"
        or key
        not in ("batch.kubernetes.io/job-name", "controller-uid")  # Kubernetes' own to refuse
    ),
    (
        with_metadata(make_jobset(), labels={"jaxlaunch.io/job": "other"}),
        f"JobSet evil: {WHOSE.format('jaxlaunch.io/job')}",
    ),
    *(
        (with_metadata(made(), ownerReferences=OWNER), f"{made()['kind']} evil: {OWNED}")
        for made in (make_jobset, make_job, make_pod)
    ),
]


ONLY_OURS = {
    "ConfigMap": "submitters in namespace NS write only the ConfigMaps of jobs, which "
    "have the label "
    "app.kubernetes.io/managed-by: jaxlaunch and a name that begins with jaxlaunch-. Name and "
    "label it so, or ASK make "
    "the change.",
    "NetworkPolicy": "submitters in namespace NS write only the NetworkPolicies of jobs, which "
    "have the label "
    "app.kubernetes.io/managed-by: jaxlaunch. Label it so, or ASK make the change.",
}
ONLY_GANGS = (
    "submitters in namespace NS write only the Secrets of gangs, which have the label "
    "app.kubernetes.io/managed-by: "
    "jaxlaunch, a name that ends with -gang, type Opaque and no annotations. Write it so, or ASK "
    "make the Secret."
)
ONE_JOB = (
    "NetworkPolicy evil: a NetworkPolicy of a submitter in namespace NS is for ingress, and for "
    "the pods of the JobSet "
    "of its name. Use policyTypes: [Ingress] and podSelector: {matchLabels: "
    "{jobset.sigs.k8s.io/jobset-name: evil}}."
)
ACCOUNT = (
    "pods in namespace NS may not run as ServiceAccount admin. Use team-jobs or default, or "
    "ASK add it to "
    "admissionPolicy.serviceAccounts."
)
TOKEN: Object = {
    "type": "kubernetes.io/service-account-token",
    "metadata": {"name": "evil", "annotations": {"kubernetes.io/service-account.name": "default"}},
}
# What is written, and the words of the refusal.
FORBIDDEN: list[tuple[Object, str]] = [
    *(
        (
            made(**{field: True}),
            f"{place}: {field}: true is not allowed in namespace NS. Leave it out{more}.",
        )
        for made, place in (
            (make_jobset, "JobSet evil, replicatedJob x"),
            (make_job, "Job evil"),
            (make_pod, "Pod evil"),
        )
        for field, more in (
            ("hostPID", ""),
            ("hostIPC", ""),
            (
                "hostNetwork",
                ", use another `network:`, or ASK set admissionPolicy.hostNetwork=true",
            ),
        )
    ),
    *(
        (
            made(**HOST_PATH),
            f"{made()['kind']} evil: hostPath /var/run is not allowed in namespace NS. "
            "Mount a PersistentVolumeClaim, or ASK add the path to admissionPolicy.hostPaths.",
        )
        for made in (make_jobset, make_job, make_pod)
    ),
    *(
        (
            make_jobset(**{containers: [PRIVILEGED]}),
            "JobSet evil: privileged: true is not allowed in namespace NS. Leave it out, "
            "or ASK set admissionPolicy.privileged=true.",
        )
        for containers in ("containers", "initContainers")
    ),
    *(
        (made(securityContext=context), f"{place}: {ROOT}")
        for context in ({}, {"runAsUser": 0}, {"runAsNonRoot": False})
        for made, place in (
            (make_jobset, "JobSet evil, replicatedJob x"),
            (make_job, "Job evil"),
            (make_pod, "Pod evil"),
        )
    ),
    (make_pod(containers=[secured_container(runAsUser=0)]), f"Pod evil: {ROOT}"),
    (
        make_pod(initContainers=[secured_container(runAsNonRoot=False) | {"name": "first"}]),
        f"Pod evil: {ROOT}",
    ),
    (
        make_pod(
            containers=[secured_container(capabilities={"add": ["SYS_ADMIN", "CHOWN", "IPC_LOCK"]})]
        ),
        f"Pod evil: {ADDED}",
    ),
    (make_jobset(serviceAccountName="admin"), f"JobSet evil: {ACCOUNT}"),
    # The name of old, which the Job passes on.
    (make_jobset(serviceAccount="admin"), f"JobSet evil: {ACCOUNT}"),
    (make_job(serviceAccountName="admin"), f"Job evil: {ACCOUNT}"),
    (make_pod(serviceAccountName="admin"), f"Pod evil: {ACCOUNT}"),
    (
        make_manifest("Secret") | TOKEN,
        "Secret evil: a token of a ServiceAccount may not be made in namespace NS. Leave out type: "
        "kubernetes.io/service-account-token.",
    ),
    *(
        (made, f"Secret {made['metadata']['name']}: {ONLY_GANGS}")
        for made in (
            make_manifest("Secret"),
            make_manifest("Secret", labels=OURS),
            make_manifest("Secret", name="evil-gang"),
            make_manifest("Secret", labels=OURS, name="evil-gang") | {"type": "helm.sh/release.v1"},
            with_metadata(
                make_manifest("Secret", labels=OURS, name="evil-gang"), annotations={"a": "b"}
            ),
        )
    ),
    *(
        (
            make_manifest("ConfigMap", labels=labels, name=name),
            f"ConfigMap {name}: {ONLY_OURS['ConfigMap']}",
        )
        for name, labels in (("evil", {}), ("jaxlaunch-evil", {}), ("evil", OURS))
    ),
    (
        make_network_policy({}, {"matchLabels": {JOBSET: "evil"}}),
        f"NetworkPolicy evil: {ONLY_OURS['NetworkPolicy']}",
    ),
    (make_network_policy(OURS, {}), ONE_JOB),
    (make_network_policy(OURS, {"matchLabels": {JOBSET: "other"}}), ONE_JOB),
    (make_network_policy(OURS, {"matchLabels": {JOBSET: "evil"}}, egress=[{}]), ONE_JOB),
]
MANY = {
    "name": "main",
    "image": "i",
    "env": [{"name": f"V{number}", "value": "x" * 400} for number in range(1000)],
}
ALLOWED: list[Object] = [
    make_jobset(),
    make_jobset(containers=[MANY], initContainers=[MANY]),  # what an expression may cost is limited
    make_jobset(serviceAccountName="default", serviceAccount="admin"),  # runs as the former
    make_pod(
        securityContext={},
        containers=[
            secured_container(runAsUser=5),
            secured_container(runAsNonRoot=True) | {"name": "b"},
        ],
    ),
    make_pod(
        securityContext={"runAsUser": 7},
        containers=[secured_container(capabilities={"add": ["CHOWN"]})],
    ),
    make_jobset(
        **with_toleration(
            "node.kubernetes.io/unreachable", effect="NoExecute", tolerationSeconds=30
        )
    ),
    make_jobset(**with_toleration("nvidia.com/gpu"), schedulerName="default-scheduler"),
    with_metadata(
        make_jobset(),
        labels={"jaxlaunch.io/job": "evil", "app.kubernetes.io/managed-by": "jaxlaunch"},
    ),
    with_labels("JobSet", jaxlaunch_io__job="evil", team="a"),
    with_labels("Job", jaxlaunch_io__job="evil"),
    make_jobset(serviceAccountName="team-jobs", volumes=[{"name": "t", "emptyDir": {}}]),
    make_job(),
    make_pod(),
    make_manifest("Secret", labels=OURS, name="evil-gang"),
    make_manifest("ConfigMap", labels=OURS, name="jaxlaunch-0123456789ab"),
    make_network_policy(OURS, {"matchLabels": {JOBSET: "evil"}}),
]


def fill_names(stage: PolicyNamespace, words: str) -> str:
    """Return the message with the names of this release."""
    ask = f"ask whoever installed the chart (release team of namespace {stage.namespace}) to"
    return words.replace("NS", stage.namespace).replace("ASK", ask)


def test_forbidden_manifests_are_refused_with_an_explanation(stage: PolicyNamespace) -> None:
    alice = stage.access(ALICE).api
    for document, words in FORBIDDEN + BEYOND:
        call = Call("POST", f"{stage.path(document['kind'])}?dryRun=All", document)
        assert stage.refusal(alice, call) == fill_names(stage, words)
    for document in ALLOWED:
        stage.create(alice, document)


def test_submitter_may_change_and_delete_objects_of_a_job(stage: PolicyNamespace) -> None:
    """Change as `launcher` does: add an owner to a shared ConfigMap, delete old objects."""
    api = stage.access(ALICE).api
    config = make_manifest("ConfigMap", labels=OURS, name="jaxlaunch-0123456789ab")
    network = make_network_policy(OURS, {"matchLabels": {JOBSET: "evil"}})
    for document in (config, network):
        api.create(stage.path(document["kind"]), document)
    api.merge(
        stage.path("ConfigMap", "jaxlaunch-0123456789ab"),
        {"metadata": {"annotations": {"seen": "yes"}}},
    )
    api.delete(stage.path("NetworkPolicy", "evil"))
    api.delete(stage.path("ConfigMap", "jaxlaunch-0123456789ab"))


def test_cluster_defaults_and_default_deny_cannot_be_changed(stage: PolicyNamespace) -> None:
    """Check that a label of jaxlaunch does not make them a job's."""
    alice, relabel = stage.access(ALICE).api, {"metadata": {"labels": OURS}}
    defaults = stage.path("ConfigMap", "jaxlaunch")
    deny = stage.path("NetworkPolicy", "team-default-deny")
    changed = {"data": {"defaults.yaml": "image: evil"}}
    for kind, call in (
        ("ConfigMap", Call("PATCH", defaults, changed, MERGE)),
        ("ConfigMap", Call("PATCH", defaults, relabel, MERGE)),
        ("ConfigMap", Call("DELETE", defaults)),
        ("NetworkPolicy", Call("DELETE", deny)),
        ("NetworkPolicy", Call("PATCH", deny, relabel, MERGE)),
    ):
        name = call.path.rpartition("/")[2]
        assert stage.refusal(alice, call) == fill_names(stage, f"{kind} {name}: {ONLY_OURS[kind]}")
    assert "evil" not in stage.cluster.api.get(defaults)["data"]["defaults.yaml"]
    assert stage.cluster.api.get(deny)["spec"]["policyTypes"] == ["Ingress"]


def test_submitter_stops_a_job_by_its_workload_without_a_priority(stage: PolicyNamespace) -> None:
    alice = stage.access(ALICE).api
    workloads = f"/apis/{preparations.KUEUE}/namespaces/{stage.namespace}/workloads"
    template = {"spec": make_pod()["spec"]}
    spec = {"queueName": "absent", "podSets": [{"name": "main", "count": 1, "template": template}]}
    workload = {
        "apiVersion": preparations.KUEUE,
        "kind": "Workload",
        "metadata": {"name": "queued"},
        "spec": spec,
    }
    stage.cluster.api.create(workloads, workload)
    path = f"{workloads}/queued"
    for patch in ({"priority": 1000}, {"queueName": "other"}, {"active": False, "priority": 1000}):
        words = stage.refusal(alice, Call("PATCH", path, {"spec": patch}, MERGE))
        assert words.startswith(
            f"Workload queued: submitters in namespace {stage.namespace} change only spec.active"
        )
    for active in (False, True):
        assert alice.merge(path, {"spec": {"active": active}})["spec"]["active"] is active
    stage.cluster.api.delete(path)


def test_policy_judges_submitters_but_no_controllers_or_administrators(
    stage: PolicyNamespace,
) -> None:
    document = make_manifest("ConfigMap", name="settings")
    for user in (ALICE, CI, f"system:serviceaccount:{stage.namespace}:{ROBOT}"):
        assert not is_accepted(stage, stage.access(user).api, document), user
    assert is_accepted(stage, stage.access(OPERATOR).api, document)
    assert is_accepted(stage, stage.cluster.api, document)
    # The controller of kube-system that gives each namespace the cluster's certificate.
    root = stage.path("ConfigMap", "kube-root-ca.crt")
    first = stage.cluster.api.get(root)["metadata"]["uid"]
    stage.cluster.api.delete(root)

    def again() -> bool:
        try:
            return bool(stage.cluster.api.get(root)["metadata"]["uid"] != first)
        except RefusedError:
            return False

    wait_until(again, bool, "kube-root-ca.crt is made again")


def test_job_older_than_the_policy_can_be_stopped_but_not_made_worse(
    stage: PolicyNamespace,
) -> None:
    alice, earlier = stage.access(ALICE).api, make_jobset(hostNetwork=True, initContainers=[MANY])
    earlier["metadata"]["name"] = "earlier"
    earlier["spec"]["suspend"] = True
    path = stage.path("JobSet", "earlier")
    stage.cluster.api.create(stage.path("JobSet"), earlier)
    alice.merge(path, {"metadata": {"labels": {"seen": "yes"}}})
    assert (
        alice.merge(f"{path}?dryRun=All", {"spec": {"suspend": False}})["spec"]["suspend"] is False
    )
    parts = stage.cluster.api.get(path)["spec"]["replicatedJobs"]
    parts[0]["template"]["spec"]["template"]["spec"]["hostPID"] = True
    words = stage.refusal(alice, Call("PATCH", path, {"spec": {"replicatedJobs": parts}}, MERGE))
    assert words.startswith("JobSet earlier, replicatedJob w: hostPID: true is not allowed")
    alice.delete(path)


def test_owner_label_is_kept_and_the_team_priority_is_allowed(stage: PolicyNamespace) -> None:
    alice, document = (
        stage.access(ALICE).api,
        make_jobset(priorityClassName=f"{stage.namespace}.team.high"),
    )
    document["spec"]["suspend"] = True
    document["metadata"] |= {"name": "mine", "labels": {**OURS, "jaxlaunch.io/job": "mine"}}
    alice.create(stage.path("JobSet"), document)
    path = stage.path("JobSet", "mine")
    for key in ("jaxlaunch.io/job", "app.kubernetes.io/managed-by"):
        for value in (None, "other"):
            words = stage.refusal(
                alice, Call("PATCH", path, {"metadata": {"labels": {key: value}}}, MERGE)
            )
            assert words == fill_names(stage, f"JobSet mine: {WHOSE.format(key)}")
    with pytest.raises(
        AssertionError, match="the label jaxlaunch.io/job says whose job it is"
    ):  # as a person tries it
        stage.access(ALICE).kubectl(
            "label", "jobset", "mine", "jaxlaunch.io/job-", "-n", stage.namespace
        )
    manifests = json.dumps(make_jobset(priorityClassName="system-node-critical"))
    with pytest.raises(AssertionError, match="priority class system-node-critical is not allowed"):
        stage.access(ALICE).kubectl("create", "-n", stage.namespace, "-f", "-", text=manifests)
    alice.merge(path, {"metadata": {"labels": {"seen": "yes"}}})
    alice.delete(path)


def test_expressions_of_the_policy_pass_type_checking(stage: PolicyNamespace) -> None:
    path = (
        f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{stage.namespace}.team"
    )
    status = wait_until(
        lambda: stage.cluster.api.get(path).get("status", {}),
        lambda seen: "typeChecking" in seen,
        "its types",
    )
    assert status["typeChecking"] == {}


def test_root_is_allowed_only_by_the_cluster_defaults(stage: PolicyNamespace) -> None:
    """Change the release, as the next test does."""
    people = {"submitters": [{"kind": "User", "name": ALICE}]}
    more = {"users": {"v5e": "root", "v4": 2000, "h100": "privileged"}}
    stage.release.upgrade(
        chart_values(stage.cluster, kueue={"enabled": False}, rbac=people, defaults=more)
    )
    alice = stage.access(ALICE).api
    may_become: Object = {"runAsUser": 0, "runAsNonRoot": False}
    root: Object = {**may_become, "allowPrivilegeEscalation": False}
    tpu, gpu = "google.com/tpu", "nvidia.com/gpu"
    pinning: Object = {**root, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    wait_until(
        lambda: is_accepted(stage, alice, make_pod(containers=[secured_container(tpu, **pinning)])),
        bool,
        "the new policy is in force",
    )
    assert is_accepted(
        stage, alice, make_pod(containers=[secured_container(gpu, privileged=True, **may_become)])
    )
    assert is_accepted(
        stage, alice, jobset_of_one(containers=[secured_container(gpu, "8", **root)])
    )
    assert is_accepted(
        stage,
        alice,
        make_pod(containers=[secured_container(runAsUser=7, allowPrivilegeEscalation=False)]),
    )
    for container in (
        secured_container(**root),
        secured_container(tpu, privileged=True, **root),
        secured_container(tpu, **root, capabilities={"add": ["SYS_ADMIN"]}),
        secured_container("cpu", **root),
        secured_container(tpu, "0", **root),
        secured_container(tpu, "0k", **root),
        secured_container(gpu, "0", privileged=True, **may_become),
        secured_container(tpu, **may_become),
        secured_container(runAsUser=7),
    ):
        assert not is_accepted(stage, alice, make_pod(containers=[container])), container


DAEMON: Object = {
    "name": "tcpxo-daemon",
    "image": "rxdm:1",
    "restartPolicy": "Always",
    "command": ["/bin/sh", "-c"],
    "args": [
        "set -ex; chmod 755 /fts/entrypoint_rxdm_container.sh; exec "
        "/fts/entrypoint_rxdm_container.sh --num_hops=2"
    ],
    "env": [{"name": "LD_LIBRARY_PATH", "value": "/usr/local/nvidia/lib64"}],
    "securityContext": {
        "runAsNonRoot": False,
        "runAsUser": 0,
        "capabilities": {"add": ["NET_ADMIN", "NET_BIND_SERVICE"]},
    },
    "volumeMounts": [{"name": "libraries", "mountPath": "/usr/local/nvidia"}],
}
LIBRARIES = {"name": "libraries", "hostPath": {"path": "/home/kubernetes/bin/nvidia"}}


def with_daemon(amount: str = "8", volume: Object = LIBRARIES, **changes: Any) -> list[Object]:
    """Return a Pod and a JobSet with the changed daemon of gpudirect-tcpxo and a GPU container."""
    main = secured_container("nvidia.com/gpu", amount, allowPrivilegeEscalation=False)
    spec = {"containers": [main], "initContainers": [DAEMON | changes], "volumes": [volume]}
    return [make_pod(automountServiceAccountToken=False, **spec), jobset_of_one(**spec)]


def test_only_the_tcpxo_daemon_of_its_image_may_be_root(stage: PolicyNamespace) -> None:
    """Change the release, as the next test does."""
    people, more = {"submitters": [{"kind": "User", "name": ALICE}]}, {"tcpxo": {"image": "rxdm:1"}}
    stage.release.upgrade(
        chart_values(stage.cluster, kueue={"enabled": False}, rbac=people, defaults=more)
    )
    alice = stage.access(ALICE).api
    wait_until(
        lambda: all(is_accepted(stage, alice, document) for document in with_daemon()),
        bool,
        "the new policy is in force",
    )
    security = DAEMON["securityContext"]
    for changed in (
        with_daemon("0"),
        with_daemon(name="other"),
        with_daemon(image="rxdm:2"),
        with_daemon(command=["/bin/bash", "-c"]),
        with_daemon(args=["id"]),
        with_daemon(env=[{"name": "LD_PRELOAD", "value": "/tmp/evil.so"}]),
        with_daemon(lifecycle={"postStart": {"exec": {"command": ["id"]}}}),
        with_daemon(volume={"name": "libraries", "emptyDir": {}}),
        with_daemon(volumeMounts=[{"name": "libraries", "mountPath": "/fts"}]),
        with_daemon(securityContext=security | {"capabilities": {"add": ["SYS_ADMIN"]}}),
        with_daemon(securityContext=security | {"privileged": True}),
        [make_pod(containers=[DAEMON | {"volumeMounts": [], "restartPolicy": None}])],
    ):
        assert not any(is_accepted(stage, alice, document) for document in changed), changed


def test_exceptions_of_the_values_are_allowed(stage: PolicyNamespace) -> None:
    """Run last, since it changes the release."""
    more = {
        "network": {"h100": "hostnetwork"},
        "tcpxo": {"image": "rxdm:1"},
        "service_account": "trainer",
    }
    allowed = {"hostPaths": ["/mnt/data"], "serviceAccounts": [], "privileged": True}
    people = {"submitters": [{"kind": "User", "name": ALICE}]}
    stage.release.upgrade(
        chart_values(
            stage.cluster,
            kueue={"enabled": False},
            rbac=people,
            defaults=more,
            admissionPolicy=allowed,
        )
    )
    alice = stage.access(ALICE).api
    volumes = [
        {"name": name, "hostPath": {"path": path}}
        for name, path in (("a", "/sys"), ("b", "/mnt/data"))
    ]
    parts = {"volumes": volumes, "serviceAccountName": "trainer", "initContainers": [PRIVILEGED]}
    wait_until(
        lambda: is_accepted(stage, alice, jobset_of_one(hostNetwork=True, **parts)),
        bool,
        "the new policy is in force",
    )
    assert not is_accepted(stage, alice, jobset_of_one(hostPID=True, **parts))
    nameless = Call("POST", f"{stage.path('JobSet')}?dryRun=All", make_jobset())
    assert "may not run as ServiceAccount default" in stage.refusal(alice, nameless)


def jobset_of_one(**spec: Any) -> Object:
    """Return a JobSet of one template."""
    document = make_jobset(**spec)
    document["spec"]["replicatedJobs"] = document["spec"]["replicatedJobs"][1:]
    return document

"""The chart's admission policy: what a submitter may not write, tried by hand-written manifests; who is not judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.harness.api import MERGE, Api, Call, Refused
from tests.cluster.releases import Release, values
from tests.cluster.waiting import until
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
class Stage:
    """A namespace that Pod Security lets everything into, so that only the policy of its release says no."""

    cluster: Access
    namespace: str
    folder: Path
    release: Release

    def access(self, user: str) -> Access:
        return preparations.impersonating(self.cluster, user, self.namespace, self.folder)

    def path(self, kind: str, name: str = "") -> str:
        plural = "networkpolicies" if kind == "NetworkPolicy" else f"{kind.lower()}s"
        return f"{BASES[kind]}/namespaces/{self.namespace}/{plural}" + (f"/{name}" if name else "")

    def create(self, api: Api, manifest: Object) -> Object:
        """A rehearsal: nothing is kept."""
        made: Object = api.create(f"{self.path(manifest['kind'])}?dryRun=All", manifest)
        return made

    def refusal(self, api: Api, call: Call) -> str:
        """The policy's words, without the server's preface."""
        with pytest.raises(Refused) as refused:
            api.call(*call)
        preface = (
            f"ValidatingAdmissionPolicy '{self.namespace}.team' with binding "
            f"'{self.namespace}.team' denied request: "
        )
        _, found, words = str(refused.value).partition(preface)
        assert found and refused.value.status == 422, refused.value
        return words


def manifest(
    kind: str, spec: Object | None = None, labels: Object | None = None, name: str = "evil"
) -> Object:
    version = BASES[kind].removeprefix("/apis/").removeprefix("/api/")
    made: Object = {
        "apiVersion": version,
        "kind": kind,
        "metadata": {"name": name, "labels": labels or {}},
    }
    return made | ({} if spec is None else {"spec": spec})


def pod(**spec: Any) -> Object:
    basic = {"restartPolicy": "Never", "containers": [{"name": "main", "image": "i"}]}
    return manifest("Pod", basic | {"securityContext": {"runAsNonRoot": True}} | spec)


def job(**spec: Any) -> Object:
    return manifest("Job", {"template": {"spec": pod(**spec)["spec"]}})


def jobset(**spec: Any) -> Object:
    """Its second template is the one with this spec."""
    parts = [
        {"name": name, "replicas": 1, "template": {"spec": job(**each)["spec"]}}
        for name, each in (("w", {}), ("x", spec))
    ]
    return manifest("JobSet", {"replicatedJobs": parts})


def policy(labels: Object, selected: Object, **spec: Any) -> Object:
    return manifest("NetworkPolicy", {"podSelector": selected, "ingress": [{}], **spec}, labels)


@pytest.fixture(scope="module")
def stage(helm: Helm, cluster: Access, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    namespace = preparations.make_namespace(cluster, "privileged")
    found = Stage(
        cluster, namespace, tmp_path_factory.mktemp("users"), Release(helm, cluster, namespace)
    )
    users: list[Object] = [{"kind": "User", "name": name} for name in (ALICE, OPERATOR)]
    users += [
        {"kind": "ServiceAccount", "name": "ci", "namespace": "default"},
        {"kind": "ServiceAccount", "name": ROBOT},
    ]
    exempt = {"admissionPolicy": {"exempt": [{"kind": "User", "name": OPERATOR}]}}
    found.release.install(
        values(
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
        allow_more(cluster, namespace, users)
        alice = found.access(ALICE).api
        until(
            lambda: accepts(found, alice, jobset(hostPID=True)),
            lambda seen: not seen,
            "the policy is in force",
        )
        yield found
    finally:
        found.release.uninstall()
        preparations.remove_namespace(cluster, namespace)


def allow_more(cluster: Access, namespace: str, users: list[Object]) -> None:
    """What the chart's Role does not allow, so that it is the policy that refuses it."""
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
        {"namespace": namespace, **each} if each["kind"] == "ServiceAccount" else each
        for each in users
    ]
    binding = {
        "apiVersion": f"{rights}/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "more"},
        "roleRef": {"apiGroup": rights, "kind": "Role", "name": "more"},
        "subjects": subjects,
    }
    for kind, made in (("roles", role), ("rolebindings", binding)):
        cluster.api.create(f"/apis/{rights}/v1/namespaces/{namespace}/{kind}", made)


def accepts(stage: Stage, api: Api, made: Object) -> bool:
    try:
        stage.create(api, made)
    except Refused:
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


def secured(resource: str | None = None, amount: str = "1", **security: Any) -> Object:
    """A container with this securityContext, and so much of the resource."""
    asked = (
        {}
        if resource is None
        else {"resources": {"limits": {resource: amount}, "requests": {resource: amount}}}
    )
    return {"name": "main", "image": "i", "securityContext": security} | asked


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


def tolerating(key: str | None, **more: Any) -> Object:
    return {
        "tolerations": [{"operator": "Exists", **({} if key is None else {"key": key}), **more}]
    }


def labelled(kind: str, **labels: str) -> Object:
    """Pods with these labels, or a Pod; `__` is written for a slash, and `_` for a dot."""
    given = {key.replace("__", "/").replace("_", "."): value for key, value in labels.items()}
    made = {"JobSet": jobset, "Job": job, "Pod": pod}[kind]()
    if kind == "Pod":
        made["metadata"]["labels"] = given
    template = {
        "JobSet": lambda: made["spec"]["replicatedJobs"][1]["template"]["spec"],
        "Job": lambda: made["spec"],
    }
    if kind in template:
        template[kind]()["template"]["metadata"] = {"labels": given}
    return made


def whole(made: Object, **metadata: Any) -> Object:
    made["metadata"] |= metadata
    return made


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
        for made in (jobset, job, pod)
        for name in ("system-node-critical", "system-cluster-critical")
    ),
    *(
        (
            whole(made(), labels={"kueue.x-k8s.io/priority-class": "theirs"}),
            f"{made()['kind']} evil: {PRIORITY.format('theirs')}",
        )
        for made in (jobset, job)
    ),
    *(
        (made(nodeName="node-0"), f"{PLACES[made()['kind']]}: {NODE}")
        for made in (jobset, job, pod)
    ),
    *(
        (made(schedulerName="own"), f"{made()['kind']} evil: {SCHEDULER}")
        for made in (jobset, job, pod)
    ),
    *(
        (made(**tolerating(None)), f"{made()['kind']} evil: {TOLERATES.format('every taint')}")
        for made in (jobset, job, pod)
    ),
    *(
        (jobset(**tolerating(key)), f"JobSet evil: {TOLERATES.format(key)}")
        for key in SYSTEM_TAINTS
    ),
    (
        jobset(**tolerating("node.kubernetes.io/unreachable", effect="NoSchedule")),
        f"JobSet evil: {TOLERATES.format('node.kubernetes.io/unreachable')}",
    ),
    (
        jobset(
            **tolerating(
                "node.kubernetes.io/not-ready", effect="NoExecute", tolerationSeconds=10**9
            )
        ),
        f"JobSet evil: {TOLERATES.format('node.kubernetes.io/not-ready')}",
    ),
    *(
        (made(activeDeadlineSeconds=60), f"{PLACES[made()['kind']]}: {DEADLINE}")
        for made in (jobset, job, pod)
    ),
    *(  # with its own name too, for the release of a dashboard may be called so
        (
            labelled(kind, **{"jaxlaunch_io__web-dashboard": "evil"}),
            f"{kind} evil: {LABELLED.format(WEB_DASHBOARD)}",
        )
        for kind in ("JobSet", "Job", "Pod")
    ),
    *(
        (
            labelled(kind, **{key.replace(".", "_").replace("/", "__"): "other"}),
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
        whole(jobset(), labels={"jaxlaunch.io/job": "other"}),
        f"JobSet evil: {WHOSE.format('jaxlaunch.io/job')}",
    ),
    *(
        (whole(made(), ownerReferences=OWNER), f"{made()['kind']} evil: {OWNED}")
        for made in (jobset, job, pod)
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
        (made(**{field: True}), f"{place}: {field}: " "true is not " "allowed in " "namespace NS. Leave " f"it out{more}.")
        for made, place in ((jobset, "JobSet evil, " "replicatedJob x"), (job, "Job evil"), (pod, "Pod evil"))
        for field, more in (
            ("hostPID", ""),
            ("hostIPC", ""),
            ("hostNetwork", ", use another `network:`, " "or ASK set " "admissionPolicy.hostNetwork=true"),
        )
    ),
    *(
        (
            made(**HOST_PATH),
            f"{made()['kind']} " "evil: hostPath " "/var/run is " "not allowed " "in namespace " "NS. Mount a " "PersistentVolumeClaim, "
            "or ASK add the path to admissionPolicy.hostPaths.",
        )
        for made in (jobset, job, pod)
    ),
    *(
        (
            jobset(**{containers: [PRIVILEGED]}),
            "JobSet evil: privileged: " "true is not " "allowed in " "namespace NS. " "Leave it out, " "or ASK set "
            "admissionPolicy.privileged=true.",
        )
        for containers in ("containers", "initContainers")
    ),
    *((made(securityContext=own), f"{place}: {ROOT}") for own in ({}, {"runAsUser": 0}, {"runAsNonRoot": False})
      for made, place in ((jobset, "JobSet evil, " "replicatedJob x"), (job, "Job evil"), (pod, "Pod evil"))),
    (pod(containers=[secured(runAsUser=0)]), f"Pod evil: {ROOT}"),
    (pod(initContainers=[secured(runAsNonRoot=False) | {"name": "first"}]), f"Pod evil: {ROOT}"),
    (pod(containers=[secured(capabilities={"add": ["SYS_ADMIN", "CHOWN", "IPC_LOCK"]})]), f"Pod evil: {ADDED}"),
    (jobset(serviceAccountName="admin"), f"JobSet evil: {ACCOUNT}"),
    # The name of old, which the Job passes on.
    (jobset(serviceAccount="admin"), f"JobSet evil: {ACCOUNT}"),
    (job(serviceAccountName="admin"), f"Job evil: {ACCOUNT}"),
    (pod(serviceAccountName="admin"), f"Pod evil: {ACCOUNT}"),
    (
        manifest("Secret") | TOKEN,
        "Secret evil: a token of a ServiceAccount may not be made in namespace NS. Leave out type: "
        "kubernetes.io/service-account-token.",
    ),
    *((made, f"Secret {made['metadata']['name']}: {ONLY_GANGS}") for made in (
        manifest("Secret"), manifest("Secret", labels=OURS), manifest("Secret", name="evil-gang"),
        manifest("Secret", labels=OURS, name="evil-gang") | {"type": "helm.sh/release.v1"},
        whole(manifest("Secret", labels=OURS, name="evil-gang"), annotations={"a": "b"}))),
    *(
        (manifest("ConfigMap", labels=labels, name=name), f"ConfigMap {name}: " f"{ONLY_OURS['ConfigMap']}")
        for name, labels in (("evil", {}), ("jaxlaunch-evil", {}), ("evil", OURS))
    ),
    (policy({}, {"matchLabels": {JOBSET: "evil"}}), "NetworkPolicy evil: " f"{ONLY_OURS['NetworkPolicy']}"),
    (policy(OURS, {}), ONE_JOB),
    (policy(OURS, {"matchLabels": {JOBSET: "other"}}), ONE_JOB),
    (policy(OURS, {"matchLabels": {JOBSET: "evil"}}, egress=[{}]), ONE_JOB),
]  # fmt: skip
MANY = {
    "name": "main",
    "image": "i",
    "env": [{"name": f"V{number}", "value": "x" * 400} for number in range(1000)],
}
ALLOWED: list[Object] = [
    jobset(),
    jobset(containers=[MANY], initContainers=[MANY]),  # what an expression may cost is limited
    jobset(serviceAccountName="default", serviceAccount="admin"),  # runs as the former
    pod(
        securityContext={},
        containers=[secured(runAsUser=5), secured(runAsNonRoot=True) | {"name": "b"}],
    ),
    pod(securityContext={"runAsUser": 7}, containers=[secured(capabilities={"add": ["CHOWN"]})]),
    jobset(
        **tolerating("node.kubernetes.io/unreachable", effect="NoExecute", tolerationSeconds=30)
    ),
    jobset(**tolerating("nvidia.com/gpu"), schedulerName="default-scheduler"),
    whole(
        jobset(), labels={"jaxlaunch.io/job": "evil", "app.kubernetes.io/managed-by": "jaxlaunch"}
    ),
    labelled("JobSet", jaxlaunch_io__job="evil", team="a"),
    labelled("Job", jaxlaunch_io__job="evil"),
    jobset(serviceAccountName="team-jobs", volumes=[{"name": "t", "emptyDir": {}}]),
    job(),
    pod(),
    manifest("Secret", labels=OURS, name="evil-gang"),
    manifest("ConfigMap", labels=OURS, name="jaxlaunch-0123456789ab"),
    policy(OURS, {"matchLabels": {JOBSET: "evil"}}),
]


def full(stage: Stage, words: str) -> str:
    """The words with the names of this release."""
    ask = f"ask whoever installed the chart (release team of namespace {stage.namespace}) to"
    return words.replace("NS", stage.namespace).replace("ASK", ask)


def test_what_the_policy_forbids_is_refused_in_words_that_say_what_where_and_what_to_do(
    stage: Stage,
) -> None:
    alice = stage.access(ALICE).api
    for made, words in FORBIDDEN + BEYOND:
        call = Call("POST", f"{stage.path(made['kind'])}?dryRun=All", made)
        assert stage.refusal(alice, call) == full(stage, words)
    for made in ALLOWED:
        stage.create(alice, made)


def test_a_submitter_may_change_and_delete_what_is_a_job_s(stage: Stage) -> None:
    """As `launcher` does: it adds an owner to a ConfigMap that jobs share, and deletes what an earlier job left."""
    api = stage.access(ALICE).api
    config = manifest("ConfigMap", labels=OURS, name="jaxlaunch-0123456789ab")
    network = policy(OURS, {"matchLabels": {JOBSET: "evil"}})
    for made in (config, network):
        api.create(stage.path(made["kind"]), made)
    api.merge(
        stage.path("ConfigMap", "jaxlaunch-0123456789ab"),
        {"metadata": {"annotations": {"seen": "yes"}}},
    )
    api.delete(stage.path("NetworkPolicy", "evil"))
    api.delete(stage.path("ConfigMap", "jaxlaunch-0123456789ab"))


def test_the_cluster_defaults_and_the_default_deny_stay_as_they_are(stage: Stage) -> None:
    """A label of ours does not make them a job's."""
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
        assert stage.refusal(alice, call) == full(stage, f"{kind} {name}: {ONLY_OURS[kind]}")
    assert "evil" not in stage.cluster.api.get(defaults)["data"]["defaults.yaml"]
    assert stage.cluster.api.get(deny)["spec"]["policyTypes"] == ["Ingress"]


def test_a_submitter_stops_a_job_by_its_workload_but_does_not_give_it_a_priority_of_their_own(
    stage: Stage,
) -> None:
    alice = stage.access(ALICE).api
    workloads = f"/apis/{preparations.KUEUE}/namespaces/{stage.namespace}/workloads"
    template = {"spec": pod()["spec"]}
    spec = {"queueName": "absent", "podSets": [{"name": "main", "count": 1, "template": template}]}
    made = {
        "apiVersion": preparations.KUEUE,
        "kind": "Workload",
        "metadata": {"name": "queued"},
        "spec": spec,
    }
    stage.cluster.api.create(workloads, made)
    path = f"{workloads}/queued"
    for patch in ({"priority": 1000}, {"queueName": "other"}, {"active": False, "priority": 1000}):
        words = stage.refusal(alice, Call("PATCH", path, {"spec": patch}, MERGE))
        assert words.startswith(
            f"Workload queued: submitters in namespace {stage.namespace} change only spec.active"
        )
    for active in (False, True):
        assert alice.merge(path, {"spec": {"active": active}})["spec"]["active"] is active
    stage.cluster.api.delete(path)


def test_it_judges_submitters_and_this_namespace_s_accounts_but_no_controllers_and_no_administrators(
    stage: Stage,
) -> None:
    made = manifest("ConfigMap", name="settings")
    for user in (ALICE, CI, f"system:serviceaccount:{stage.namespace}:{ROBOT}"):
        assert not accepts(stage, stage.access(user).api, made), user
    assert accepts(stage, stage.access(OPERATOR).api, made)
    assert accepts(stage, stage.cluster.api, made)
    # The controller of kube-system that gives each namespace the cluster's certificate.
    root = stage.path("ConfigMap", "kube-root-ca.crt")
    first = stage.cluster.api.get(root)["metadata"]["uid"]
    stage.cluster.api.delete(root)

    def again() -> bool:
        try:
            return bool(stage.cluster.api.get(root)["metadata"]["uid"] != first)
        except Refused:
            return False

    until(again, bool, "kube-root-ca.crt is made again")


def test_a_job_that_was_there_before_the_policy_can_be_stopped_but_not_made_worse(
    stage: Stage,
) -> None:
    alice, earlier = stage.access(ALICE).api, jobset(hostNetwork=True, initContainers=[MANY])
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


def test_a_label_that_says_whose_a_job_is_stays_and_the_team_s_own_priority_is_let_through(
    stage: Stage,
) -> None:
    alice, made = stage.access(ALICE).api, jobset(priorityClassName=f"{stage.namespace}.team.high")
    made["spec"]["suspend"] = True
    made["metadata"] |= {"name": "mine", "labels": {**OURS, "jaxlaunch.io/job": "mine"}}
    alice.create(stage.path("JobSet"), made)
    path = stage.path("JobSet", "mine")
    for key in ("jaxlaunch.io/job", "app.kubernetes.io/managed-by"):
        for value in (None, "other"):
            words = stage.refusal(
                alice, Call("PATCH", path, {"metadata": {"labels": {key: value}}}, MERGE)
            )
            assert words == full(stage, f"JobSet mine: {WHOSE.format(key)}")
    with pytest.raises(
        AssertionError, match="the label jaxlaunch.io/job says whose job it is"
    ):  # as a person tries it
        stage.access(ALICE).kubectl(
            "label", "jobset", "mine", "jaxlaunch.io/job-", "-n", stage.namespace
        )
    manifests = json.dumps(jobset(priorityClassName="system-node-critical"))
    with pytest.raises(AssertionError, match="priority class system-node-critical is not allowed"):
        stage.access(ALICE).kubectl("create", "-n", stage.namespace, "-f", "-", text=manifests)
    alice.merge(path, {"metadata": {"labels": {"seen": "yes"}}})
    alice.delete(path)


def test_the_server_finds_nothing_wrong_with_the_policy_s_expressions(stage: Stage) -> None:
    path = (
        f"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{stage.namespace}.team"
    )
    status = until(
        lambda: stage.cluster.api.get(path).get("status", {}),
        lambda seen: "typeChecking" in seen,
        "its types",
    )
    assert status["typeChecking"] == {}


def test_root_is_let_through_where_the_cluster_defaults_give_it_and_nowhere_else(
    stage: Stage,
) -> None:
    """Changes the release, as the next one does."""
    people = {"submitters": [{"kind": "User", "name": ALICE}]}
    more = {"users": {"v5e": "root", "v4": 2000, "h100": "privileged"}}
    stage.release.upgrade(
        values(stage.cluster, kueue={"enabled": False}, rbac=people, defaults=more)
    )
    alice = stage.access(ALICE).api
    may_become: Object = {"runAsUser": 0, "runAsNonRoot": False}
    root: Object = {**may_become, "allowPrivilegeEscalation": False}
    tpu, gpu = "google.com/tpu", "nvidia.com/gpu"
    pinning: Object = {**root, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    until(
        lambda: accepts(stage, alice, pod(containers=[secured(tpu, **pinning)])),
        bool,
        "the new policy is in force",
    )
    assert accepts(stage, alice, pod(containers=[secured(gpu, privileged=True, **may_become)]))
    assert accepts(stage, alice, jobset_of_one(containers=[secured(gpu, "8", **root)]))
    assert accepts(
        stage, alice, pod(containers=[secured(runAsUser=7, allowPrivilegeEscalation=False)])
    )
    for container in (
        secured(**root),
        secured(tpu, privileged=True, **root),
        secured(tpu, **root, capabilities={"add": ["SYS_ADMIN"]}),
        secured("cpu", **root),
        secured(tpu, "0", **root),
        secured(tpu, "0k", **root),
        secured(gpu, "0", privileged=True, **may_become),
        secured(tpu, **may_become),
        secured(runAsUser=7),
    ):
        assert not accepts(stage, alice, pod(containers=[container])), container


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
    """The daemon of gpudirect-tcpxo, changed so, beside a container with so many GPUs: as a Pod and a JobSet."""
    main = secured("nvidia.com/gpu", amount, allowPrivilegeEscalation=False)
    spec = {"containers": [main], "initContainers": [DAEMON | changes], "volumes": [volume]}
    return [pod(automountServiceAccountToken=False, **spec), jobset_of_one(**spec)]


def test_the_tcpxo_daemon_is_root_and_nothing_else_of_its_image(stage: Stage) -> None:
    """Changes the release, as the next one does."""
    people, more = {"submitters": [{"kind": "User", "name": ALICE}]}, {"tcpxo": {"image": "rxdm:1"}}
    stage.release.upgrade(
        values(stage.cluster, kueue={"enabled": False}, rbac=people, defaults=more)
    )
    alice = stage.access(ALICE).api
    until(
        lambda: all(accepts(stage, alice, made) for made in with_daemon()),
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
        [pod(containers=[DAEMON | {"volumeMounts": [], "restartPolicy": None}])],
    ):
        assert not any(accepts(stage, alice, made) for made in changed), changed


def test_what_the_values_allow_is_let_through(stage: Stage) -> None:
    """Runs last: it changes the release."""
    more = {
        "network": {"h100": "hostnetwork"},
        "tcpxo": {"image": "rxdm:1"},
        "service_account": "trainer",
    }
    allowed = {"hostPaths": ["/mnt/data"], "serviceAccounts": [], "privileged": True}
    people = {"submitters": [{"kind": "User", "name": ALICE}]}
    stage.release.upgrade(
        values(
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
    until(
        lambda: accepts(stage, alice, jobset_of_one(hostNetwork=True, **parts)),
        bool,
        "the new policy is in force",
    )
    assert not accepts(stage, alice, jobset_of_one(hostPID=True, **parts))
    nameless = Call("POST", f"{stage.path('JobSet')}?dryRun=All", jobset())
    assert "may not run as ServiceAccount default" in stage.refusal(alice, nameless)


def jobset_of_one(**spec: Any) -> Object:
    """A JobSet of one template."""
    made = jobset(**spec)
    made["spec"]["replicatedJobs"] = made["spec"]["replicatedJobs"][1:]
    return made

"""Rarer situations than those of tests/cluster/situations.py: objects that are missing, in the way, or stuck."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Object
from tests.cluster.harness import kwok
from tests.cluster.harness.places import NODE
from tests.cluster.preparations import KUEUE, make_queue
from tests.cluster.situations import HOARD, POOL, Prepare, Situation, late_host, make, pod_spec
from tests.cluster.waiting import until

FAKE = [{"key": kwok.TAINT, "operator": "Exists"}]
HOLD = "jaxlaunch.test/hold"  # a finalizer that nobody takes away
HELD = (
    "/api/v1/namespaces/{}/pods",
    "/apis/batch/v1/namespaces/{}/jobs",
    "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets",
)
CLAIMS = "/api/v1/namespaces/{}/persistentvolumeclaims"
VOLUMES = "/api/v1/persistentvolumes"
JOBSETS = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/{}/jobsets/{}"
BROKEN = "\x01\x02 no program\n"


# --- what is done to the JobSet -------------------------------------------------------------------


def main(jobset: Object) -> Object:
    found: Object = pod_spec(jobset)["containers"][0]
    return found


UNPRIVILEGED: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def with_pod(**keys: Any) -> Callable[[Object], None]:
    """These keys of the pod's spec."""
    return lambda jobset: pod_spec(jobset).update(keys)


def with_main(**keys: Any) -> Callable[[Object], None]:
    """These keys of the main container."""
    return lambda jobset: main(jobset).update(keys)


def template(jobset: Object) -> Object:
    (one,) = jobset["spec"]["replicatedJobs"]
    found: Object = one["template"]["spec"]["template"]
    return found


def held_pod(jobset: Object) -> None:
    template(jobset).setdefault("metadata", {})["finalizers"] = [HOLD]


def held_jobset(jobset: Object) -> None:
    jobset["metadata"]["finalizers"] = [HOLD]


def suspended(jobset: Object) -> None:
    jobset["spec"]["suspend"] = True


def of_another_controller(jobset: Object) -> None:
    jobset["spec"]["managedBy"] = "nobody.test/controller"


def a_key_of_a_configmap(jobset: Object) -> None:
    main(jobset)["env"].append(
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "programs", "key": "none"}}}
    )


def a_key_in_a_volume(jobset: Object) -> None:
    items = [{"key": "none", "path": "none"}]
    pod_spec(jobset)["volumes"].append(
        {"name": "part", "secret": {"secretName": "known", "items": items}}
    )
    main(jobset)["volumeMounts"].append({"name": "part", "mountPath": "/part"})


def executable(jobset: Object) -> None:
    for volume in pod_spec(jobset)["volumes"]:
        if volume.get("configMap", {}).get("name") == "programs":
            volume["configMap"]["defaultMode"] = 0o555


def a_folder_of_the_node(jobset: Object) -> None:
    pod_spec(jobset)["volumes"].append(
        {"name": "here", "hostPath": {"path": "/none/such", "type": "Directory"}}
    )
    main(jobset)["volumeMounts"].append({"name": "here", "mountPath": "/here"})


def unresolved(jobset: Object) -> None:
    """Host 1 asks a name server that is not there."""
    pod_spec(jobset).update(dnsPolicy="None", dnsConfig={"nameservers": ["127.0.0.1"]})


def beside(jobset: Object) -> None:
    """A sidecar that fails each time that the kubelet starts it, before it counts as started."""
    side: Object = {
        key: main(jobset)[key] for key in ("image", "securityContext") if key in main(jobset)
    }
    never = {"exec": {"command": ["false"]}, "failureThreshold": 1000}
    side |= {
        "name": "proxy",
        "command": ["sh", "-c", "exit 3"],
        "restartPolicy": "Always",
        "startupProbe": never,
    }
    pod_spec(jobset)["initContainers"] = [side]


def another(
    name: str, command: Sequence[str], *, first: bool = False, memory: str | None = None
) -> Callable[[Object], None]:
    """Somebody's webhook adds a container with this memory limit, as an init container if it runs `first`."""

    def change(jobset: Object) -> None:
        one: Object = {
            key: main(jobset)[key] for key in ("image", "securityContext") if key in main(jobset)
        }
        one |= {"name": name, "command": list(command)}
        if memory is not None:
            one["resources"] = {"limits": {"memory": memory}}
        pod_spec(jobset).setdefault("initContainers" if first else "containers", []).append(one)

    return change


def as_root(jobset: Object) -> None:
    pod_spec(jobset)["securityContext"] = dict(UNPRIVILEGED)


def unhealthy(jobset: Object) -> None:
    """Once the agent is there to be stopped: one that is killed before leaves only the signal."""
    probe = {
        "exec": {"command": ["false"]},
        "initialDelaySeconds": 20,
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    main(jobset)["livenessProbe"] = probe


# --- what is done to the namespace ----------------------------------------------------------------


def quota(**hard: str) -> Callable[[Access, str], None]:
    """A ResourceQuota of these resources, called few."""

    def prepare(cluster: Access, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        given = {name.replace("__", "/").replace("_", "."): much for name, much in hard.items()}
        make(cluster, path, "v1", "ResourceQuota", "few", spec={"hard": given})
        # Admission counts by the status, which a controller writes.
        until(
            lambda: cluster.api.get(f"{path}/few"),
            lambda one: one.get("status", {}).get("used"),
            "the quota counts",
        )

    return prepare


def a_ratio(cluster: Access, namespace: str) -> None:
    limits = [{"type": "Container", "maxLimitRequestRatio": {"cpu": "2"}}]
    make(
        cluster,
        f"/api/v1/namespaces/{namespace}/limitranges",
        "v1",
        "LimitRange",
        "even",
        spec={"limits": limits},
    )


def claim(
    cluster: Access, namespace: str, name: str, mode: str = "ReadWriteMany", **spec: Any
) -> None:
    wants = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}, **spec}
    make(cluster, CLAIMS.format(namespace), "v1", "PersistentVolumeClaim", name, spec=wants)


def volume(
    cluster: Access,
    namespace: str,
    name: str,
    source: Mapping[str, Any],
    mode: str = "ReadWriteMany",
) -> None:
    """A volume of this source, and the claim of that name that is bound to it."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": [mode],
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": name},
        **source,
    }
    preparations.make(
        cluster, VOLUMES, "v1", "PersistentVolume", f"{namespace}-{name}", spec, namespace
    )
    claim(cluster, namespace, name, mode, volumeName=f"{namespace}-{name}", storageClassName="")


def outside(
    cluster: Access, namespace: str, plural: str, kind: str, name: str, **body: Any
) -> None:
    """An object of storage.k8s.io, which is deleted with the namespace."""
    version = "storage.k8s.io/v1"
    metadata = {"name": name, "labels": {preparations.OWNER: namespace}}
    made = {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
    cluster.api.create(f"/apis/{version}/{plural}", made)


def storage(cluster: Access, namespace: str) -> None:
    """Claims of every kind of trouble; what the programs may not do; a Secret."""
    claim(cluster, namespace, "classless", storageClassName="none")
    unprovisioned = f"{namespace}-nobody"
    outside(
        cluster,
        namespace,
        "storageclasses",
        "StorageClass",
        unprovisioned,
        provisioner="nobody.test",
    )
    claim(cluster, namespace, "slow", storageClassName=unprovisioned)
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["none"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}}
    volume(cluster, namespace, "far", {"local": {"path": "/mnt"}, "nodeAffinity": affinity})
    modes = {
        "driverless": "ReadWriteMany",
        "single": "ReadWriteOncePod",
        "elsewhere": "ReadWriteOnce",
    }
    for name, mode in modes.items():
        driver = f"{namespace}.test" if name == "driverless" else "none.test"
        csi = {"driver": driver, "volumeHandle": f"{namespace}-{name}"}
        volume(cluster, namespace, name, {"csi": csi}, mode)
    # Else the attacher of the driver would be waited for, for two minutes.
    outside(
        cluster,
        namespace,
        "csidrivers",
        "CSIDriver",
        f"{namespace}.test",
        spec={"attachRequired": False},
    )
    preparations.make_claim(cluster, namespace, "closed").chmod(0o500)
    preparations.make_claim(cluster, namespace, "lost")
    cluster.api.delete(f"{VOLUMES}/{namespace}-lost")
    # That of a bound volume.
    cluster.api.merge(f"{VOLUMES}/{namespace}-lost", {"metadata": {"finalizers": None}})
    data = {"broken": BROKEN}
    make(
        cluster,
        f"/api/v1/namespaces/{namespace}/configmaps",
        "v1",
        "ConfigMap",
        "programs",
        data=data,
    )
    make(
        cluster,
        f"/api/v1/namespaces/{namespace}/secrets",
        "v1",
        "Secret",
        "known",
        stringData={"user": "me"},
    )


def odd_queues(cluster: Access, namespace: str) -> None:
    """Queues whose ClusterQueue is missing, inactive, or has no quota of what is wanted; one that is fine."""
    quota = {"cpu": "100m", "memory": "1Gi"}
    for name in ("fine", "flavorless", "checked", "memory", "closed"):
        make_queue(cluster, namespace, {"memory": "1Gi"} if name == "memory" else quota, name=name)
    (group,) = cluster.api.get(f"/apis/{KUEUE}/clusterqueues/{namespace}-flavorless")["spec"][
        "resourceGroups"
    ]
    group["flavors"][0]["name"] = f"{namespace}-none"
    cluster.api.merge(
        f"/apis/{KUEUE}/clusterqueues/{namespace}-flavorless", {"spec": {"resourceGroups": [group]}}
    )
    others = {"namespaceSelector": {"matchLabels": {"team": "other"}}}
    cluster.api.merge(f"/apis/{KUEUE}/clusterqueues/{namespace}-closed", {"spec": others})
    checks = {"admissionChecksStrategy": {"admissionChecks": [{"name": "none"}]}}
    cluster.api.merge(f"/apis/{KUEUE}/clusterqueues/{namespace}-checked", {"spec": checks})
    local = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues"
    preparations.make(
        cluster, local, KUEUE, "LocalQueue", "leading", {"clusterQueue": "none"}, namespace
    )


RARELY_PREPARED: Mapping[str, Prepare] = {
    "storage": ("restricted", storage),
    "privileged": ("privileged", lambda cluster, namespace: None),
    "no-cpu": ("restricted", quota(requests_cpu="10m")),
    "no-jobs": ("restricted", quota(count__jobs_batch="0")),
    "no-services": ("restricted", quota(services="0")),
    "ratio": ("restricted", a_ratio),
    "odd-queues": ("restricted", odd_queues),
    "leaving": ("restricted", lambda cluster, namespace: None),
    "unserved": ("restricted", lambda cluster, namespace: None),
    "no-configmaps": ("restricted", quota(configmaps="1")),  # Kubernetes' own is there
}


# --- what happens later ---------------------------------------------------------------------------


def deleted(cluster: Access, namespace: str, name: str) -> None:
    """As `launcher delete` does it: the JobSet last."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    cluster.api.call("DELETE", JOBSETS.format(namespace, name), options)


def deleted_with_a_held_job(cluster: Access, namespace: str, name: str) -> None:
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}-w-0"
    held = cluster.api.get(path)["metadata"].get("finalizers", [])
    cluster.api.merge(path, {"metadata": {"finalizers": [*held, HOLD]}})
    deleted(cluster, namespace, name)


def deleted_alone(cluster: Access, namespace: str, name: str) -> None:
    """As `kubectl delete` does it: the JobSet first."""
    cluster.api.delete(JOBSETS.format(namespace, name))


def released(cluster: Access, namespace: str) -> None:
    """Takes the finalizer away from all that has it, so that the namespace can go."""
    for path in HELD:
        path = path.format(namespace)
        for one in cluster.api.get(path)["items"]:
            if HOLD in (kept := one["metadata"].get("finalizers", [])):
                left = [text for text in kept if text != HOLD]
                cluster.api.merge(
                    f"{path}/{one['metadata']['name']}", {"metadata": {"finalizers": left}}
                )


def with_its_namespace(cluster: Access, namespace: str, name: str) -> None:
    cluster.api.delete(f"/api/v1/namespaces/{namespace}")


def deactivated(cluster: Access, namespace: str, name: str) -> None:
    path = f"/apis/{KUEUE}/namespaces/{namespace}/workloads"
    for one in cluster.api.get(path)["items"]:
        if one["metadata"]["name"].startswith(f"jobset-{name}-"):
            cluster.api.merge(f"{path}/{one['metadata']['name']}", {"spec": {"active": False}})


def without_service(cluster: Access, namespace: str, name: str) -> None:
    """Somebody deletes its Service, and no other may be made."""
    quota(services="0")(cluster, namespace)
    cluster.api.delete(f"/api/v1/namespaces/{namespace}/services/{name}")


def attached(cluster: Access, namespace: str, name: str) -> None:
    """The volume is attached to the node of its pod, as the driver's attacher would say."""
    path = "/apis/storage.k8s.io/v1/volumeattachments"
    volume = f"{namespace}-elsewhere"
    for one in cluster.api.get(path)["items"]:
        if one["spec"]["source"].get("persistentVolumeName") == volume:
            cluster.api.merge(
                f"{path}/{one['metadata']['name']}/status", {"status": {"attached": True}}
            )


def frozen(cluster: Access, namespace: str, name: str) -> None:
    """The node of its pod says nothing any more: what the node controller makes of that after a while."""
    (pod,) = cluster.api.get(
        f"/api/v1/namespaces/{namespace}/pods?labelSelector=jaxlaunch.io/job%3D{name}"
    )["items"]
    node = f"/api/v1/nodes/{pod['spec']['nodeName']}"
    cluster.api.merge(node, {"metadata": {"annotations": {kwok.SELECTOR.split("=")[0]: None}}})
    conditions = [
        {
            "type": "Ready",
            "status": "Unknown",
            "reason": "NodeStatusUnknown",
            "message": "no status",
        }
    ]
    cluster.api.merge(f"{node}/status", {"status": {"conditions": conditions}})


# --- nodes ----------------------------------------------------------------------------------------


def nodes(cluster: Access, namespace: str) -> Sequence[str]:
    """Fake nodes, one of each kind, by their label: what they are called, to delete them."""
    kinds: dict[str, Mapping[str, str]] = {
        "work": {},
        "frozen": {},
        "cordoned": {},
        "unready": {},
        "silent": {},
        "crowded": {"pods": "0"},
    }
    names = []
    for kind, resources in kinds.items():
        name = f"{namespace}-{kind}"
        one = kwok.node(name, {POOL: name}, resources, kwok.TAINT)
        one["metadata"]["labels"][preparations.OWNER] = namespace
        if kind == "cordoned":
            one["spec"]["unschedulable"] = True
        one["metadata"]["annotations"]["volumes.kubernetes.io/controller-managed-attach-detach"] = (
            "true"
        )
        if kind in ("unready", "silent"):
            del one["metadata"]["annotations"][kwok.SELECTOR.split("=")[0]]
        if kind == "unready":
            one["status"]["conditions"][0] |= {"status": "False", "reason": "KubeletNotReady"}
        cluster.api.create("/api/v1/nodes", one)
        names.append(name)
    return names


def on(kind: str, **job: Any) -> dict[str, Any]:
    """Keys of a job for the fake node of this kind."""
    return {"node_selector": {POOL: f"{{storage}}-{kind}"}, "tolerations": FAKE, **job}


def mounts(claim: str, **job: Any) -> dict[str, Any]:
    return {"volumes": [{"claim": claim, "path": "/x"}], **job}


def python(text: str) -> dict[str, Any]:
    return {"command": ["python", "-c", text]}


IN_STORAGE = "storage"

RARE: Mapping[str, Situation] = {
    # admission
    "uneven": Situation(
        "a LimitRange of the namespace forbids it: cpu max limit to request ratio",
        namespace="ratio",
    ),
    "no-cpu": Situation(
        "ResourceQuota few is exceeded: requested requests.cpu=20m", namespace="no-cpu"
    ),
    "no-jobs": Situation(
        "has no Jobs: ResourceQuota few is exceeded: requested count/jobs.batch=1",
        namespace="no-jobs",
    ),
    "no-service": Situation(
        "has no headless Service: ResourceQuota few is exceeded", namespace="no-services"
    ),
    "no-runtime": Situation(
        "RuntimeClass none does not exist", change=with_pod(runtimeClassName="none")
    ),
    "unattended": Situation(
        "controller nobody.test/controller .spec.managedBy. has not acted on it",
        change=of_another_controller,
    ),
    # nodes
    "cordoned": Situation("untolerated taint node.kubernetes.io/unschedulable", on("cordoned")),
    "unready": Situation("untolerated taint node.kubernetes.io/not-ready", on("unready")),
    "crowded": Situation("Too many pods", on("crowded")),
    "no-slice": Situation(
        "no node has label cloud.google.com/gke-tpu-",
        {"accelerator": {"type": "v4", "topology": "2x2x1"}, "platform": "gke"},
        # The namespace refuses root, as which pods on TPUs run by default.
        change=with_pod(securityContext={"runAsUser": 1000, **UNPRIVILEGED}),
    ),
    "no-fpga": Situation(
        "requests 1 example.com/fpga, the largest node has 0",
        change=with_main(resources={"limits": {"example.com/fpga": 1}}),
    ),
    "no-neighbour": Situation(
        "didn't match pod affinity rules",
        on("work"),
        change=with_pod(
            affinity={
                "podAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": [
                        {
                            "topologyKey": "kubernetes.io/hostname",
                            "labelSelector": {"matchLabels": {"none": "none"}},
                        }
                    ]
                }
            }
        ),
    ),
    "gated": Situation(
        "has a scheduling gate", change=with_pod(schedulingGates=[{"name": "jaxlaunch.test/gate"}])
    ),
    "no-scheduler": Situation(
        "scheduler none has not looked at its host", change=with_pod(schedulerName="none")
    ),
    "port": Situation(
        "runs", on("work"), "privileged", with_main(ports=[{"containerPort": 7, "hostPort": 7}])
    ),
    "port-taken": Situation(
        "didn't have free ports",
        on("work"),
        "privileged",
        with_main(ports=[{"containerPort": 7, "hostPort": 7}]),
        starts_after="port",
    ),
    "apart": Situation(
        "didn't match pod topology spread constraints .missing required label.; 1 node would fit a "
        "host when empty",
        on("work"),
        change=with_pod(
            topologySpreadConstraints=[
                {
                    "maxSkew": 1,
                    "topologyKey": "jaxlaunch.test/zone",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"none": "none"}},
                }
            ]
        ),
    ),
    "no-device-claim": Situation(
        "its host cannot be scheduled: FailedResourceClaimCreation: .*none.* not found",
        change=with_pod(resourceClaims=[{"name": "imex", "resourceClaimTemplateName": "none"}]),
    ),
    "frozen": Situation(
        "its host was on node .*-frozen, which does not answer or got a NoExecute taint; pod "
        "frozen-w-0-0-.* should "
        "have ended .* ago, and node .*-frozen has not answered",
        on("frozen"),
        after="runs",
        then=frozen,
    ),
    "refused-by-node": Situation(
        "OutOfcpu",
        {"resources": {"cpu": 500}, "restarts": {"crash": 1}},
        change=with_pod(nodeName=NODE),
    ),
    # storage
    "classless": Situation(
        'classless is not bound: storageclass.* "none" not found', mounts("classless"), IN_STORAGE
    ),
    "slow": Situation("slow is not bound: .*nobody.test", mounts("slow"), IN_STORAGE),
    "far": Situation("volume node affinity conflict", mounts("far"), IN_STORAGE),
    "lost": Situation(
        "PersistentVolume .*-lost of PersistentVolumeClaim lost no longer exists",
        mounts("lost"),
        IN_STORAGE,
    ),
    "single": Situation("runs", mounts("single", **on("work")), IN_STORAGE),
    "single-taken": Situation(
        "PersistentVolumeClaim single is ReadWriteOncePod, and another pod uses it",
        mounts("single", **on("work")),
        IN_STORAGE,
        starts_after="single",
    ),
    "holder": Situation(
        "runs", mounts("elsewhere", **on("work")), IN_STORAGE, after="runs", then=attached
    ),
    "elsewhere": Situation(
        "cannot mount a volume: Multi-Attach error for volume",
        mounts("elsewhere", **on("silent")),
        IN_STORAGE,
        starts_after="holder",
    ),
    "driverless": Situation(
        "cannot mount a volume: .*driver name {storage}.test not found",
        mounts("driverless"),
        IN_STORAGE,
    ),
    "closed": Situation(
        "PermissionError: .*'/x/checkpoint'",
        mounts("closed", **python("open('/x/checkpoint', 'w')")),
        IN_STORAGE,
    ),
    "no-folder": Situation(
        "hostPath type check failed: /none/such", {}, "privileged", a_folder_of_the_node
    ),
    "read-only": Situation(
        "OSError: .*Read-only file system: '/result'", python("open('/result', 'w')")
    ),
    "no-shm": Situation(
        "No space left on device",
        {
            "resources": {"cpu": "20m", "memory": "128Mi", "shm": "1Mi"},
            **python("f = open('/dev/shm/x', 'wb')\nf.write(bytes(2**22))\nf.flush()"),
        },
    ),
    # images, commands
    "foreign-image": Situation(
        "not built for the node's CPU architecture", {"image": "{registry}/foreign:1"}
    ),
    "no-pull-secret": Situation(
        "Secret none of image_pull_secrets does not exist",
        {"image": "{registry}/locked:1", "image_pull_secrets": ["none"]},
    ),
    "untrusted": Situation(
        "the node does not trust the registry's certificate", {"image": "{server}/none:1"}
    ),
    "no-entrypoint": Situation(
        "its host cannot start: .*no command specified", change=with_main(command=None, args=None)
    ),
    "sidecar": Situation(
        "cannot start on its host: init container proxy ended with exit code 3", change=beside
    ),
    "side-fails": Situation(
        "failed: container proxy of its host ended with exit code 7; the program itself finished",
        {"command": ["true"]},
        change=another("proxy", ["sh", "-c", "exit 7"]),
    ),
    "side-stays": Situation(
        "does not end: its program ended .* ago .exit 0., but container mesh of its "
        "host still runs",
        {"command": ["true"]},
        change=another("mesh", ["sleep", "600"]),
    ),
    "init-runs": Situation(
        "is starting: its host: init container fetch has run for",
        change=another("fetch", ["sleep", "600"], first=True),
    ),
    "init-oom": Situation(
        "failed: init container fetch of its host was OOMKilled; its memory limit is 40Mi",
        change=another("fetch", HOARD, first=True, memory="40Mi"),
    ),
    "tiny": Situation(
        "its memory limit of 4Mi is too low for the container runtime",
        {"resources": {"cpu": "20m", "memory": "4Mi"}},
    ),
    "no-program": Situation("nonesuch", {"command": ["nonesuch"]}),
    "not-executable": Situation(
        "/programs/broken.*([Pp]ermission denied|not executable)",
        {
            "volumes": [{"configmap": "programs", "path": "/programs"}],
            "command": ["/programs/broken"],
        },
        IN_STORAGE,
    ),
    "no-format": Situation(
        "/programs/broken.*[Ee]xec format error",
        {
            "volumes": [{"configmap": "programs", "path": "/programs"}],
            "command": ["/programs/broken"],
        },
        IN_STORAGE,
        executable,
    ),
    "no-configmap-key": Situation(
        "ConfigMap programs has no key none", namespace=IN_STORAGE, change=a_key_of_a_configmap
    ),
    "no-volume-key": Situation(
        "Secret known has no key none", namespace=IN_STORAGE, change=a_key_in_a_volume
    ),
    "root": Situation("runs as root, and the pod has runAsNonRoot", change=as_root),
    "hooked": Situation(
        "its postStart hook fails|the postStart hook of host 0 .* failed",
        change=with_main(lifecycle={"postStart": {"exec": {"command": ["false"]}}}),
    ),
    "unhealthy": Situation(
        "its liveness probe fails", {"restarts": {"in_place": 0, "crash": 0}}, change=unhealthy
    ),
    "deaf": Situation(
        "rendezvous: (hosts 0, 1 did not join|.*name not resolved)",
        {"hosts": 2, "timeouts": {"rendezvous": "5s"}},
        change=unresolved,
    ),
    # queues
    "no-cluster-queue": Situation(
        "ClusterQueue none does not exist", {"queue": "leading"}, "odd-queues"
    ),
    "no-flavor": Situation(
        "ClusterQueue .*-flavorless is inactive: FlavorNotFound",
        {"queue": "flavorless"},
        "odd-queues",
    ),
    "no-check": Situation(
        "ClusterQueue .*-checked is inactive: AdmissionCheckNotFound",
        {"queue": "checked"},
        "odd-queues",
    ),
    "uncovered": Situation("does not cover cpu", {"queue": "memory"}, "odd-queues"),
    "closed-queue": Situation(
        "is closed to namespace {odd-queues}: its namespaceSelector",
        {"queue": "closed"},
        "odd-queues",
    ),
    "deactivated": Situation(
        "is stopped", {"queue": "fine"}, "odd-queues", after="runs", then=deactivated
    ),
    # between hosts
    "unserved": Situation(
        "host 1 of 2 missing; its headless Service, .*, is gone, and rejected: ResourceQuota few "
        "is exceeded",
        {"hosts": 2},
        "unserved",
        late_host,
        after="waits at rendezvous",
        then=without_service,
    ),
    # the end
    "by-hand": Situation("is stopped", change=suspended),
    "forgotten": Situation(
        "job forgotten not found .*: it completed at ", {"command": ["true"], "ttl": "1s"}
    ),
    "stuck-pod": Situation(
        f"not found in .*: it is deleted, and finalizer {HOLD} has kept pod stuck-pod-w-0-0-",
        {"node_selector": {POOL: "none"}},
        change=held_pod,
        after="unschedulable",
        then=deleted_alone,
    ),
    "stuck-job": Situation(
        f"is being deleted, but is blocked: finalizer {HOLD} has kept Job stuck-job-w-0",
        {"node_selector": {POOL: "none"}},
        after="unschedulable",
        then=deleted_with_a_held_job,
    ),
    "stuck": Situation(
        f"is being deleted, but is blocked: finalizer {HOLD} has kept JobSet stuck",
        {"node_selector": {POOL: "none"}},
        change=held_jobset,
        after="unschedulable",
        then=deleted,
    ),
    "stuck-namespace": Situation(
        f"is being deleted with its namespace .*, but is blocked: finalizer {HOLD} has kept JobSet "
        "stuck-namespace",
        {"node_selector": {POOL: "none"}},
        "leaving",
        held_jobset,
        after="unschedulable",
        then=with_its_namespace,
    ),
}

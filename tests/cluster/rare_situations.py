"""Rarer situations than those of situations.py: objects that are missing, in the way, or stuck."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import Object
from tests.cluster.harness import kwok
from tests.cluster.harness.places import NODE
from tests.cluster.preparations import KUEUE, make_queue
from tests.cluster.situations import (
    HOARD,
    POOL,
    Prepare,
    Situation,
    create_object,
    delay_host,
    get_pod_spec,
)
from tests.cluster.waiting import wait_until

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


def main_container(jobset: Object) -> Object:
    container: Object = get_pod_spec(jobset)["containers"][0]
    return container


UNPRIVILEGED: Object = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}


def set_pod_keys(**keys: Any) -> Callable[[Object], None]:
    """Return a change that sets these keys of the pod's spec."""
    return lambda jobset: get_pod_spec(jobset).update(keys)


def set_main_keys(**keys: Any) -> Callable[[Object], None]:
    """Return a change that sets these keys of the main container."""
    return lambda jobset: main_container(jobset).update(keys)


def pod_template(jobset: Object) -> Object:
    (job,) = jobset["spec"]["replicatedJobs"]
    template: Object = job["template"]["spec"]["template"]
    return template


def held_pod(jobset: Object) -> None:
    pod_template(jobset).setdefault("metadata", {})["finalizers"] = [HOLD]


def held_jobset(jobset: Object) -> None:
    jobset["metadata"]["finalizers"] = [HOLD]


def suspend(jobset: Object) -> None:
    jobset["spec"]["suspend"] = True


def of_another_controller(jobset: Object) -> None:
    jobset["spec"]["managedBy"] = "nobody.test/controller"


def a_key_of_a_configmap(jobset: Object) -> None:
    main_container(jobset)["env"].append(
        {"name": "A", "valueFrom": {"configMapKeyRef": {"name": "programs", "key": "none"}}}
    )


def a_key_in_a_volume(jobset: Object) -> None:
    items = [{"key": "none", "path": "none"}]
    get_pod_spec(jobset)["volumes"].append(
        {"name": "part", "secret": {"secretName": "known", "items": items}}
    )
    main_container(jobset)["volumeMounts"].append({"name": "part", "mountPath": "/part"})


def replace_executable(jobset: Object) -> None:
    for volume in get_pod_spec(jobset)["volumes"]:
        if volume.get("configMap", {}).get("name") == "programs":
            volume["configMap"]["defaultMode"] = 0o555


def a_folder_of_the_node(jobset: Object) -> None:
    get_pod_spec(jobset)["volumes"].append(
        {"name": "here", "hostPath": {"path": "/none/such", "type": "Directory"}}
    )
    main_container(jobset)["volumeMounts"].append({"name": "here", "mountPath": "/here"})


def break_name_server(jobset: Object) -> None:
    """Give host 1 a name server that does not exist."""
    get_pod_spec(jobset).update(dnsPolicy="None", dnsConfig={"nameservers": ["127.0.0.1"]})


def add_failing_sidecar(jobset: Object) -> None:
    """Add a sidecar that fails before it counts as started."""
    side: Object = {
        key: main_container(jobset)[key]
        for key in ("image", "securityContext")
        if key in main_container(jobset)
    }
    never = {"exec": {"command": ["false"]}, "failureThreshold": 1000}
    side |= {
        "name": "proxy",
        "command": ["sh", "-c", "exit 3"],
        "restartPolicy": "Always",
        "startupProbe": never,
    }
    get_pod_spec(jobset)["initContainers"] = [side]


def add_container(
    name: str, command: Sequence[str], *, first: bool = False, memory: str | None = None
) -> Callable[[Object], None]:
    """Add a container with this memory limit as a webhook would, an init one if it is `first`."""

    def change(jobset: Object) -> None:
        container: Object = {
            key: main_container(jobset)[key]
            for key in ("image", "securityContext")
            if key in main_container(jobset)
        }
        container |= {"name": name, "command": list(command)}
        if memory is not None:
            container["resources"] = {"limits": {"memory": memory}}
        get_pod_spec(jobset).setdefault("initContainers" if first else "containers", []).append(
            container
        )

    return change


def as_root(jobset: Object) -> None:
    get_pod_spec(jobset)["securityContext"] = dict(UNPRIVILEGED)


def fail_probe(jobset: Object) -> None:
    """Fail the probe once the agent can be stopped: killed earlier, it leaves only the signal."""
    probe = {
        "exec": {"command": ["false"]},
        "initialDelaySeconds": 20,
        "periodSeconds": 1,
        "failureThreshold": 1,
    }
    main_container(jobset)["livenessProbe"] = probe


# --- what is done to the namespace ----------------------------------------------------------------


def add_quota(**hard: str) -> Callable[[Access, str], None]:
    """Return a preparation with a ResourceQuota of these resources, named few."""

    def prepare(cluster: Access, namespace: str) -> None:
        path = f"/api/v1/namespaces/{namespace}/resourcequotas"
        limits = {name.replace("__", "/").replace("_", "."): much for name, much in hard.items()}
        create_object(cluster, path, "v1", "ResourceQuota", "few", spec={"hard": limits})
        # Admission counts by the status, which a controller writes.
        wait_until(
            lambda: cluster.api.get(f"{path}/few"),
            lambda quota: quota.get("status", {}).get("used"),
            "the quota counts",
        )

    return prepare


def a_ratio(cluster: Access, namespace: str) -> None:
    limits = [{"type": "Container", "maxLimitRequestRatio": {"cpu": "2"}}]
    create_object(
        cluster,
        f"/api/v1/namespaces/{namespace}/limitranges",
        "v1",
        "LimitRange",
        "even",
        spec={"limits": limits},
    )


def make_claim(
    cluster: Access, namespace: str, name: str, mode: str = "ReadWriteMany", **spec: Any
) -> None:
    wants = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}, **spec}
    create_object(
        cluster, CLAIMS.format(namespace), "v1", "PersistentVolumeClaim", name, spec=wants
    )


def make_volume(
    cluster: Access,
    namespace: str,
    name: str,
    source: Mapping[str, Any],
    mode: str = "ReadWriteMany",
) -> None:
    """Make a volume of this source and a bound claim with its name."""
    spec = {
        "capacity": {"storage": "1Gi"},
        "accessModes": [mode],
        "storageClassName": "",
        "persistentVolumeReclaimPolicy": "Retain",
        "claimRef": {"namespace": namespace, "name": name},
        **source,
    }
    preparations.create_object(
        cluster, VOLUMES, "v1", "PersistentVolume", f"{namespace}-{name}", spec, namespace
    )
    make_claim(
        cluster, namespace, name, mode, volumeName=f"{namespace}-{name}", storageClassName=""
    )


def create_cluster_object(
    cluster: Access, namespace: str, plural: str, kind: str, name: str, **body: Any
) -> None:
    """Make an object of storage.k8s.io that is deleted with the namespace."""
    version = "storage.k8s.io/v1"
    metadata = {"name": name, "labels": {preparations.OWNER: namespace}}
    manifest = {"apiVersion": version, "kind": kind, "metadata": metadata, **body}
    cluster.api.create(f"/apis/{version}/{plural}", manifest)


def prepare_storage(cluster: Access, namespace: str) -> None:
    """Make claims with every kind of trouble, what the programs may not do, and a Secret."""
    make_claim(cluster, namespace, "classless", storageClassName="none")
    unprovisioned = f"{namespace}-nobody"
    create_cluster_object(
        cluster,
        namespace,
        "storageclasses",
        "StorageClass",
        unprovisioned,
        provisioner="nobody.test",
    )
    make_claim(cluster, namespace, "slow", storageClassName=unprovisioned)
    elsewhere = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["none"]}
    affinity = {"required": {"nodeSelectorTerms": [{"matchExpressions": [elsewhere]}]}}
    make_volume(cluster, namespace, "far", {"local": {"path": "/mnt"}, "nodeAffinity": affinity})
    modes = {
        "driverless": "ReadWriteMany",
        "single": "ReadWriteOncePod",
        "elsewhere": "ReadWriteOnce",
    }
    for name, mode in modes.items():
        driver = f"{namespace}.test" if name == "driverless" else "none.test"
        csi = {"driver": driver, "volumeHandle": f"{namespace}-{name}"}
        make_volume(cluster, namespace, name, {"csi": csi}, mode)
    # Else the attacher of the driver would be waited for, for two minutes.
    create_cluster_object(
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
    create_object(
        cluster,
        f"/api/v1/namespaces/{namespace}/configmaps",
        "v1",
        "ConfigMap",
        "programs",
        data=data,
    )
    create_object(
        cluster,
        f"/api/v1/namespaces/{namespace}/secrets",
        "v1",
        "Secret",
        "known",
        stringData={"user": "me"},
    )


def make_odd_queues(cluster: Access, namespace: str) -> None:
    """Make queues whose ClusterQueue is missing, inactive or lacks the resource, and a good one."""
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
    selector = {"namespaceSelector": {"matchLabels": {"team": "other"}}}
    cluster.api.merge(f"/apis/{KUEUE}/clusterqueues/{namespace}-closed", {"spec": selector})
    checks = {"admissionChecksStrategy": {"admissionChecks": [{"name": "none"}]}}
    cluster.api.merge(f"/apis/{KUEUE}/clusterqueues/{namespace}-checked", {"spec": checks})
    local = f"/apis/{KUEUE}/namespaces/{namespace}/localqueues"
    preparations.create_object(
        cluster, local, KUEUE, "LocalQueue", "leading", {"clusterQueue": "none"}, namespace
    )


RARELY_PREPARED: Mapping[str, Prepare] = {
    "storage": ("restricted", prepare_storage),
    "privileged": ("privileged", lambda cluster, namespace: None),
    "no-cpu": ("restricted", add_quota(requests_cpu="10m")),
    "no-jobs": ("restricted", add_quota(count__jobs_batch="0")),
    "no-services": ("restricted", add_quota(services="0")),
    "ratio": ("restricted", a_ratio),
    "odd-queues": ("restricted", make_odd_queues),
    "leaving": ("restricted", lambda cluster, namespace: None),
    "unserved": ("restricted", lambda cluster, namespace: None),
    "no-configmaps": ("restricted", add_quota(configmaps="1")),  # Kubernetes' own is there
}


# --- what happens later ---------------------------------------------------------------------------


def delete_job(cluster: Access, namespace: str, name: str) -> None:
    """Delete the job as `launcher delete` does: the JobSet last."""
    options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"}
    cluster.api.call("DELETE", JOBSETS.format(namespace, name), options)


def delete_with_a_held_job(cluster: Access, namespace: str, name: str) -> None:
    path = f"/apis/batch/v1/namespaces/{namespace}/jobs/{name}-w-0"
    finalizers = cluster.api.get(path)["metadata"].get("finalizers", [])
    cluster.api.merge(path, {"metadata": {"finalizers": [*finalizers, HOLD]}})
    delete_job(cluster, namespace, name)


def delete_jobset(cluster: Access, namespace: str, name: str) -> None:
    """Delete the JobSet first, as `kubectl delete` does."""
    cluster.api.delete(JOBSETS.format(namespace, name))


def remove_finalizers(cluster: Access, namespace: str) -> None:
    """Remove the finalizer from all objects, so that the namespace can be deleted."""
    for path in HELD:
        path = path.format(namespace)
        for item in cluster.api.get(path)["items"]:
            if HOLD in (finalizers := item["metadata"].get("finalizers", [])):
                remaining = [text for text in finalizers if text != HOLD]
                cluster.api.merge(
                    f"{path}/{item['metadata']['name']}", {"metadata": {"finalizers": remaining}}
                )


def with_its_namespace(cluster: Access, namespace: str, name: str) -> None:
    cluster.api.delete(f"/api/v1/namespaces/{namespace}")


def deactivate(cluster: Access, namespace: str, name: str) -> None:
    path = f"/apis/{KUEUE}/namespaces/{namespace}/workloads"
    for item in cluster.api.get(path)["items"]:
        if item["metadata"]["name"].startswith(f"jobset-{name}-"):
            cluster.api.merge(f"{path}/{item['metadata']['name']}", {"spec": {"active": False}})


def delete_service(cluster: Access, namespace: str, name: str) -> None:
    """Delete the job's Service and forbid another one."""
    add_quota(services="0")(cluster, namespace)
    cluster.api.delete(f"/api/v1/namespaces/{namespace}/services/{name}")


def attach_volume(cluster: Access, namespace: str, name: str) -> None:
    """Mark the volume as attached to its pod's node, as the driver's attacher would."""
    path = "/apis/storage.k8s.io/v1/volumeattachments"
    volume = f"{namespace}-elsewhere"
    for item in cluster.api.get(path)["items"]:
        if item["spec"]["source"].get("persistentVolumeName") == volume:
            cluster.api.merge(
                f"{path}/{item['metadata']['name']}/status", {"status": {"attached": True}}
            )


def freeze_node(cluster: Access, namespace: str, name: str) -> None:
    """Mark the pod's node as the node controller does when it no longer answers."""
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


def make_nodes(cluster: Access, namespace: str) -> Sequence[str]:
    """Make one fake node of each kind, by their label; return their names."""
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
        node = kwok.make_node(name, {POOL: name}, resources, kwok.TAINT)
        node["metadata"]["labels"][preparations.OWNER] = namespace
        if kind == "cordoned":
            node["spec"]["unschedulable"] = True
        node["metadata"]["annotations"][
            "volumes.kubernetes.io/controller-managed-attach-detach"
        ] = "true"
        if kind in ("unready", "silent"):
            del node["metadata"]["annotations"][kwok.SELECTOR.split("=")[0]]
        if kind == "unready":
            node["status"]["conditions"][0] |= {"status": "False", "reason": "KubeletNotReady"}
        cluster.api.create("/api/v1/nodes", node)
        names.append(name)
    return names


def on_node(kind: str, **job: Any) -> dict[str, Any]:
    """Return the keys of a job for the fake node of this kind."""
    return {"node_selector": {POOL: f"{{storage}}-{kind}"}, "tolerations": FAKE, **job}


def mount_claim(claim: str, **job: Any) -> dict[str, Any]:
    return {"volumes": [{"claim": claim, "path": "/x"}], **job}


def python_command(text: str) -> dict[str, Any]:
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
        "RuntimeClass none does not exist", change=set_pod_keys(runtimeClassName="none")
    ),
    "unattended": Situation(
        "controller nobody.test/controller .spec.managedBy. has not acted on it",
        change=of_another_controller,
    ),
    # nodes
    "cordoned": Situation(
        "untolerated taint node.kubernetes.io/unschedulable", on_node("cordoned")
    ),
    "unready": Situation("untolerated taint node.kubernetes.io/not-ready", on_node("unready")),
    "crowded": Situation("Too many pods", on_node("crowded")),
    "no-slice": Situation(
        "no node has label cloud.google.com/gke-tpu-",
        {"accelerator": {"type": "v4", "topology": "2x2x1"}, "platform": "gke"},
        # The namespace refuses root, as which pods on TPUs run by default.
        change=set_pod_keys(securityContext={"runAsUser": 1000, **UNPRIVILEGED}),
    ),
    "no-fpga": Situation(
        "requests 1 example.com/fpga, the largest node has 0",
        change=set_main_keys(resources={"limits": {"example.com/fpga": 1}}),
    ),
    "no-neighbour": Situation(
        "didn't match pod affinity rules",
        on_node("work"),
        change=set_pod_keys(
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
        "has a scheduling gate",
        change=set_pod_keys(schedulingGates=[{"name": "jaxlaunch.test/gate"}]),
    ),
    "no-scheduler": Situation(
        "scheduler none has not looked at its host", change=set_pod_keys(schedulerName="none")
    ),
    "port": Situation(
        "runs",
        on_node("work"),
        "privileged",
        set_main_keys(ports=[{"containerPort": 7, "hostPort": 7}]),
    ),
    "port-taken": Situation(
        "didn't have free ports",
        on_node("work"),
        "privileged",
        set_main_keys(ports=[{"containerPort": 7, "hostPort": 7}]),
        starts_after="port",
    ),
    "apart": Situation(
        "didn't match pod topology spread constraints .missing required label.; 1 node would fit a "
        "host when empty",
        on_node("work"),
        change=set_pod_keys(
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
        change=set_pod_keys(resourceClaims=[{"name": "imex", "resourceClaimTemplateName": "none"}]),
    ),
    "frozen": Situation(
        "its host was on node .*-frozen, which does not answer or got a NoExecute taint; pod "
        "frozen-w-0-0-.* should "
        "have ended .* ago, and node .*-frozen has not answered",
        on_node("frozen"),
        after="runs",
        then=freeze_node,
    ),
    "refused-by-node": Situation(
        "OutOfcpu",
        {"resources": {"cpu": 500}, "restarts": {"crash": 1}},
        change=set_pod_keys(nodeName=NODE),
    ),
    # storage
    "classless": Situation(
        'classless is not bound: storageclass.* "none" not found',
        mount_claim("classless"),
        IN_STORAGE,
    ),
    "slow": Situation("slow is not bound: .*nobody.test", mount_claim("slow"), IN_STORAGE),
    "far": Situation("volume node affinity conflict", mount_claim("far"), IN_STORAGE),
    "lost": Situation(
        "PersistentVolume .*-lost of PersistentVolumeClaim lost no longer exists",
        mount_claim("lost"),
        IN_STORAGE,
    ),
    "single": Situation("runs", mount_claim("single", **on_node("work")), IN_STORAGE),
    "single-taken": Situation(
        "PersistentVolumeClaim single is ReadWriteOncePod, and another pod uses it",
        mount_claim("single", **on_node("work")),
        IN_STORAGE,
        starts_after="single",
    ),
    "holder": Situation(
        "runs",
        mount_claim("elsewhere", **on_node("work")),
        IN_STORAGE,
        after="runs",
        then=attach_volume,
    ),
    "elsewhere": Situation(
        "cannot mount a volume: Multi-Attach error for volume",
        mount_claim("elsewhere", **on_node("silent")),
        IN_STORAGE,
        starts_after="holder",
    ),
    "driverless": Situation(
        "cannot mount a volume: .*driver name {storage}.test not found",
        mount_claim("driverless"),
        IN_STORAGE,
    ),
    "closed": Situation(
        "PermissionError: .*'/x/checkpoint'",
        mount_claim("closed", **python_command("open('/x/checkpoint', 'w')")),
        IN_STORAGE,
    ),
    "no-folder": Situation(
        "hostPath type check failed: /none/such", {}, "privileged", a_folder_of_the_node
    ),
    "read-only": Situation(
        "OSError: .*Read-only file system: '/result'", python_command("open('/result', 'w')")
    ),
    "no-shm": Situation(
        "No space left on device",
        {
            "resources": {"cpu": "20m", "memory": "128Mi", "shm": "1Mi"},
            **python_command("f = open('/dev/shm/x', 'wb')\nf.write(bytes(2**22))\nf.flush()"),
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
        "its host cannot start: .*no command specified",
        change=set_main_keys(command=None, args=None),
    ),
    "sidecar": Situation(
        "cannot start on its host: init container proxy ended with exit code 3",
        change=add_failing_sidecar,
    ),
    "side-fails": Situation(
        "failed: container proxy of its host ended with exit code 7; the program itself finished",
        {"command": ["true"]},
        change=add_container("proxy", ["sh", "-c", "exit 7"]),
    ),
    "side-stays": Situation(
        "does not end: its program ended .* ago .exit 0., but container mesh of its "
        "host still runs",
        {"command": ["true"]},
        change=add_container("mesh", ["sleep", "600"]),
    ),
    "init-runs": Situation(
        "is starting: its host: init container fetch has run for",
        change=add_container("fetch", ["sleep", "600"], first=True),
    ),
    "init-oom": Situation(
        "failed: init container fetch of its host was OOMKilled; its memory limit is 40Mi",
        change=add_container("fetch", HOARD, first=True, memory="40Mi"),
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
        replace_executable,
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
        change=set_main_keys(lifecycle={"postStart": {"exec": {"command": ["false"]}}}),
    ),
    "unhealthy": Situation(
        "its liveness probe fails", {"restarts": {"in_place": 0, "crash": 0}}, change=fail_probe
    ),
    "deaf": Situation(
        "rendezvous: (hosts 0, 1 did not join|.*name not resolved)",
        {"hosts": 2, "timeouts": {"rendezvous": "5s"}},
        change=break_name_server,
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
        "is stopped", {"queue": "fine"}, "odd-queues", after="runs", then=deactivate
    ),
    # between hosts
    "unserved": Situation(
        "host 1 of 2 missing; its headless Service, .*, is gone, and rejected: ResourceQuota few "
        "is exceeded",
        {"hosts": 2},
        "unserved",
        delay_host,
        after="waits at rendezvous",
        then=delete_service,
    ),
    # the end
    "by-hand": Situation("is stopped", change=suspend),
    "forgotten": Situation(
        "job forgotten not found .*: a job of this name completed at ",
        {"command": ["true"], "ttl": "1s"},
    ),
    "stuck-pod": Situation(
        f"not found in .*: it is deleted, and finalizer {HOLD} has kept pod stuck-pod-w-0-0-",
        {"node_selector": {POOL: "none"}},
        change=held_pod,
        after="unschedulable",
        then=delete_jobset,
    ),
    "stuck-job": Situation(
        f"is being deleted, but is blocked: finalizer {HOLD} has kept Job stuck-job-w-0",
        {"node_selector": {POOL: "none"}},
        after="unschedulable",
        then=delete_with_a_held_job,
    ),
    "stuck": Situation(
        f"is being deleted, but is blocked: finalizer {HOLD} has kept JobSet stuck",
        {"node_selector": {POOL: "none"}},
        change=held_jobset,
        after="unschedulable",
        then=delete_job,
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

"""What `plan` says beside its numbers: choices that are accepted, and cost time or progress on their platform. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.manifests.platforms import gke
from launcher.manifests.platforms.facts import GKE_GPU
from launcher.manifests.resolve import ResolvedJob
from launcher.wording import count


def notes(job: ResolvedJob) -> Iterator[str]:
    """One sentence for each."""
    if job.platform == "gke":
        yield from _spot(job)
        yield from _tcp(job)


def _spot(job: ResolvedJob) -> Iterator[str]:
    """A node that is reclaimed may be gone before the job's own time to save is over."""
    usual, most = gke.SPOT_GRACE_S.value, gke.LARGEST_SPOT_GRACE_S.value
    if job.spec.capacity == "spot" and job.spec.grace > usual:
        yield (
            f"grace: {job.spec.grace:g} s, but GKE ends the pods of a Spot node after {usual} s, or at most {most} s "
            "where its node pool says so: a save that takes longer is lost with it. Save often enough by "
            "train.checkpoint.every."
        )


def _tcp(job: ResolvedJob) -> Iterator[str]:
    """Hosts whose GPUs have a fast network of their own, which the job does not use."""
    (gpu,) = job.node_labels.get(GKE_GPU, ()) if len(job.node_labels.get(GKE_GPU, ())) == 1 else ("",)
    if job.network == "default" and job.spec.host_count > 1 and (known := gke.GPU_NETWORK_FACTOR.get(gpu)) is not None:
        hosts = count(job.spec.host_count, "host")
        way = "network: gpudirect-tcpxo" if gpu == gke.TCPXO_GPU.value else "pod: with the cluster's own RDMA network"
        yield (
            f"network: the {hosts} talk by TCP over one interface; those of {gpu} for its GPUs have {known.value} × "
            f"its bandwidth: {way}."
        )

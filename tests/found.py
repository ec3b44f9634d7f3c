"""Entries of docs/troubleshooting.md, as who has only a message finds them.

`shows` is called where a test makes an error for real: tests/launcher/test_found.py reads those
calls from the sources and knows so which entries have been produced. The others are in NOT_HERE,
with what would be needed.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxlaunch.launcher import troubleshooting

ROOT = Path(__file__).parents[1]
# The generated table of situations, which is last, has no messages.
PAGE = (ROOT / troubleshooting.PAGE).read_text(encoding="utf-8").partition("\n| situation |")[0]
ROWS = [
    re.split(r"(?<!\\)\|", line)[1:-1]
    for line in PAGE.splitlines()
    if re.match(r"\| (?!---|on the screen)", line)
]


def find_phrases(row: list[str]) -> list[str]:
    """Return the words on the screen: what the first cell has in code or in quotes."""
    return [code or quoted for code, quoted in re.findall(r"`([^`]+)`|\"([^\"]+)\"", row[0])]


@functools.cache  # re's own cache holds fewer than the page has
def make_pattern(phrase: str) -> re.Pattern[str]:
    """Return a pattern for a phrase with any numbers and quoted names, and anything for `…`."""
    if phrase.startswith("exit "):
        return re.compile(rf"(?<!\w){phrase}(?!\d)")
    parts = (re.sub(r"\d+", r"\\d+", re.escape(part)) for part in phrase.split("…"))
    words = re.sub(r'"[^"]+"', '"[^"]+"', ".*?".join(parts))
    return re.compile(rf"(?<!\w){words}", re.DOTALL)


def find_entry(message: str) -> str:
    """Return the entry whose longest phrase is in the message, or ""."""
    matches = [
        (len(phrase), row[0])
        for row in ROWS
        for phrase in find_phrases(row)
        if make_pattern(phrase).search(message.replace("`", ""))
    ]
    return max(matches, default=(0, ""))[1]


def split_reasons(message: str) -> list[str]:
    """Yield a message, and each reason in one of the scheduler."""
    return [message, *re.split(r"[:,] (?=\d+ )", message)[1:]]


def shows(words: str, message: str) -> None:
    """Assert that the message alone leads to the entry with these words."""
    assert words in find_entry(message), f"{message!r} leads to {find_entry(message)!r}"


def shown() -> Iterator[tuple[str, str]]:
    """Return the words that tests pass to `shows`, each with its file."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Call)
                and _name(node.func) == "shows"
                and isinstance(node.args[0], ast.Constant)
            ):
                yield str(node.args[0].value), path.relative_to(ROOT).as_posix()


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


# Situations of tests/cluster/situations.py and rare_situations.py -> what Kubernetes says then.
ON_CLUSTER: Mapping[str, str] = {
    "no-image": "manifest unknown",
    "locked": "401 Unauthorized",
    "no-registry": "dial tcp: lookup",
    "not-loaded": "ErrImageNeverPull",
    "no-name": "InvalidImageName",
    "no-label": "node(s) didn't match Pod's",
    "no-claim": "persistentvolumeclaim",
    "unbound": "unbound immediate",
    "no-secret": 'secret "hf" not found',
    "no-key": "couldn't find key",
    "no-configmap": "FailedMount",
    "quota": "exceeded quota: few",
    "unlimited": "failed quota: strict",
    "beyond": "maximum memory usage",
    "insecure": "violates PodSecurity",
    "webhook-pods": "failed calling webhook",
    "policy": "ValidatingAdmissionPolicy",
    "no-account": "error looking up service account",
    "no-priority": "no PriorityClass with name",
    "never": "previously considered podsets",
    "no-queue": "LocalQueue … doesn",
    "stopped-queue": "is inactive`",
    "whole-oom": "`OOMKilled`",
    "child-oom": "`was OOMKilled`",
    "excess": "Pod ephemeral local storage",
    "late": "Job was active longer",
    "crashes": "PodFailurePolicy",
    "no-command": "ReachedMaxRestarts",
    "no-service": "HeadlessServiceCreationFailed",
    "no-runtime": "RuntimeClass",
    "gated": "SchedulingGated",
    "port-taken": "have free ports",
    "refused-by-node": "OutOfcpu",
    "lost": "bound to non-existent",
    "elsewhere": "Multi-Attach",
    "driverless": "registered CSI drivers",
    "closed": "PermissionError",
    "read-only": "Read-only file system",
    "foreign-image": "no match for platform",
    "no-pull-secret": "image pull secrets",
    "root": "runAsNonRoot",
    "unhealthy": "Liveness probe failed",
    "uncovered": "unavailable in ClusterQueue",
    "too-large": "`Insufficient cpu`",
    "tainted": "node(s) had untolerated taint",
    "no-agent": "`ModuleNotFoundError: No module named 'jaxlaunch'`",
    "bad-init": "`Init:Error`",
    "cordoned": "node(s) were unschedulable",
    "crowded": "`Too many pods`",
    "uneven": "any other `is forbidden:` of a pod",
    "far": "volume node affinity conflict`",
    "single-taken": "ReadWriteOncePod access mode`",
    "untrusted": "`x509: certificate signed",
    "no-entrypoint": "`CreateContainerError`",
    "sidecar": "`CrashLoopBackOff`",
    "no-program": "executable file not found in $PATH",
    "not-executable": "/app/train.sh",
    "no-format": "`exec format error`",
}

# Why an entry is not compared with a message that a test produced -> words of entries.
NOT_HERE: Mapping[str, tuple[str, ...]] = {
    "needs GPUs, their driver or NCCL": (
        "Unable to initialize backend 'cuda'",
        "An NVIDIA GPU may be present",
        "No GPU/TPU found",
        "CUDA backend failed to initialize:",
        "CUDA driver version is insufficient",
        "CUDA_ERROR_NO_DEVICE",
        "libcuda.so.1: cannot open",
        "DNN library initialization failed",
        "while trying to allocate",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "ncclCommInitRank",
        "unhandled cuda error",
        "invalid usage (run with",
        "please report this issue to the NCCL developers",
        "Bootstrap : no socket interface found",
        "remote process exited or there was a network error",
        "failed to extend /dev/shm/nccl-",
        "NCCL WARN Call to connect",
        "Got completion from peer",
    ),
    "needs TPUs": (
        "The TPU is already in use",
        "A Google TPU may be present",
        "Ran out of memory in memory space hbm",
        "Insufficient google.com/tpu",
    ),
    "needs a cloud's autoscaler, storage driver, registry or buckets": (
        "pod triggered scale-up",
        "pod didn't trigger scale-up",
        "toomanyrequests",
        "FailedAttachVolume",
        "Anonymous caller does not have",
        "Unable to locate credentials",
    ),
    "needs an NFS server or a disk with a quota": ("Stale file handle", "Disk quota exceeded"),
    "needs a node that breaks, or a timing that no test can force": (
        "The node was low on resource: memory",
        "FailedCreatePodSandBox",
        "no nodes available to schedule pods",
        "files of step … disappeared",
        "UNAVAILABLE: failed to connect to all addresses",
        "stopped sending heartbeats to JAX",
        "waiting for minCount pods from a gang",
        "WatchTasksAsync failed",
        "No space left on device: saving step 40 in",
    ),
}

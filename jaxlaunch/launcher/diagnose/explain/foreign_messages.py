"""Messages of JAX, NCCL and the operating system: what they mean, and what to do. Pure functions.

They are searched for in the exception and the last lines of output that a verdict keeps. The first
match counts, so messages that only report the end of another rank come last.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from jaxlaunch.launcher.diagnose.text import SUBMIT_AGAIN, NextStep, advise_change, advise_resubmit
from jaxlaunch.records.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class ForeignMessage:
    """A message of another program.

    Attributes:
        pattern: Regular expression that matches a part of the message.
        meaning: Cause of the message, as a clause that follows "means that".
        step: What to do.
    """

    pattern: re.Pattern[str]
    meaning: str
    step: NextStep


def _message(pattern: str, meaning: str, step: NextStep) -> ForeignMessage:
    return ForeignMessage(re.compile(pattern), meaning, step)


FOREIGN_MESSAGES: Sequence[ForeignMessage] = (
    # Without NCCL_SOCKET_IFNAME, NCCL uses any interface, and the loopback interface if there is no
    # other (ncclFindInterfaces in src/misc/socket.cc), so the variable must be the cause. The third
    # form is that of NCCL before 2.28 (NVIDIA/nccl, issue 1837).
    _message(
        r"no socket interface found|No interface found in the same subnet|"
        r"connecting to address .*with family \d+ is neither AF_INET",
        "no network interface of the pod that is up matches NCCL_SOCKET_IFNAME",
        advise_resubmit(
            "leave NCCL_SOCKET_IFNAME out of env: and of the image (also in /etc/nccl.conf and "
            "~/.nccl.conf), or set it to an interface of the pod: eth0, or one of the node's with "
            "network: hostnetwork; then `{again}`",
            again=SUBMIT_AGAIN,
        ),
    ),
    _message(
        r"Duplicate GPU detected",
        "two ranks use the same GPU",
        advise_resubmit(
            "leave CUDA_VISIBLE_DEVICES to the launcher, and request as many GPUs as "
            "processes_per_host; then `{again}`",
            again=SUBMIT_AGAIN,
        ),
    ),
    # From JAX's coordination service.
    _message(
        r"unexpectedly tried to connect with a different incarnation",
        "a second process joined with the number of a rank that had joined before",
        advise_change(
            "let each rank call jax.distributed.initialize in one process: put it under `if "
            "__name__ == '__main__'`, so that processes that multiprocessing starts do not repeat "
            "it, and set processes_per_host for several ranks of a host."
        ),
    ),
    # From the threads of TSL, OpenBLAS and abseil, and from Python's.
    _message(
        r"pthread_create(?:\(\))? failed|can't start new thread",
        "the pod or its user may not have more threads and processes",
        advise_change(
            "start fewer workers and threads (train.data.threads, OMP_NUM_THREADS and "
            "OPENBLAS_NUM_THREADS in env:), or ask the cluster administrator for a higher limit: "
            "podPidsLimit of the kubelet, LimitNPROC of containerd."
        ),
    ),
    _message(
        r"Too many open files",
        "a process has as many files and sockets open as it may (`ulimit -n`)",
        advise_change(
            "open fewer files at once (train.data.threads, fewer and larger files, workers of a "
            "data loader that share memory by file_system), raise the soft limit in the program "
            "by resource.setrlimit, or ask the cluster administrator for a higher LimitNOFILE of "
            "containerd."
        ),
    ),
    _message(
        r"Cannot assign requested address",
        "a process listens on an address that the pod does not have, or all local ports for "
        "connections to one address are in use",
        advise_change(
            "let your program listen on 0.0.0.0 (or [::]) rather than on the name or the address "
            "of the pod, which a node's network may translate."
        ),
    ),
    _message(
        r"Shutdown barrier (in coordination service )?has failed",
        "a rank did not come to the end of the program: it failed, or worked for longer than "
        "shutdown_timeout_seconds after the others had ended",
        advise_change(
            "read the log of the rank that did not end; if it only works for longer, pass a longer "
            "shutdown_timeout_seconds to jax.distributed.initialize."
        ),
    ),
    _message(
        r"WatchTasksAsync failed",
        "rank 0, which serves the coordination, had ended before",
        advise_change("read the log of rank 0: this message is only a consequence of its end."),
    ),
)


def find_foreign_message(verdict: Verdict) -> tuple[str, ForeignMessage] | None:
    """Return the first known message in a verdict: the text that matches, and its entry."""
    exception = verdict.failure.exception
    text = f"{'' if exception is None else exception.message}\n{verdict.traceback or ''}"
    for message in FOREIGN_MESSAGES:
        if match := message.pattern.search(text):
            return match[0], message
    return None

"""A call of a function by the processes of a job on a cluster.

The call travels in the ConfigMap of the job's code. Rank 0 writes the value into its pod, enters
the phase "done" and waits until the value was copied from there. A rank that fails writes its
exception, and its pod stays until that was copied (`hold_on_failure`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import posixpath
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxlaunch.launcher.client import function, values
from jaxlaunch.launcher.client.handle import LOGGER, Handle
from jaxlaunch.launcher.client.job import Job
from jaxlaunch.launcher.client.job_view import ClusterView
from jaxlaunch.launcher.errors import JobFailedError, UserError
from jaxlaunch.launcher.jobs.exec import rank_pod
from jaxlaunch.launcher.jobs.exec.copy import Copy, PodSide
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.jobs.status import collect
from jaxlaunch.launcher.jobs.status.job_status import FINAL_STATES, State
from jaxlaunch.launcher.jobs.submit import Submission
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.kubernetes.watch import Outage
from jaxlaunch.launcher.manifests.code import CODE_FOLDER
from jaxlaunch.launcher.manifests.storage import SCRATCH

# The folder of the call in the code's, and that of its results in a pod.
_CALL_FOLDER, _RESULTS = "jaxlaunch-call", f"{SCRATCH}/jaxlaunch-call"
# How long a failed rank's pod stays if nothing releases it.
_HOLD = "5m"
_POLL_S = 1.0


def run_on_cluster(
    call: Mapping[str, Any], keys: Mapping[str, Any], folder: Path, context: str | None
) -> None:
    """Run the call as a job, and copy its value or exception into `folder`.

    If this is interrupted or fails, the job is deleted.

    Args:
        call: The call, with paths of this machine.
        keys: Keys of the job, without its command.
        folder: A temporary folder.
        context: The context of the kubeconfig, or None for the current one.

    Raises:
        JobFailedError: If the job fails.
        ClusterError: If the cluster cannot be reached, or a right is missing.
        UserError: If the code or the arguments cannot be sent.
    """
    code, include = _choose_code(call, keys, folder)
    # With the time, because equal calls are different jobs.
    (call_file := folder / _CALL_FOLDER / function.CALL).parent.mkdir()
    files = dict[str, bytes]()
    if (file := call["file"]) is not None and Path(file).is_relative_to(folder):
        # The cell of a notebook travels with the call.
        files[f"{_CALL_FOLDER}/{Path(file).name}"] = Path(file).read_bytes()
        call = {**call, "file": str(Path(code) / _CALL_FOLDER / Path(file).name)}
    values.write_value(call_file, _map_call(call, code) | {"at": time.time()})
    files[f"{_CALL_FOLDER}/{function.CALL}"] = call_file.read_bytes()
    remote_call = f"{CODE_FOLDER}/{_CALL_FOLDER}/{function.CALL}"
    command = ["python", "-m", function.RANK_PROGRAM, remote_call, _RESULTS]
    block = {"folder": code, "include": include}
    job = Job(**{"hold_on_failure": _HOLD, **keys, "code": block, "command": command})
    job._file = dataclasses.replace(job._file, code_files=files)
    # Nothing exists before the submission is sent.
    handle, submission = job._prepare_submission(None, context, None, replace=True, force=False)
    try:
        with _defer_interrupt():
            submission.submit(replace=True)
        _await_result(Cluster.connect(context, LOGGER.info), handle, folder)
    except JobFailedError:
        raise
    except BaseException:
        _delete_job(handle, submission)
        raise


def _delete_job(handle: Handle, submission: Submission) -> None:
    """Delete the job of a call if it exists. An error is logged, so that it hides no other."""
    try:
        if submission.find_jobset() is not None:
            handle.delete()
    except UserError as error:
        command = f"launcher delete -n {handle.namespace} {handle.name}"
        text = f"JobSet {handle.name} may still exist; `{command}` deletes it."
        LOGGER.warning("%s Its deletion failed: %s", text, error.message)


@contextlib.contextmanager
def _defer_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end, when the job is known, or at the second Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def note_interrupt(number: int, frame: object) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note_interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if count:
        raise KeyboardInterrupt


def _await_result(cluster: Cluster, handle: Handle, folder: Path) -> None:
    """Copy the value or the exception of the job into `folder`, and wait for its end.

    An API server that is upgraded does not answer for minutes, while the job continues.
    """
    outage = Outage(cluster, LOGGER.info)
    take_result = functools.partial(_take_result, cluster, handle, folder)
    while not outage.call_with_retries(take_result):
        time.sleep(_POLL_S)
    outage.call_with_retries(handle.wait)


def _take_result(cluster: Cluster, handle: Handle, folder: Path) -> bool:
    """Copy the value or the exception if there is one, and let the pods end.

    Returns:
        Whether nothing more is to be copied.
    """
    view = ClusterView(collect.read_snapshot(cluster, handle.namespace, handle.name))
    status, heartbeat = view.status, view.snapshot.report.heartbeat
    if status.state in FINAL_STATES:
        return True
    if status.state is State.HELD and status.verdict is not None:
        # The pods may have ended meanwhile.
        with contextlib.suppress(UserError):
            pod = _find_pod(cluster, handle, rank=status.verdict["rank"] or 0)
            # A process that was killed has written no exception.
            with contextlib.suppress(UserError):
                _copy(pod, function.ERROR.format(rank=pod.rank), folder)
            pod.end_hold()
        return True
    if heartbeat is None or 0 not in heartbeat.phases.get("done", ()):
        return False
    try:
        pod = _find_pod(cluster, handle, rank=0)
    except UserError:
        # The pod has ended, or cannot be read now. The next status shows what follows.
        return False
    if not (folder / function.VALUE).exists():
        _copy(pod, function.VALUE, folder)
    (folder / function.TAKEN).touch()
    # The pod may end before the answer to this copy arrives.
    with contextlib.suppress(UserError):
        Copy(PodSide(pod), is_download=False, say=LOGGER.info).run(
            str(folder / function.TAKEN), f"{_RESULTS}/{function.TAKEN}"
        )
        return True
    return False


def _find_pod(cluster: Cluster, handle: Handle, rank: int) -> RankPod:
    return rank_pod.find_pod(cluster, handle.namespace, handle.name, rank, None)


def _copy(pod: RankPod, name: str, folder: Path) -> None:
    transfer = Copy(PodSide(pod), is_download=True, say=LOGGER.info)
    transfer.run(f"{_RESULTS}/{name}", str(folder / name))


def _choose_code(call: Mapping[str, Any], keys: Mapping[str, Any], folder: Path) -> tuple[str, Any]:
    """Return the folder of the function's code, and the files that it includes.

    It is that of the key `code`, or the folder from which Python has imported the module. For a
    module of an installed package, which is in the image, and in a notebook only the call is sent.
    """
    if (code := keys.get("code")) is not None:
        block = code if isinstance(code, Mapping) else {"folder": code}
        return str(Path(block.get("folder", ".")).absolute()), block.get("include", [])
    if (file := call["file"]) is not None:
        is_cell = Path(file).is_relative_to(folder)
        return str(folder / _CALL_FOLDER if is_cell else Path(file).parent), []
    name = call["module"]
    # `python -m` runs a module under another name.
    path = Path(sys.modules.get(name, sys.modules["__main__"]).__file__ or "")
    root = path.parents[name.count(".") + (path.name == "__init__.py")]
    is_installed = not {"site-packages", "dist-packages"}.isdisjoint(root.parts)
    return str(folder / _CALL_FOLDER if is_installed else root), []


def _map_call(call: Mapping[str, Any], code: str) -> dict[str, Any]:
    """Return the call with the paths that its code has in a pod."""
    file = call["file"]
    if file is not None and (file := _map_path(file, code)) is None:
        message = f"{call['file']}, which defines the function, is not in code = {code}."
        raise UserError(message, "name a folder that contains it.")
    paths = [path for entry in call["path"] if (path := _map_path(entry, code)) is not None]
    return {**call, "file": file, "path": paths}


def _map_path(path: str, code: str) -> str | None:
    """Return the path in a pod of a path below the code's folder, or None for another path."""
    if not Path(path).is_relative_to(code):
        return None
    return posixpath.normpath(posixpath.join(CODE_FOLDER, Path(path).relative_to(code).as_posix()))

"""The way of a job from job.yaml to the API server, in files: `python -m tests.journey` prints it.

`launcher submit` runs in this process against the API server of tests/launcher/apiserver.py while every call is traced.
A step is a call of a function of launcher/ that is handed the job: an argument, or an item of a list or a tuple that is
one, is the document, the job as it was read or resolved, the cluster defaults, the bundle, or a manifest. Not counted:
- `self`, for then the job is asked for something of its own and handed to nobody;
- a part of the job, such as its volumes or its network: who takes a part knows nothing of the rest;
- lambdas and comprehensions, and a call from the same function to the same function that came before;
- launcher/kube, which reads any Kubernetes object alike, and what the client does below its own functions.

The steps in their order, from the first to the last that reaches the client, lead through files. A return is a step
into a file that the way has left before.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import jaxlaunch.launcher
from jaxlaunch.launcher.cli.main import main
from jaxlaunch.launcher.kube.kinds import LOCAL_QUEUES, NAMESPACES
from tests.launcher import apiserver
from tests.launcher.apiserver import Server

HOME = Path(jaxlaunch.launcher.__file__).parent
ROOT = Path(__file__).parents[1]
JOB = ROOT / "k8s" / "examples" / "gke-gpu.yaml"
CLIENT = "cluster/client.py"
BESIDE = ("kube/", "cluster/transport.py")
CARRIERS = {"Document", "JobFile", "JobSpec", "ResolvedJob", "Defaults", "ClusterDefaults", "Bundle", "Prepared"}
MANIFESTS = ("JobSet", "NetworkPolicy", "ConfigMap")


class Step(NamedTuple):
    """A function that was handed the job."""

    file: str  # below launcher/
    function: str


class Way(NamedTuple):
    """All steps, and the files that they lead through."""

    steps: tuple[Step, ...]

    @property
    def stays(self) -> list[str]:
        """The files in the order of the steps, each as often as the way comes into it."""
        files = [step.file for step in self.steps]
        return [file for place, file in enumerate(files) if place == 0 or files[place - 1] != file]

    @property
    def files(self) -> int:
        return len(set(self.stays))

    @property
    def returns(self) -> int:
        return len(self.stays) - self.files

    def lines(self) -> Iterator[str]:
        """A line for each stay in a file."""
        file = ""
        for step in self.steps:
            if step.file != file:
                yield f"{step.file}: {step.function}"
            else:
                yield f"{' ' * len(file)}  {step.function}"
            file = step.file


def walk(job: Path = JOB, *overrides: str) -> Way:
    """The way that submitting this job takes, into the namespace team-a of an API server that has all it names."""
    with tempfile.TemporaryDirectory() as folder, apiserver.serving(Server()) as server:
        server.put(NAMESPACES.path(None, "team-a"), {})
        server.put(LOCAL_QUEUES.path("team-a", "everyone"), {})
        config = apiserver.kubeconfig(Path(folder), server.url, token="t")
        return _traced(["submit", str(job), "namespace=team-a", *overrides], config)


def _traced(arguments: Sequence[str], kubeconfig: Path) -> Way:
    steps: list[Step] = []
    known: set[tuple[CodeType | None, CodeType]] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        step = _step(frame) if event == "call" else None
        call = (frame.f_back.f_code if frame.f_back else None, frame.f_code)
        if step is not None and call not in known:
            known.add(call)
            steps.append(step)

    argv, before = sys.argv, os.environ.get("KUBECONFIG")
    content = io.BytesIO()
    output = io.TextIOWrapper(content, write_through=True)
    sys.argv, os.environ["KUBECONFIG"] = ["launcher", *arguments], str(kubeconfig)
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            sys.setprofile(note)
            main()
    except SystemExit as left:
        assert not left.code, content.getvalue().decode()
    finally:
        sys.setprofile(None)
        sys.argv = argv
        os.environ.pop("KUBECONFIG") if before is None else os.environ.update(KUBECONFIG=before)
    last = max(place for place, step in enumerate(steps) if step.file == CLIENT)
    return Way(tuple(steps[: last + 1]))


def _step(frame: FrameType) -> Step | None:
    """The function that begins, where it is one of ours and is handed the job."""
    code = frame.f_code
    if not code.co_filename.startswith(f"{HOME}/") or code.co_name.startswith("<"):
        return None
    file = Path(code.co_filename).relative_to(HOME).as_posix()
    if file.startswith(BESIDE):
        return None
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    handed = [frame.f_locals.get(name) for name in names if name != "self"]
    return Step(file, code.co_qualname) if any(map(_carries, handed)) else None


def _carries(value: Any) -> bool:
    return any(map(_is_the_job, value)) if isinstance(value, list | tuple) else _is_the_job(value)


def _is_the_job(value: Any) -> bool:
    if isinstance(value, dict):
        return value.get("kind") in MANIFESTS and "apiVersion" in value
    return type(value).__name__ in CARRIERS and type(value).__module__.startswith("jaxlaunch.launcher.")


if __name__ == "__main__":
    way = walk(JOB)
    print(*way.lines(), sep="\n")
    print(f"\n{way.files} files, {way.returns} returns")

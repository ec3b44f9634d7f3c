"""A job.yaml as an object."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.client import submission
from jaxlaunch.launcher.client.handle import (
    LOGGER,
    Handle,
    JobHandle,
    RunHandle,
    failure_of_run,
    show_texts,
)
from jaxlaunch.launcher.diagnose.doctor import checks
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job import load as jobs
from jaxlaunch.launcher.job.request import JobRequest, summarize_job
from jaxlaunch.launcher.jobs.submit import Submission, record_words
from jaxlaunch.launcher.kubernetes.client import Cluster
from jaxlaunch.launcher.local import run_folders
from jaxlaunch.launcher.local.run import LocalRun, check_run_folder, refuse_own_folder, run_job
from jaxlaunch.launcher.manifests.jobset import prepare
from jaxlaunch.launcher.plan.job_plan import JobPlan, plan_job
from jaxlaunch.launcher.yaml import writer
from jaxlaunch.records import codec
from jaxlaunch.records.verdict import Verdict

StrPath = str | os.PathLike[str]


class Job:
    """A job: the keys of [job.yaml](job-yaml.md), checked.

    `Job(name=…, command=…)` has the keys as arguments, and `Job.load("job.yaml")` reads a file.
    `accelerator="cpu"` is `{"type": "cpu"}`. Relative paths start at `folder`. Nothing is printed:
    messages go to `logging.getLogger("jaxlaunch")`.

    Raises [`UserError`](#usererror) with all faults of the keys.

    **Example:**

    ```python
    import jaxlaunch

    job = jaxlaunch.Job(
        name="two",
        hosts=2,
        accelerator="cpu",
        command=["python", "-c", "import os; print('rank', os.environ['JAX_PROCESS_ID'])"],
    )
    assert job.validate()["processes"] == 2
    run = job.run()
    assert run.logs() == ["[0] rank 0", "[1] rank 1"]
    ```
    """

    def __init__(self, *, folder: StrPath = ".", **keys: Any) -> None:
        text = writer.render_document({key: _plain_value(key, keys[key]) for key in keys})
        self._file = jobs.read_job_text(text, "Job(...)", Path(folder).absolute())
        self._path: Path | None = None
        self._overrides: Sequence[str] = ()

    @classmethod
    def load(cls, path: StrPath, **overrides: Any) -> Job:
        """Read a job.yaml. Overrides replace keys, and a dict those that it names.

        `Job.load("job.yaml", hosts=2, train={"steps": 100})` is `launcher run job.yaml hosts=2
        train.steps=100`.
        """
        job = cls.__new__(cls)
        job._path, job._overrides = Path(path), list(_list_overrides(overrides))
        job._file = jobs.read_job(job._path, job._overrides)
        return job

    @property
    def name(self) -> str:
        """The name of the job."""
        return self._file.spec.name

    def __repr__(self) -> str:
        return f"<jaxlaunch.Job {self.name}>"

    def validate(self) -> JobRequest:
        """Return what the job requests, as `launcher validate -o json` prints it."""
        return summarize_job(self._file.spec)

    def plan(self, *, defaults_file: StrPath | None = None, compile: bool = False) -> JobPlan:
        """Return the memory that the job needs, as `launcher plan -o json` prints it.

        `compile` compiles the steps for the devices of the job, which need not be here.
        """
        default_values = defaults.load_defaults(_optional_path(defaults_file))
        return plan_job(self._file, default_values, is_compiled=compile, show=LOGGER.info)

    def render(self, *, defaults_file: StrPath | None = None) -> list[dict[str, Any]]:
        """Return the Kubernetes manifests, the JobSet first. No cluster is contacted."""
        default_values = defaults.load_defaults(_optional_path(defaults_file))
        return list(prepare(self._file, default_values).manifests)

    def run(
        self,
        *,
        folder: StrPath | None = None,
        volumes: Mapping[str, StrPath] | None = None,
        simulate: bool = False,
        take_over: bool = False,
        on_line: Callable[[str], None] | None = None,
    ) -> Handle:
        """Run the job on this machine to its end, as `launcher run` does.

        The run is in `folder`, by default runs/NAME. `volumes` maps names of volumes to folders;
        `simulate` and `take_over` are options of `launcher run`. `on_line` is called with each line
        of the ranks. At Ctrl-C, or if `launcher stop` ends the run, the processes save and end, and
        KeyboardInterrupt is raised.

        Raises [`JobFailedError`](#jobfailederror) if it does not complete.
        """
        run_folder = Path(folder or run_folders.RUNS_FOLDER / self.name).absolute()
        if self._path is not None:
            refuse_own_folder(self._path, run_folder)
        check_run_folder(self._file.spec, run_folder, LOGGER.info)
        mounts = {name: Path(path).absolute() for name, path in (volumes or {}).items()}
        words = self._run_words(mounts, folder, simulate=simulate)
        local = LocalRun(
            run_folder, self._file.folder, mounts, simulate, take_over, words, asked_at=time.time()
        )
        show = show_texts(on_line) or (lambda line: None)
        end = run_job(self._file.spec, local, show, LOGGER.info)
        if end.code != contract.DONE:
            verdict = codec.read_record(Verdict, end.summary["verdict"])
            if verdict.cause == contract.INTERRUPTED:
                raise KeyboardInterrupt
            raise failure_of_run(self.name, verdict)
        return RunHandle(run_folder)

    def submit(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        defaults_file: StrPath | None = None,
        replace: bool = False,
        force: bool = False,
    ) -> Handle:
        """Submit the job to a cluster, as `launcher submit` does. A second call changes nothing.

        `replace` deletes a job of that name that has ended, and `force` submits a job whose pods
        the namespace's Pod Security level rejects.
        """
        handle, pending = self._prepare_submission(
            namespace, context, _optional_path(defaults_file), replace=replace, force=force
        )
        pending.submit(replace=replace)
        return handle

    def _prepare_submission(
        self,
        namespace: str | None,
        context: str | None,
        defaults_file: Path | None,
        *,
        replace: bool,
        force: bool,
    ) -> tuple[JobHandle, Submission]:
        """Check the job against the cluster. Return its handle, and the submission to send."""
        say, file = LOGGER.info, self._file
        if namespace is not None:
            spec = file.spec.model_copy(update={"namespace": namespace})
            file = dataclasses.replace(file, spec=spec)
        cluster = Cluster.connect(context, say)
        namespace = file.spec.namespace or cluster.namespace
        default_values = submission.read_defaults(cluster, namespace, defaults_file, say)
        prepared = submission.prepare_job(file, cluster, namespace, default_values, say)
        manifests = prepared.manifests_with_secret()
        if self._path is not None:
            record_words(manifests[0], self._path, self._overrides, defaults_file)
        notes = checks.check_submission(
            cluster, manifests, replace=replace, watch=False, force=force
        )
        for note in notes:
            LOGGER.warning(note)
        return JobHandle(cluster, namespace, self.name), Submission(cluster, manifests, say)

    def _run_words(
        self, mounts: Mapping[str, Path], folder: StrPath | None, *, simulate: bool
    ) -> list[str]:
        """Return the arguments of `launcher run`; none for a job without a file."""
        if self._path is None:
            return []
        words = [str(self._path), *self._overrides, *(["--simulate"] if simulate else [])]
        words += [] if folder is None else ["--run-dir", str(folder)]
        return words + [f"--volume={name}={path}" for name, path in mounts.items()]


def _optional_path(path: StrPath | None) -> Path | None:
    return None if path is None else Path(path)


def _plain_value(key: str, value: Any) -> Any:
    """Return the value of a key as plain data."""
    if key == "accelerator" and isinstance(value, str):
        return {"type": value}
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {name: _plain_value("", item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_value("", item) for item in value]
    return value


def _list_overrides(keys: Mapping[str, Any], prefix: str = "") -> Sequence[str]:
    """Return keys of a job as arguments of the command line."""
    overrides = list[str]()
    for key, value in keys.items():
        plain = _plain_value(prefix + key, value)
        # A dot in a name, such as example.com/team, would divide it.
        if isinstance(plain, dict) and plain and not any("." in str(name) for name in plain):
            overrides += _list_overrides(plain, f"{prefix}{key}.")
        else:
            # YAML reads JSON.
            overrides.append(f"{prefix}{key}={json.dumps(plain, ensure_ascii=False)}")
    return overrides

"""One archive with what is known about a job: to attach to a report, or to read elsewhere.

Its files are text, without credentials (`job/credentials`). `explanation.json` and `status.json`
are what the commands print with -o json, so that `launcher explain BUNDLE` shows what was known
when the bundle was written.
"""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import platform
import shlex
import tarfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from jaxlaunch import regular_files
from jaxlaunch.launcher.client.job_view import ClusterView, JobView, RunView
from jaxlaunch.launcher.diagnose.explain.explanation import Explanation
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job import credentials
from jaxlaunch.launcher.jobs.status.snapshot import Snapshot
from jaxlaunch.launcher.kubernetes.labels import SUBMITTED_WORDS
from jaxlaunch.launcher.local.run_folders import Run
from jaxlaunch.launcher.wording import os_error_reason
from jaxlaunch.launcher.yaml import reader, writer
from jaxlaunch.records.log_lines import format_line
from jaxlaunch.runs import layout
from jaxlaunch.runs.run_folder import SECRET_KEYS, RunFolder, start_rows, without_secrets

SUFFIX = ".bundle.tar.gz"
EXPLANATION = "explanation.json"
VERSION = 1
# The end of each longer file, and the largest size of all logs together.
_MAX_FILE_BYTES, _MAX_LOG_BYTES = 4 << 20, 64 << 20
# Files of a run, and of each of its starts.
_RUN_FILES = (
    *(layout.SUMMARY, layout.ATTEMPTS, layout.RANKS, layout.METRICS, layout.EVALS),
    layout.SLURM,
)
_START_FILES = (layout.SUMMARY, layout.COMMAND)
# The annotation in which kubectl repeats the whole object as JSON.
_LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"


def write_bundle(view: JobView, logs: Iterable[tuple[str, str]], path: Path) -> None:
    """Write a job, as it was read, to an archive.

    Args:
        view: The job.
        logs: The logs, as names of files and texts.
        path: The archive. An existing one is replaced.

    Raises:
        UserError: If the file cannot be written.
    """
    hidden_values = list[str]()
    if isinstance(view, RunView) and view.run.job is not None:
        # Programs print secrets, too. They came from the environment.
        hidden_values = [os.environ.get(name, "") for name in view.run.job.secrets]
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in (*_list_files(view), *_limit_logs(logs)):
            data = credentials.redact_text(text, hidden_values).encode()
            header = tarfile.TarInfo(name)
            header.size, header.mtime = len(data), int(time.time())
            archive.addfile(header, io.BytesIO(data))
    try:
        path.write_bytes(buffer.getvalue())
    except OSError as error:
        message = f"{path} cannot be written: {os_error_reason(error)}."
        raise UserError(message, "name another file with -o.") from None


def read_explanation(path: Path) -> Explanation:
    """Return the explanation in a bundle. Raises UserError if the file is not one."""
    try:
        with tarfile.open(path) as archive:
            file = archive.extractfile(EXPLANATION)
            assert file is not None, EXPLANATION
            return TypeAdapter(Explanation).validate_json(file.read(_MAX_FILE_BYTES))
    except (
        OSError,
        EOFError,
        tarfile.TarError,
        KeyError,
        AssertionError,
        ValidationError,
    ) as error:
        reason = os_error_reason(error) if isinstance(error, OSError) else str(error)
        message = f"{path} is not a bundle: {reason}."
        raise UserError(message, "`launcher bundle NAME` writes one.") from None


def _list_files(view: JobView) -> Iterator[tuple[str, str]]:
    """Yield the names and the texts of all files but the logs."""
    versions = {"jaxlaunch": importlib.metadata.version("jaxlaunch"), "bundle": str(VERSION)}
    versions |= {"python": platform.python_version(), "system": platform.platform()}
    yield "versions.json", _dump_json(versions)
    explanation = view.explanation.to_json()
    yield EXPLANATION, _dump_json(_hide_in_texts(explanation, _list_words(view)))
    if isinstance(view, RunView):
        yield "status.json", _dump_json(view.status.to_json())
        yield from _list_run_files(view.run)
    elif isinstance(view, ClusterView) and view.has_job:
        yield "status.json", _dump_json(view.status.to_json())
        yield from _list_objects(view.snapshot)


def _list_run_files(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the files of a run folder that describe it."""
    names = [*_RUN_FILES, layout.JOB]
    for start in sorted(os.listdir(run.folder / layout.STARTS)) if _has_starts(run) else ():
        names += [f"{layout.STARTS}/{start}/{name}" for name in (*_START_FILES, layout.JOB)]
    for name in names:
        try:
            data = regular_files.read_bounded(
                run.folder / name, _MAX_FILE_BYTES, from_end=True, below=run.folder
            )
        except OSError:
            # Not every run has all files.
            continue
        text = data.decode(errors="replace")
        if name.endswith(layout.JOB):
            text = _hide_environment(text)
        elif name.endswith((layout.COMMAND, layout.SLURM)):
            text = _hide_words_in_json(text)
        yield name, text


def _list_words(view: JobView) -> list[str]:
    """Return the arguments of the submission, or of all starts of a run, longest first."""
    words = list[str]()
    if isinstance(view, ClusterView) and view.has_job:
        words += view.snapshot.submitted_words
    elif isinstance(view, RunView):
        folder = RunFolder(view.run.folder)
        files = [
            layout.start_file(row.start, layout.COMMAND) for row in start_rows(view.run.summary)
        ]
        for file in (*files, layout.SLURM):
            command = folder.read_json(file)
            if isinstance(start_words := command.get("words"), list):
                words += [word for word in start_words if isinstance(word, str)]
    # One may be the beginning of another.
    return sorted(words, key=len, reverse=True)


def _hide_word(word: str) -> str:
    """Return an argument, without its value if that may contain values of an environment."""
    key, sign, value = word.partition("=")
    place = word if value.lstrip().startswith(("{", "[")) else key
    has_secrets = any(secret_key in place for secret_key in SECRET_KEYS)
    return f"{key}={credentials.HIDDEN}" if sign and has_secrets else word


def _hide_words(value: Any) -> Any:
    """Return the arguments in parsed JSON without values of an environment."""
    if isinstance(value, dict):
        return {key: _hide_words(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hide_words(item) for item in value]
    return _hide_word(value) if isinstance(value, str) else value


def _hide_words_in_json(text: str) -> str:
    """Return recorded arguments without values of an environment, and "" for invalid JSON."""
    try:
        return json.dumps(_hide_words(json.loads(text)), ensure_ascii=False)
    except ValueError:
        return ""


def _hide_in_texts(value: Any, words: Sequence[str]) -> Any:
    """Return an explanation whose commands are without values of an environment."""
    if isinstance(value, dict):
        return {key: _hide_in_texts(item, words) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_hide_in_texts(item, words) for item in value]
    if isinstance(value, str):
        for word in words:
            if (hidden := _hide_word(word)) != word:
                value = value.replace(shlex.quote(word), shlex.quote(hidden))
                value = value.replace(word, hidden)
    return value


def _has_starts(run: Run) -> bool:
    return (run.folder / layout.STARTS).is_dir()


def _hide_environment(text: str) -> str:
    """Return a job.yaml without the values of its environment, and "" for invalid YAML."""
    job = reader.parse_document(text, layout.JOB)
    return "" if job.faults else writer.render_document(without_secrets(job.data))


def _list_objects(snapshot: Snapshot) -> Iterator[tuple[str, str]]:
    """Yield the objects of a job on a cluster, its events, and the records of its leader."""
    kinds = {
        "jobset": [snapshot.jobset],
        "jobs": snapshot.jobs,
        "pods": snapshot.pods,
        "kueue": (snapshot.workload, snapshot.local_queue, snapshot.cluster_queue),
        "nodes": snapshot.nodes or (),
    }
    for name, objects in kinds.items():
        if manifests := [_hide_variables(value) for value in objects if value is not None]:
            yield f"{name}.yaml", writer.render_documents(manifests)
    yield "events.json", _dump_json(snapshot.events)
    yield "records.log", "".join(f"{format_line(record)}\n" for record in snapshot.records)
    if snapshot.unread:
        yield "unread.txt", "".join(f"{text}\n" for text in snapshot.unread)


def _hide_variables(value: Any) -> Any:
    """Return an object without the values of its containers' variables, except those of the agent.

    Those of the agent are the job itself, whose environment is hidden in the same way.
    """
    if isinstance(value, list | tuple):
        return [_hide_variables(item) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(value.get("name"), str) and isinstance(value.get("value"), str):
        is_ours = value["name"].startswith(("JAXLAUNCH_", "JAX_"))
        return value | {"value": _hide_in_json(value["value"]) if is_ours else "…"}
    hidden = {key: _hide_variables(item) for key, item in value.items() if key != _LAST_APPLIED}
    if isinstance(words := hidden.get(SUBMITTED_WORDS), str):
        hidden[SUBMITTED_WORDS] = _hide_words_in_json(words)
    return hidden


def _hide_in_json(text: str) -> str:
    try:
        return json.dumps(without_secrets(json.loads(text)))
    except ValueError:
        return text


def _limit_logs(logs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the end of each log while there is room, and which logs are left out."""
    size, left_out = 0, list[str]()
    for name, text in logs:
        text = text[-_MAX_FILE_BYTES:]
        size += len(text)
        if size <= _MAX_LOG_BYTES:
            yield name, text
        else:
            left_out.append(name)
    if left_out:
        reason = f"These logs are left out: all together exceed {_MAX_LOG_BYTES >> 20} MiB."
        yield "logs/left_out.txt", "\n".join([reason, *left_out, ""])


def _dump_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n"

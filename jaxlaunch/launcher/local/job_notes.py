"""Notes of `validate` on the data, modules and shell scripts of a job, from local files.

No module of the job is imported. `find_refusals` reads data files; the others read their names and
sizes.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import itertools
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch import regular_files
from jaxlaunch.launcher.job.schema import JobSpec
from jaxlaunch.launcher.job.shell_notes import find_exit_code_notes
from jaxlaunch.launcher.wording import format_count, format_size
from jaxlaunch.trainer.spec import (
    Images,
    Mixture,
    PublishedModel,
    Source,
    Table,
    Text,
    TrainSpec,
)
from jaxlaunch.trainer.spec.data import TEXT_KINDS

# The part of a shell script that is read.
MAX_SCRIPT_BYTES = 1 << 18
# The largest number of files that are counted in a folder.
MAX_FILES = 100_000
# A variable of a shell. Kubernetes expands $(NAME), in a pod alone.
_VARIABLE = re.compile(r"\$(?:[A-Z_][A-Z0-9_]*|\{[A-Z_][A-Z0-9_]*\})")
# Files that list images, with columns.
_LIST_SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_MODULE_NAME = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_][\w.]*")


def find_unexportable_options(job: JobSpec) -> Iterator[str]:
    """Yield a sentence for each option of the model with which it cannot be exported."""
    if job.train is not None and isinstance(job.train.model, PublishedModel):
        for fault in job.train.model.unpublished_options:
            yield f"{fault}, so launcher export will refuse this model."


def describe_data(job: JobSpec, folder: Path) -> Iterator[str]:
    """Yield a sentence about each set of local files that the job reads."""
    data = None if job.train is None else job.train.data
    if data is None:
        return
    if isinstance(data, Mixture):
        total = sum(part.weight for part in data.parts.values())
        for name, block in data.part_sources().items():
            weight = data.parts[name].weight
            share = f"{100 * weight / total:.4g} % of the examples" if weight else "only evaluated"
            yield from _describe_block(job, f"train.data.parts.{name}", block, folder, share)
    else:
        yield from _describe_block(job, "train.data", data, folder)
    tokenizer = data.locations().get(("tokenizer",))
    if (
        isinstance(tokenizer, str)
        and _is_local_path(job, tokenizer)
        and not (folder / tokenizer).exists()
    ):
        problem = f"train.data.tokenizer = {tokenizer} does not exist here, in {folder}"
        yield f"{problem}: launcher run refuses it."


def find_refusals(job: JobSpec, folder: Path) -> Iterator[str]:
    """Yield a sentence for each fault of the files here for which `launcher run` refuses the job.

    A program of the trainer reads them, if there are such files and the trainer is installed.
    """
    if job.train is None or not (subjects := _list_readable_subjects(job, job.train, folder)):
        return
    # Imported here, because most jobs have no such files.
    from jaxlaunch.launcher.local import run_folders, trainer_process
    from jaxlaunch.launcher.local.paths import map_paths

    if trainer_process.is_installed():
        run_folder = (run_folders.RUNS_FOLDER / job.name).absolute()
        train = map_paths(job, folder, run_folder, {}).map_train(job.train)
        environ = trainer_process.cpu_environ(job, train, folder)
        result = trainer_process.run_program("jaxlaunch.trainer.check", *subjects, environ=environ)
        yield from (f"launcher run refuses it: {fault}" for fault in result["faults"])


def _list_readable_subjects(job: JobSpec, train: TrainSpec, folder: Path) -> list[str]:
    """Return `model` and `data`, if their files are here and have columns or keys to check."""
    subjects = []
    weights = train.model.init_from if isinstance(train.model, PublishedModel) else None
    if weights is not None and _is_local_path(job, weights) and (folder / weights).is_dir():
        subjects.append("model")
    data = train.data
    sources = list(data.part_sources().values()) if isinstance(data, Mixture) else [data]
    paths = [
        pattern
        for source in sources
        for key in (("path",), ("eval_path",), ("tokenizer",))
        for pattern in _as_list(source.locations().get(key))
    ]
    if any(map(_has_columns, sources)) and all(_is_local_path(job, path) for path in paths):
        has_files = all(
            _find_files(folder / pattern, source.has_subfolders)
            for source in sources
            for pattern in _as_list(source.locations().get(("path",)))
        )
        subjects += ["data"] * has_files
    return subjects


def _has_columns(source: Source) -> bool:
    """Return whether the files of a source have columns or fields that the job may misname."""
    names = [path.lower() for path in _as_list(source.locations().get(("path",)))]
    if isinstance(source, Text):
        has_rows = any(name.removesuffix(".gz").endswith((*TEXT_KINDS,)) for name in names)
        return has_rows and (source.is_prepared or source.is_read_at_start)
    if isinstance(source, Images):
        return any(name.endswith(_LIST_SUFFIXES) for name in names)
    return isinstance(source, Table)


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value or [])


def _describe_block(
    job: JobSpec, key_path: str, block: Source, folder: Path, share: str = ""
) -> Iterator[str]:
    locations = block.locations()
    if share and ("path",) not in locations:
        yield f"{key_path}: {block.source}, {share}."
    for key in ("path", "eval_path"):
        value = locations.get((key,), [])
        patterns = [value] if isinstance(value, str) else value
        remarks = [share] if share and key == "path" else []
        subject = f"{key_path}.{key}: "
        if not patterns or not all(_is_local_path(job, pattern) for pattern in patterns):
            if patterns and remarks:
                yield f"{subject}{' '.join(patterns)}; {share}."
            continue
        sizes_bytes = {
            path: os.path.getsize(path)
            for pattern in patterns
            for path in _find_files(folder / pattern, block.has_subfolders)
        }
        number, total = format_count(len(sizes_bytes), "file"), sum(sizes_bytes.values())
        or_more = " or more" if len(sizes_bytes) >= MAX_FILES else ""
        files = f"{subject}{number}{or_more} here, {format_size(total)}"
        if key == "path" and (note := block.note_held_out(sizes_bytes)):
            remarks.append(note)
        if not sizes_bytes:
            problem = f"{' '.join(patterns)} matches no file here, in {folder}"
            yield f"{subject}{problem}: launcher run refuses it."
        elif not total:
            yield f"{files}: every file that matches is empty."
        else:
            yield f"{'; '.join([files, *remarks])}."


def _is_local_path(job: JobSpec, path: str) -> bool:
    mounts = [PurePosixPath(volume.path) for volume in job.volumes]
    return "://" not in path and not any(map(PurePosixPath(path).is_relative_to, mounts))


def _find_files(pattern: Path, is_recursive: bool) -> list[str]:
    if pattern.is_dir():
        paths = pattern.rglob("*") if is_recursive else pattern.iterdir()
        files = (str(path) for path in paths if path.is_file())
        return list(itertools.islice(files, MAX_FILES))
    names = [str(pattern)] if pattern.is_file() else glob.glob(str(pattern), recursive=True)
    return [name for name in names if os.path.isfile(name)]


def list_missing_modules(job: JobSpec, folder: Path) -> Iterator[str]:
    """Yield a sentence for each module of `train` that is neither here nor installed.

    It is not an error, because the job's image may have the module.
    """
    settings = {} if job.train is None else job.train.model_dump(mode="json", exclude_unset=True)
    for path, module in _find_module_names(settings, "train"):
        if _is_in_folder(folder, module):
            continue
        # Only the top-level package is looked up: for a submodule, find_spec imports its parents.
        package = module.partition(".")[0]
        if _is_in_folder(folder, package) or importlib.util.find_spec(package) is None:
            yield (
                f"{path}: no module {module} is in {folder} or installed here; a run needs it "
                "there or in its image"
            )


def find_unexpanded_variables(job: JobSpec) -> Iterator[str]:
    """Yield a sentence for each value of `env` with a variable, which nothing expands."""
    for name, value in job.env.items():
        if (match := _VARIABLE.search(value)) is not None:
            yield (
                f"env.{name} holds {match[0]}, which is not expanded: values of env are as "
                "written; a shell expands it, as in command: [sh, -c, …]"
            )


def find_lost_exit_codes(job: JobSpec, folder: Path) -> Iterator[str]:
    """Yield a sentence for each place where a shell of the command hides a failure."""
    if job.command is None:
        return
    folders = [folder / (job.code_folder or "."), folder]
    if job.workdir is not None:
        folders.insert(0, folders[0] / job.workdir)

    def read_script(name: str) -> str | None:
        for parent in folders:
            with contextlib.suppress(OSError, ValueError):
                data = regular_files.read_bounded(parent / name, MAX_SCRIPT_BYTES)
                return None if b"\0" in data else data.decode(errors="replace")
        return None

    yield from find_exit_code_notes(job.command, read_script)


def _is_in_folder(folder: Path, module: str) -> bool:
    path = folder.joinpath(*module.split("."))
    return path.is_dir() or path.with_name(f"{path.name}.py").is_file()


def _find_module_names(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _find_module_names(item, f"{path}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _find_module_names(item, f"{path}[{index}]")
    elif isinstance(value, str) and (match := _MODULE_NAME.fullmatch(value)) is not None:
        yield path, match[1]

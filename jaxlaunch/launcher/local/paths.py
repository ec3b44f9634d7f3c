"""The paths of a job on this machine: volumes become folders, relative paths start at the job file.

The folders are checked before anything else, with an error for those that cannot be used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.job.schema import Code
from jaxlaunch.launcher.job.types import Ephemeral, Volume
from jaxlaunch.launcher.manifests.code import CODE_FOLDER
from jaxlaunch.launcher.wording import join_choices
from jaxlaunch.spelling import find_nearest
from jaxlaunch.trainer.spec import (
    CustomModel,
    TrainSpec,
)

# A full disk or quota accepts an empty file, but not this many bytes.
PROBE_BYTES = 4096

# What identifies a volume's data: name, kind and keys.
Source = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Paths:
    """Maps the paths in a job to paths on this machine."""

    # The folder of the job file.
    base: Path
    mounts: Mapping[PurePosixPath, Path]  # path in the pod -> folder on this machine
    # The folder of the job's code, which a pod has at CODE_FOLDER.
    code: Path | None = None

    def resolve_path(self, path: str) -> str:
        """Return `path` on this machine. URLs are unchanged."""
        if "://" in path:
            return path
        if (mount := self._find_mount(path)) is None:
            return str(self.base / path)
        return str(self._folders[mount] / _normalize_path(path).relative_to(mount))

    def map_argument(self, text: str) -> str:
        """Return a command's argument, with its path below a volume mapped: PATH or --flag=PATH."""
        flag, equals, value = text.partition("=")
        if equals and flag.startswith("-") and self._find_mount(value) is not None:
            return f"{flag}={self.resolve_path(value)}"
        return str(self.map_value(text))

    def map_value(self, value: Any) -> Any:
        """Return a value for the user's code, with strings that are paths below a volume mapped."""
        if isinstance(value, Mapping):
            return {key: self.map_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.map_value(item) for item in value]
        is_path = isinstance(value, str) and self._find_mount(value) is not None
        return self.resolve_path(value) if is_path else value

    def map_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Return environment variables with paths mapped, in search paths each entry."""

        def map_entries(name: str, value: str) -> str:
            entries = value.split(os.pathsep) if name.endswith("PATH") else [value]
            return os.pathsep.join(str(self.map_value(entry)) for entry in entries)

        return {name: map_entries(name, value) for name, value in env.items()}

    def map_train(self, spec: TrainSpec) -> TrainSpec:
        """Return the train block with paths of this machine. Omitted paths stay omitted."""
        spec = spec.map_paths(self.resolve_path, self.map_value)
        if not isinstance(spec.model, CustomModel):
            return spec
        model = self.map_value(spec.model.model_dump(exclude_unset=True))
        return spec.model_copy(update={"model": CustomModel.model_validate(model)})

    def map_job(self, job: JobSpec) -> JobSpec:
        """Return the job with absolute paths of this machine: what the run folder keeps."""
        changes: dict[str, object] = {}
        if job.workdir is not None:
            changes["workdir"] = str(self.base / job.workdir)
        if job.code_folder is not None:
            changes["code"] = folder = str(self.base / job.code_folder)
            if isinstance(job.code, Code):
                changes["code"] = job.code.model_copy(update={"folder": folder})
        if job.train is not None:
            changes["train"] = self.map_train(job.train)
        return job.model_copy(update=changes)

    def find_workdir(self, job: JobSpec) -> Path | None:
        """Return the folder that the job's program starts in; None: that of the launcher."""
        if job.workdir:
            return Path(self.resolve_path(job.workdir))
        return self.base / job.code_folder if job.code_folder else None

    @property
    def _folders(self) -> Mapping[PurePosixPath, Path]:
        code = {} if self.code is None else {PurePosixPath(CODE_FOLDER): self.code}
        return {**code, **self.mounts}

    def _find_mount(self, path: str) -> PurePosixPath | None:
        """Return the innermost mount that contains a path in the pod, or None."""
        pod = _normalize_path(path)
        mounts = [mount for mount in self._folders if pod == mount or mount in pod.parents]
        return max(mounts, key=lambda mount: len(mount.parts), default=None)


def _normalize_path(path: str) -> PurePosixPath:
    """Return the path without `..`, so that no mount contains /data/../etc."""
    return PurePosixPath(posixpath.normpath(path))


def map_paths(job: JobSpec, base: Path, folder: Path, volumes: Mapping[str, Path]) -> Paths:
    """Return the paths of `job`: a volume is one of `volumes`, or below `folder`/volumes.

    `volumes` names a volume by its name or by the path that it is mounted at. One volume at several
    mounts is one folder. Raises UserError if `volumes` names a volume that the job does not have,
    or an ambiguous one.
    """
    sources = {PurePosixPath(volume.path): _volume_source(volume) for volume in job.volumes}
    sources_by_name: dict[str, list[Source]] = {}
    for source in dict.fromkeys(sources.values()):
        sources_by_name.setdefault(source[0], []).append(source)
    folders = {
        source: folder / "volumes" / (name if at == 0 else f"{name}-{at + 1}")
        for name, alike in sources_by_name.items()
        for at, source in enumerate(alike)
    }
    for name, volume_folder in volumes.items():
        folders[_find_source(name, sources, sources_by_name)] = volume_folder
    code = base / job.code_folder if job.code_folder else None
    return Paths(base, {mount: folders[source] for mount, source in sources.items()}, code)


def _volume_source(volume: Volume) -> Source:
    """Return the identity of a volume's data, independent of the mount: name, kind and keys."""
    excluded = set() if isinstance(volume, Ephemeral) else {"path", "read_only"}
    settings = volume.model_dump(mode="json", exclude=excluded)
    return volume.name, type(volume).__name__, str(settings)


def _find_source(
    name: str,
    sources: Mapping[PurePosixPath, Source],
    sources_by_name: Mapping[str, Sequence[Source]],
) -> Source:
    """Return the volume that `--volume NAME=DIR` means."""
    if name.startswith("/") and PurePosixPath(name) in sources:
        return sources[PurePosixPath(name)]
    namesakes = sources_by_name.get(name, ())
    if len(namesakes) == 1:
        return namesakes[0]
    if namesakes:
        mounts = [str(mount) for mount, source in sources.items() if source in namesakes]
        raise UserError(
            f"--volume {name}: the job has {len(namesakes)} of that name.",
            f"name one by its path: {join_choices(mounts)}.",
        )
    message, hint = f"--volume {name}: the job has no volume of that name.", "it has no volumes."
    if sources_by_name:
        hint = f"its volumes: {', '.join(sources_by_name)}."
    if near := find_nearest(name, sources_by_name):
        message += f" Did you mean {near[0]}?"
    raise UserError(message, hint)


# --- checks ---------------------------------------------------------------------------------------


def check_utf8_names(folder: Path, base: Path, volumes: Mapping[str, Path]) -> None:
    """Raise UserError for a folder that is not UTF-8, which records could not contain."""
    folders = {"The run folder": folder, "The job file's folder": base}
    folders |= {f"--volume {name}": path for name, path in volumes.items()}
    for subject, path in folders.items():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            shown_path = os.fsencode(path).decode(errors="backslashreplace")
            raise UserError(
                f"{subject}, {shown_path}, has a name that is not UTF-8.",
                "rename it, or name another.",
            ) from None


def check_folders(folder: Path, volumes: Mapping[str, Path]) -> None:
    """Create the run folder and write into it once. Raises UserError if a folder is unusable."""
    for name, volume in volumes.items():
        hint = "name a folder that exists or can be made."
        with explain_os_error(f"--volume {name}={volume}", hint):
            _check_folder(volume)
    probe = folder / f".probe-{os.getpid()}"
    with explain_os_error(f"The run folder {folder}", "name another folder with --run-dir."):
        _check_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with probe.open("xb") as file:
                file.write(b"\0" * PROBE_BYTES)
        finally:
            probe.unlink(missing_ok=True)


def check_program(job: JobSpec, paths: Paths) -> None:
    """Raise UserError if the folder of the job's code, or its working folder, does not exist."""
    code = paths.base / job.code_folder if job.code_folder else None
    workdir_hint = "here it is relative to the job file, or below a volume."
    for key, folder, hint in (
        ("code", code, "it is relative to the job file."),
        ("workdir", paths.find_workdir(job), workdir_hint),
    ):
        # Folders of volumes are created later.
        if folder is not None and not folder.is_dir() and folder not in paths.mounts.values():
            problem = "is not a folder" if folder.exists() else "does not exist"
            raise UserError(f"{key}: {folder} {problem}.", hint)


@contextlib.contextmanager
def explain_os_error(subject: str, hint: str) -> Iterator[None]:
    """Raise UserError, about `subject`, for an OSError."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        reason = reason[:1].lower() + reason[1:]
        raise UserError(f"{subject} cannot be used: {reason}.", hint) from None


def _check_folder(folder: Path) -> None:
    """Raise NotADirectoryError if something prevents `mkdir -p` of the folder."""
    existing = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not existing.is_dir():
        obstacle = "a file, not a folder" if existing.exists() else "a link to nothing"
        subject = "it" if existing == folder else str(existing)
        raise NotADirectoryError(0, f"{subject} is {obstacle}")

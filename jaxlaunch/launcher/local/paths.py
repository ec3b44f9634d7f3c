"""Paths of a job on this machine: volumes become folders, relative paths start at the job file.

Folders that cannot be used are reported before the run starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import posixpath
import sys
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
from jaxlaunch.trainer.spec import CustomModel, TrainSpec

# A full disk or quota accepts an empty file, but not this many bytes.
PROBE_BYTES = 4096

# The folder of the volumes in a run folder.
VOLUMES = "volumes"

# The identity of a volume's data: name, kind and keys.
VolumeIdentity = tuple[str, str, str]


@dataclasses.dataclass(frozen=True)
class Paths:
    """Maps the paths in a job to paths on this machine."""

    # The folder of the job file.
    base: Path
    # Path in the pod -> folder on this machine.
    mounts: Mapping[PurePosixPath, Path]
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
        """Map the path below a volume in an argument of a command, PATH or --flag=PATH."""
        flag, equals, value = text.partition("=")
        if equals and flag.startswith("-") and self._find_mount(value) is not None:
            return f"{flag}={self.resolve_path(value)}"
        return str(self.map_value(text))

    def map_value(self, value: Any) -> Any:
        """Map all strings of a value that are paths below a volume."""
        if isinstance(value, Mapping):
            return {key: self.map_value(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self.map_value(item) for item in value]
        is_path = isinstance(value, str) and self._find_mount(value) is not None
        return self.resolve_path(value) if is_path else value

    def map_env(self, env: Mapping[str, str]) -> dict[str, str]:
        """Map the paths in environment variables, and each entry of a search path."""

        def map_entries(name: str, value: str) -> str:
            entries = value.split(os.pathsep) if name.endswith("PATH") else [value]
            return os.pathsep.join(str(self.map_value(entry)) for entry in entries)

        return {name: map_entries(name, value) for name, value in env.items()}

    def map_train(self, spec: TrainSpec) -> TrainSpec:
        """Map the paths of a train block. Omitted paths stay omitted."""
        spec = spec.map_paths(self.resolve_path, self.map_value)
        if not isinstance(spec.model, CustomModel):
            return spec
        model = self.map_value(spec.model.model_dump(exclude_unset=True))
        return spec.model_copy(update={"model": CustomModel.model_validate(model)})

    def map_job(self, job: JobSpec) -> JobSpec:
        """Return the job with absolute paths of this machine, as the run folder stores it."""
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
        """Return the working folder of the job's program, or None for that of the launcher."""
        if job.workdir:
            return Path(self.resolve_path(job.workdir))
        return self.base / job.code_folder if job.code_folder else None

    @property
    def _folders(self) -> Mapping[PurePosixPath, Path]:
        code = {} if self.code is None else {PurePosixPath(CODE_FOLDER): self.code}
        return {**code, **self.mounts}

    def _find_mount(self, path: str) -> PurePosixPath | None:
        """Return the innermost mount that contains a path in the pod, or None."""
        pod_path = _normalize_path(path)
        mounts = [mount for mount in self._folders if pod_path.is_relative_to(mount)]
        return max(mounts, key=lambda mount: len(mount.parts), default=None)


def _normalize_path(path: str) -> PurePosixPath:
    """Return the path without `..`, so that no mount contains /data/../etc."""
    return PurePosixPath(posixpath.normpath(path))


def map_paths(job: JobSpec, base: Path, folder: Path, volumes: Mapping[str, Path]) -> Paths:
    """Return the paths of a job on this machine.

    A volume that is mounted at several paths is one folder.

    Args:
        job: The job.
        base: The folder of the job file.
        folder: The run folder. By default a volume is a folder in its subfolder `volumes`.
        volumes: Other folders for volumes, by the name of the volume or by its path in the pod.

    Raises:
        UserError: `volumes` has a name that no volume of the job has, or several have.
    """
    identities = {PurePosixPath(volume.path): _volume_identity(volume) for volume in job.volumes}
    identities_by_name: dict[str, list[VolumeIdentity]] = {}
    for identity in dict.fromkeys(identities.values()):
        identities_by_name.setdefault(identity[0], []).append(identity)
    folders = {
        identity: folder / VOLUMES / (name if index == 0 else f"{name}-{index + 1}")
        for name, namesakes in identities_by_name.items()
        for index, identity in enumerate(namesakes)
    }
    for name, volume_folder in volumes.items():
        folders[_find_volume(name, identities, identities_by_name)] = volume_folder
    code = base / job.code_folder if job.code_folder else None
    return Paths(base, {mount: folders[identity] for mount, identity in identities.items()}, code)


def _volume_identity(volume: Volume) -> VolumeIdentity:
    """Return the identity of a volume's data, which does not depend on its path in the pod."""
    excluded = set() if isinstance(volume, Ephemeral) else {"path", "read_only"}
    settings = volume.model_dump(mode="json", exclude=excluded)
    return volume.name, type(volume).__name__, str(settings)


def _find_volume(
    name: str,
    identities: Mapping[PurePosixPath, VolumeIdentity],
    identities_by_name: Mapping[str, Sequence[VolumeIdentity]],
) -> VolumeIdentity:
    """Return the volume with the name or path of `--volume NAME=DIR`. Raises UserError."""
    if name.startswith("/") and PurePosixPath(name) in identities:
        return identities[PurePosixPath(name)]
    namesakes = identities_by_name.get(name, ())
    if len(namesakes) == 1:
        return namesakes[0]
    if namesakes:
        mounts = [str(mount) for mount, identity in identities.items() if identity in namesakes]
        raise UserError(
            f"--volume {name}: the job has {len(namesakes)} of that name.",
            f"name one by its path: {join_choices(mounts)}.",
        )
    message, hint = f"--volume {name}: the job has no volume of that name.", "it has no volumes."
    if identities_by_name:
        hint = f"its volumes: {', '.join(identities_by_name)}."
    if suggestions := find_nearest(name, identities_by_name):
        message += f" Did you mean {suggestions[0]}?"
    raise UserError(message, hint)


# --- checks ---------------------------------------------------------------------------------------


def check_utf8_names(folder: Path, base: Path, volumes: Mapping[str, Path]) -> None:
    """Raise UserError for a name that is not UTF-8, which no record could contain."""
    folders = {"The run folder": folder, "The job file's folder": base}
    folders |= {f"--volume {name}": path for name, path in volumes.items()}
    for subject, path in folders.items():
        try:
            str(path).encode()
        except UnicodeEncodeError:
            name = os.fsencode(path)
            shown_path = name.decode(errors="backslashreplace")
            message = f"{subject}, {shown_path}, has a name that is not UTF-8."
            hint = "rename it, or name another."
            with contextlib.suppress(UnicodeDecodeError):
                name.decode()
                # The name is UTF-8, and this Python does not read names as such.
                encoding = sys.getfilesystemencoding()
                message = f"Python reads file names as {encoding}, and {subject[0].lower()}"
                message += f"{subject[1:]}, {shown_path}, has other characters in its name."
                hint = "set LC_ALL=C.UTF-8, or unset PYTHONUTF8 if it is 0."
            raise UserError(message, hint) from None


def check_folders(folder: Path, volumes: Mapping[str, Path]) -> None:
    """Create the run folder and try to write into it. Raises UserError for an unusable folder."""
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
    """Turn an OSError into a UserError about `subject`."""
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

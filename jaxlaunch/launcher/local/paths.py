"""The paths of a job on this machine: volumes become folders, relative paths start at the job file. Pure."""

from __future__ import annotations

import dataclasses
import posixpath
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.job.load import JobSpec
from jaxlaunch.launcher.job.schema import Code
from jaxlaunch.launcher.job.types import Ephemeral, Volume
from jaxlaunch.launcher.wording import either
from jaxlaunch.spelling import nearest
from jaxlaunch.trainer.spec import AUTO, CustomModel, Mixture, Published, Text, Torch, TrainSpec

Source = tuple[str, str, str]  # of a volume's data: name, kind and keys


@dataclasses.dataclass(frozen=True)
class Paths:
    """Maps the paths in a job to paths on this machine."""

    base: Path  # the job file's folder
    mounts: Mapping[PurePosixPath, Path]  # path in the pod -> folder on this machine

    def resolve(self, path: str) -> str:
        """`path` on this machine: below a volume's folder, or relative to the job file; a URL is unchanged."""
        if "://" in path:
            return path
        mount = self._mount(path)
        return str(self.base / path) if mount is None else str(self.mounts[mount] / _plain(path).relative_to(mount))

    def argument(self, text: str) -> str:
        """A command's argument: rewritten only where it names a path below a volume, bare or as `--flag=path`."""
        flag, equals, value = text.partition("=")
        if equals and flag.startswith("-") and self._mount(value) is not None:
            return f"{flag}={self.resolve(value)}"
        return str(self.given(text))

    def given(self, value: Any) -> Any:
        """A value for the user's code, and all in it: texts are rewritten where they are a path below a volume."""
        if isinstance(value, Mapping):
            return {key: self.given(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.given(each) for each in value]
        return self.resolve(value) if isinstance(value, str) and self._mount(value) is not None else value

    def train(self, spec: TrainSpec) -> TrainSpec:
        """The train block with every path as on this machine; an omitted one stays so, since the task may set it."""
        data = self._files(spec.data)
        if isinstance(spec.data, Text | Mixture) and spec.data.tokenizer != "bytes":
            data["tokenizer"] = self.resolve(spec.data.tokenizer)
        if isinstance(spec.data, Mixture):
            data["parts"] = {name: part.model_copy(update=self._files(part)) for name, part in spec.data.parts.items()}
        if isinstance(spec.data, Torch):
            data |= {key: self.given(value) for key in ("args", "eval_args") if (value := getattr(spec.data, key))}
        changes: dict[str, object] = {"data": spec.data.model_copy(update=data)} if data else {}
        if spec.checkpoint.path is not None:
            changes["checkpoint"] = spec.checkpoint.model_copy(update={"path": self.resolve(spec.checkpoint.path)})
        if isinstance(spec.model, Published) and spec.model.init_from is not None:
            changes["model"] = spec.model.model_copy(update={"init_from": self.resolve(spec.model.init_from)})
        if spec.lora is not None and spec.lora.init_from is not None:
            changes["lora"] = spec.lora.model_copy(update={"init_from": self.resolve(spec.lora.init_from)})
        if isinstance(spec.model, CustomModel):
            changes["model"] = CustomModel.model_validate(self.given(spec.model.model_dump(exclude_unset=True)))
        if spec.compile_cache not in (None, AUTO):
            changes["compile_cache"] = self.resolve(spec.compile_cache)
        return spec.model_copy(update=changes)

    def _files(self, block: object) -> dict[str, object]:
        """The files and folders of a data block, or of a part of one, as on this machine."""
        return {
            key: [self.resolve(path) for path in value] if isinstance(value, list) else self.resolve(value)
            for key in ("path", "eval_path", "data_dir")
            if (value := getattr(block, key, None)) is not None
        }

    def anywhere(self, job: JobSpec) -> JobSpec:
        """The job with paths as on this machine, whatever folder its file is in: what the run folder keeps."""
        changes: dict[str, object] = {}
        if job.workdir is not None:
            changes["workdir"] = str(self.base / job.workdir)
        if job.code_folder is not None:
            folder = str(self.base / job.code_folder)
            changes["code"] = job.code.model_copy(update={"folder": folder}) if isinstance(job.code, Code) else folder
        if job.train is not None:
            changes["train"] = self.train(job.train)
        return job.model_copy(update=changes)

    def workdir(self, job: JobSpec) -> Path | None:
        """The folder that the job's program starts in; None: that of the launcher."""
        if job.workdir:
            return Path(self.resolve(job.workdir))
        return self.base / job.code_folder if job.code_folder else None

    def _mount(self, path: str) -> PurePosixPath | None:
        """The mount that a path in the pod is below, of nested ones the innermost; None where it is below none."""
        pod = _plain(path)
        found = [mount for mount in self.mounts if pod == mount or mount in pod.parents]
        return max(found, key=lambda mount: len(mount.parts), default=None)


def _plain(path: str) -> PurePosixPath:
    """The path without its `..`: no mount contains /data/../etc."""
    return PurePosixPath(posixpath.normpath(path))


def of(job: JobSpec, base: Path, folder: Path, given: Mapping[str, Path]) -> Paths:
    """The paths of `job` on this machine: each volume is `given`, else a folder below `folder`/volumes.

    `given` names a volume by its name or by the path that it is mounted at. One volume at several mounts is one folder.
    Raises UserError when `given` names a volume that the job does not have, or several.
    """
    sources = {PurePosixPath(volume.path): _source(volume) for volume in job.volumes}
    named: dict[str, list[Source]] = {}
    for source in dict.fromkeys(sources.values()):
        named.setdefault(source[0], []).append(source)
    places = {
        source: folder / "volumes" / (name if at == 0 else f"{name}-{at + 1}")
        for name, alike in named.items()
        for at, source in enumerate(alike)
    }
    for name, here in given.items():
        places[_volume(name, sources, named)] = here
    return Paths(base, {mount: places[source] for mount, source in sources.items()})


def _source(volume: Volume) -> Source:
    """What a volume's data are, wherever they are mounted: the name, and what tells it from others of that name."""
    own = volume.model_dump(mode="json", exclude=set() if isinstance(volume, Ephemeral) else {"path", "read_only"})
    return volume.name, type(volume).__name__, str(own)


def _volume(name: str, sources: Mapping[PurePosixPath, Source], named: Mapping[str, Sequence[Source]]) -> Source:
    """The volume that `--volume NAME=DIR` means."""
    if name.startswith("/") and PurePosixPath(name) in sources:
        return sources[PurePosixPath(name)]
    alike = named.get(name, ())
    if len(alike) == 1:
        return alike[0]
    mounts = [str(mount) for mount, source in sources.items() if source in alike]
    if alike:
        raise UserError(
            f"--volume {name}: the job has {len(alike)} of that name.", f"name one by its path: {either(mounts)}."
        )
    known = f"its volumes: {', '.join(named)}." if named else "it has no volumes."
    meant = f" Did you mean {near[0]}?" if (near := nearest(name, named)) else ""
    raise UserError(f"--volume {name}: the job has no volume of that name.{meant}", hint=known)

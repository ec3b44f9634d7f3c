"""Where the paths of a job lie on this machine: volumes become folders, relative paths start at the job file. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from launcher.errors import UserError
from launcher.job import JobSpec
from trainer.spec import Published, TrainSpec


@dataclasses.dataclass(frozen=True)
class Paths:
    """Maps the paths a job names to paths here."""

    base: Path  # the job file's folder
    mounts: Mapping[PurePosixPath, Path]  # path in the pod -> folder here

    def here(self, path: str) -> str:
        """`path` as it is here: below a volume's folder, or relative to the job file; a URL stays what it is."""
        if "://" in path:
            return path
        pod = PurePosixPath(path)
        for mount, folder in self.mounts.items():
            if pod == mount or mount in pod.parents:
                return str(folder / pod.relative_to(mount))
        return str(self.base / path)

    def argument(self, text: str) -> str:
        """A command's argument: rewritten only where it names a path below a volume, bare or as `--flag=path`."""
        flag, equals, value = text.partition("=")
        if equals and flag.startswith("-") and self._mounted(value):
            return f"{flag}={self.here(value)}"
        return self.here(text) if self._mounted(text) else text

    def train(self, spec: TrainSpec) -> TrainSpec:
        """The train block with every path as it is here; what the job leaves unsaid stays so, the task may say it."""
        data = {
            key: [self.here(path) for path in value] if isinstance(value, list) else self.here(value)
            for key in ("path", "eval_path", "data_dir")
            if (value := getattr(spec.data, key, None)) is not None
        }
        changes: dict[str, object] = {"data": spec.data.model_copy(update=data)} if data else {}
        if spec.checkpoint.path is not None:
            changes["checkpoint"] = spec.checkpoint.model_copy(update={"path": self.here(spec.checkpoint.path)})
        if isinstance(spec.model, Published) and spec.model.init_from is not None:
            changes["model"] = spec.model.model_copy(update={"init_from": self.here(spec.model.init_from)})
        if spec.compile_cache is not None:
            changes["compile_cache"] = self.here(spec.compile_cache)
        return spec.model_copy(update=changes)

    def _mounted(self, path: str) -> bool:
        pod = PurePosixPath(path)
        return any(pod == mount or mount in pod.parents for mount in self.mounts)


def of(job: JobSpec, base: Path, folder: Path, given: Mapping[str, Path]) -> Paths:
    """The paths of `job` run here: each volume is `given` by name, else a folder below `folder`/volumes.

    Raises UserError when `given` names a volume that the job does not have.
    """
    names = {volume.name: PurePosixPath(volume.path) for volume in job.volumes}
    for name in given:
        if name not in names:
            raise UserError(
                f"--volume {name}: the job has no volume of that name.",
                hint=f"its volumes are {', '.join(names)}." if names else "it has none.",
            )
    return Paths(base, {path: given.get(name, folder / "volumes" / name) for name, path in names.items()})

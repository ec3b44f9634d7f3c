"""The places of a run that the agent sets in the environment."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from jaxlaunch import contract
from jaxlaunch.trainer.errors import SpecError
from jaxlaunch.trainer.spec import TrainSpec


@dataclasses.dataclass(frozen=True)
class Place:
    """A run's folder, its socket for metrics, and the file by which an agent requests profiles."""

    run_dir: str | None = None
    run_url: str | None = None  # of the bucket that `run_dir` is copied to
    uid: str = "local"
    socket: str | None = None
    profile: str | None = None
    take_over: bool = False
    saved: int = 0  # the newest step that earlier attempts saved

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] = os.environ) -> Place:
        """The place that the environment variables of the contract describe."""
        return cls(
            run_dir=environ.get(contract.RUN_DIR),
            run_url=environ.get(contract.RUN_URL),
            uid=environ.get(contract.UID) or f"local-{os.getpid()}",
            socket=environ.get(contract.METRICS),
            profile=environ.get(contract.PROFILE),
            take_over=environ.get(contract.TAKE_OVER) == "1",
            saved=int(environ.get(contract.SAVED, 0)),
        )

    @property
    def run_folder(self) -> str | None:
        """Path or URL of the run folder, as every host sees it."""
        return self.run_url or self.run_dir

    def checkpoints(self, spec: TrainSpec) -> str:
        """Path or URL of the checkpoint folder. Raises SpecError when the spec has none and there is no run folder."""
        if spec.checkpoint.path is not None:
            return spec.checkpoint.path
        if self.run_dir is None:
            raise SpecError("train.checkpoint.path is not given and there is no run folder to keep checkpoints in")
        return os.path.join(self.run_dir, "checkpoints")

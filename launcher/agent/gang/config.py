"""What an agent is told at its start: the environment, read once and checked."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from trainer import contract
from trainer.contract import AgentJob

PROTOCOL = "1"  # the version of what agents say to each other


class ConfigError(Exception):
    """The environment does not describe an agent; ends it with BAD_SPEC."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One agent's place in its gang, and the job."""

    leader: tuple[str, int]
    hosts: int  # of all slices
    host: int  # this one, of all slices
    uid: str
    generation: int
    pod: str
    job: AgentJob
    spec: str  # sha256 over the job and the train block
    run_dir: Path | None = None
    code: tuple[str, str] | None = None  # an archive, and the folder that it is unpacked to
    node: str = ""  # where the pod runs; empty outside of Kubernetes
    fault: str | None = None  # what this host alone can see to be wrong; the leader refuses the gang for it

    @property
    def is_leader(self) -> bool:
        return self.host == 0

    @property
    def is_pod(self) -> bool:
        """Whether the Kubernetes API is where this agent is read."""
        return bool(self.node)

    @property
    def processes(self) -> int:
        return self.hosts * self.job.processes_per_host

    @property
    def is_local(self) -> bool:
        """Whether the whole gang runs on this machine."""
        return self.leader[0] in ("127.0.0.1", "::1", "localhost")

    def ranks(self, host: int | None = None) -> range:
        """The ranks of a host, this one by default."""
        first = (self.host if host is None else host) * self.job.processes_per_host
        return range(first, first + self.job.processes_per_host)


def read(environ: Mapping[str, str] = os.environ) -> Config:
    """The agent's configuration. Raises ConfigError, which names the variable and its value."""
    hosts, slices = _number(environ, contract.HOSTS, 1), _number(environ, contract.SLICES, 1)
    index, slice_index = _number(environ, contract.INDEX, 0), _number(environ, contract.SLICE, 0)
    if not 0 <= index < hosts:
        raise ConfigError(f"{contract.INDEX} = {index} is not below {contract.HOSTS} = {hosts}")
    if not 0 <= slice_index < slices:
        raise ConfigError(f"{contract.SLICE} = {slice_index} is not below {contract.SLICES} = {slices}")
    job = _job(environ)
    run_dir = environ.get(contract.RUN_DIR)
    return Config(
        leader=_address(environ),
        hosts=hosts * slices,
        host=slice_index * hosts + index,
        uid=environ.get(contract.UID, ""),
        generation=_number(environ, contract.GENERATION, 0),
        pod=environ.get(contract.POD_UID) or f"{socket.gethostname()}:{os.getpid()}",
        job=job,
        spec=hashlib.sha256((environ[contract.JOB] + environ.get(contract.TRAIN_SPEC, "")).encode()).hexdigest(),
        run_dir=Path(run_dir) if run_dir and "://" not in run_dir else None,
        code=(environ[contract.CODE], environ[contract.CODE_ROOT]) if environ.get(contract.CODE) else None,
        node=environ.get(contract.NODE, ""),
        fault=_disagreement(environ, job, index, slice_index),
    )


def versions() -> dict[str, str | None]:
    """What must be equal on every host. JAX's version is read from its metadata: the agent never imports it."""
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        jax = None  # the program may bring an interpreter of its own
    return {"python": platform.python_version(), "jax": jax, "agent": PROTOCOL}


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    if not text.isdecimal():
        raise ConfigError(f"{name} = {text!r} is not a number")
    return int(text)


def _address(environ: Mapping[str, str]) -> tuple[str, int]:
    text = environ.get(contract.LEADER, "")
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"{contract.LEADER} = {text!r} is not host:port; `launcher run` and the JobSet set it")
    return host.strip("[]"), int(port)


def _job(environ: Mapping[str, str]) -> AgentJob:
    text = environ.get(contract.JOB, "")
    try:
        return AgentJob.from_json(text)
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{contract.JOB} = {text[:200]!r} is not a job: {error}") from None


def _disagreement(environ: Mapping[str, str], job: AgentJob, index: int, slice_index: int) -> str | None:
    """On TPU, Google's variables rule JAX's ranks: where they differ from ours, ranks would be swapped in silence."""
    if job.platform != "tpu":
        return None
    for name, ours, value in (
        ("TPU_WORKER_ID", contract.INDEX, index),
        ("MEGASCALE_SLICE_ID", contract.SLICE, slice_index),
    ):
        theirs = environ.get(name)
        if theirs is not None and theirs != str(value):
            return f"{name} = {theirs} but {ours} = {value}"
    return None

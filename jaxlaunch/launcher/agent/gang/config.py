"""The agent's configuration: its environment variables, read once and checked.

What an attempt is made of beside its job: the versions of Python, JAX and ours, and a digest of the job's code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from jaxlaunch import contract, regular_files
from jaxlaunch.contract import AgentJob
from jaxlaunch.records import checked
from jaxlaunch.records.members import Members

PROTOCOL = "5"  # the version of the messages between agents
MUTUAL_TLS = (0, 11, 2)  # the first JAX whose coordinator has it (its wheels, September 2026)
MIN_SECRET = 16  # bytes of a gang's secret


class ConfigError(Exception):
    """An environment variable of the contract is missing or wrong; the agent ends with BAD_SPEC."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The place of this host in its gang, and the job."""

    leader: tuple[str, int]
    hosts: int  # of all slices, spares included
    host: int  # this one, of all slices
    uid: str
    generation: int
    pod: str
    job: AgentJob
    spec: str  # sha256 over the job and the train block
    key: bytes = dataclasses.field(repr=False)  # of the gang's handshake
    certificates: Path | None = None  # the folder of those that the gang's connections are encrypted by
    pod_ip: str = ""  # empty outside of Kubernetes
    run_dir: Path | None = None  # a bucket's copy included; None: there is none, or no copy could be made
    keeps_run: bool = False  # the job has a run folder, whether or not this host has it or a copy
    code: tuple[str, str] | None = None  # an archive, and the folder that it is unpacked to
    node: str = ""  # where the pod runs; empty outside of Kubernetes
    is_launched: bool = False  # by `launcher run`, which says itself how it ended
    patience: float = 0.0  # seconds that programs wait for a reader of their output who takes nothing of it
    started: float | None = None  # when the run did, in Unix time; None: with this agent
    fault: str | None = None  # an error that only this host can see; the leader ends the gang for it

    @property
    def is_leader(self) -> bool:
        """Whether this is host 0, whose agent leads the gang."""
        return self.host == 0

    @property
    def is_pod(self) -> bool:
        """Whether this agent runs in a pod, where its log and its termination message are read."""
        return bool(self.node)

    @property
    def address(self) -> str:
        """The address that the leader listens on; empty: every interface."""
        return self.leader[0] if self.is_local else self.pod_ip

    @property
    def sizes(self) -> Sequence[int]:
        """How many hosts may hold ranks, ascending."""
        return self.job.sizes or (self.hosts,)

    @property
    def members(self) -> Members:
        """The table of a gang that has lost no host."""
        return Members(range(self.sizes[-1]), self.job.processes_per_host)

    @property
    def processes(self) -> int:
        """The processes of a gang that has lost no host."""
        return self.members.processes

    @property
    def is_local(self) -> bool:
        """Whether the whole gang runs on this machine."""
        return self.leader[0] in ("127.0.0.1", "::1", "localhost")

    def ranks(self, host: int | None = None) -> range:
        """The ranks of a host, this one by default, in a gang that has lost none."""
        return self.members.ranks(self.host if host is None else host)


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
        uid=_uid(environ),
        generation=_number(environ, contract.GENERATION, 0),
        pod=environ.get(contract.POD_UID) or f"{socket.gethostname()}:{os.getpid()}",
        job=job,
        spec=_digest(environ[contract.JOB] + environ.get(contract.TRAIN_SPEC, "")),
        key=_key(environ),
        certificates=_certificates(environ),
        pod_ip=environ.get(contract.POD_IP, ""),
        run_dir=Path(run_dir) if run_dir and "://" not in run_dir else None,
        keeps_run=bool(run_dir or environ.get(contract.RUN_URL)),
        code=(environ[contract.CODE], environ[contract.CODE_ROOT]) if environ.get(contract.CODE) else None,
        node=environ.get(contract.NODE, ""),
        is_launched=bool(environ.get(contract.PARENT)),
        patience=float(environ.get(contract.PATIENCE, 0.0)),
        started=float(environ[contract.STARTED]) if environ.get(contract.STARTED) else None,
        fault=_disagreement(environ, job, index, slice_index),
    )


def versions() -> dict[str, str | None]:
    """Versions that must be equal on every host. JAX's is read from its metadata: the agent never imports it."""
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        jax = None  # the program may run another interpreter
    return {"python": platform.python_version(), "jax": jax, "agent": PROTOCOL}


def open_coordinator(place: Config) -> str | None:
    """What a gang with certificates is told whose JAX has no use for them at its coordinator; None: it has."""
    found = versions()["jax"]
    if place.certificates is None or place.processes == 1 or found is None:
        return None
    release = tuple(int(part) for part in found.split(".")[:3] if part.isdecimal())
    if release >= MUTUAL_TLS:
        return None
    return (
        f"jax {found} does not ask who connects to its coordinator, as {'.'.join(map(str, MUTUAL_TLS))} and later do "
        "by the gang's certificates: until then the job's NetworkPolicy alone keeps others from it"
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()


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


def _uid(environ: Mapping[str, str]) -> str:
    uid = environ.get(contract.UID, "")
    if not uid:  # agents of one gang know each other by it
        raise ConfigError(f"{contract.UID} is not set; `launcher run` sets it, and a JobSet of version 0.10 or later")
    return uid


def _key(environ: Mapping[str, str]) -> bytes:
    """The gang's key: the run's uid, after its secret where it has one, which may outlive a JobSet of that name."""
    path = environ.get(contract.GANG_SECRET, "")
    if not path:
        return _uid(environ).encode()
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{contract.GANG_SECRET} = {path!r} cannot be read: {error.strerror}") from None
    if len(secret) < MIN_SECRET:
        raise ConfigError(f"{contract.GANG_SECRET} = {path!r} holds {len(secret)} bytes, not at least {MIN_SECRET}")
    return secret + _uid(environ).encode()


def _certificates(environ: Mapping[str, str]) -> Path | None:
    """The folder of the gang's Secret, where it has certificates: one that was made by hand may have the key alone."""
    path = environ.get(contract.GANG_SECRET, "")
    folder = Path(path).parent
    return folder if path and (folder / contract.CERTIFICATE).exists() else None


def _job(environ: Mapping[str, str]) -> AgentJob:
    text = environ.get(contract.JOB, "")
    try:
        return checked.read(AgentJob, checked.decode_record(text))
    except ValueError as error:
        raise ConfigError(f"{contract.JOB} = {text[:200]!r} is not a valid job: {error}") from None


def _disagreement(environ: Mapping[str, str], job: AgentJob, index: int, slice_index: int) -> str | None:
    """On TPU, JAX takes its ranks from Google's variables; where those differ from ours, ranks would be swapped."""
    if job.platform != "tpu":
        return None
    for name, ours, value in (
        ("TPU_WORKER_ID", contract.INDEX, index),
        ("MEGASCALE_SLICE_ID", contract.SLICE, slice_index),
    ):
        theirs = environ.get(name)
        if theirs is not None and theirs != str(value):
            return f"{name} = {theirs} but {ours} = {value}; JAX would number the hosts differently"
    return None


DIGITS = 12  # hexadecimal, of the digest
_MOST_FILES, _MOST_BYTES = 2000, 16 << 20  # of a folder with more, nothing is said
_LEFT_OUT = {"__pycache__", "runs", "node_modules", "venv"}  # and whatever begins with a dot


def describe_versions(versions: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """What is known when the first attempt of a generation starts; JAX's version is that of the agent's interpreter."""
    found = {name: version for name in ("python", "jax") if (version := versions.get(name)) is not None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an image without our package
        found["jaxlaunch"] = importlib.metadata.version("jaxlaunch")
    return found | code_digest(environ)


def code_digest(environ: Mapping[str, str]) -> dict[str, str]:
    """The digest of the Python files in the job's code folder, by name and content; none where it cannot be had."""
    root = environ.get(contract.CODE_ROOT)
    if not root:
        return {}
    digest, left = hashlib.sha256(), _MOST_BYTES
    try:
        for count, path in enumerate(sorted(_files(root))):
            content = regular_files.read(path, left + 1)
            left -= len(content)
            if left < 0 or count >= _MOST_FILES:
                return {}
            digest.update(f"{os.path.relpath(path, root)} {len(content)}\n".encode("utf-8", "surrogateescape"))
            digest.update(content)
    except OSError:
        return {}
    return {"code": digest.hexdigest()[:DIGITS]}


def _files(root: str) -> Iterator[str]:
    seen = 0
    for parent, folders, names in os.walk(root):
        folders[:] = [each for each in folders if each not in _LEFT_OUT and not each.startswith(".")]
        seen += len(names)
        if seen > 10 * _MOST_FILES:
            raise OSError("too many files")
        yield from (os.path.join(parent, name) for name in names if name.endswith(".py"))

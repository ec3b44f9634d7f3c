"""Configuration of the agent, from environment variables."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import math
import os
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from jaxlaunch import contract, regular_files
from jaxlaunch.contract import AgentJob
from jaxlaunch.records import codec
from jaxlaunch.records.members import Members

# Version of the messages between agents.
PROTOCOL_VERSION = "5"
# First JAX whose coordinator supports mutual TLS (its wheels, September 2026).
MUTUAL_TLS_JAX = (0, 11, 2)
MIN_SECRET_BYTES = 16
# Numbers in variables have at most this many digits.
MAX_DIGITS = 18
MAX_PORT = 65535
_SETTER_HINT = "`launcher run` and the JobSet set it"

R = TypeVar("R")


class ConfigError(Exception):
    """An environment variable of the contract is missing or wrong; the agent ends with BAD_SPEC."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The job, and the place of this host in its gang.

    Attributes:
        leader_address: Host name and port of host 0.
        hosts: Number of hosts of all slices, spares included.
        host: Index of this host among the hosts of all slices.
        uid: Identity of the run.
        generation: Number of the set of pods.
        pod: Identity of this pod; outside of Kubernetes, the host name and the process id.
        job: The job as the agent received it.
        spec_digest: SHA-256 of the job and the train block.
        handshake_key: Key that all agents of the run share.
        certificates: Folder of the certificates for the connections of the gang. None without TLS.
        pod_ip: Address of the pod. Empty outside of Kubernetes.
        run_dir: Run folder, or the local copy of a bucket. None without one, or if no copy could
            be made.
        has_run_folder: Whether the job has a run folder, even if this host has neither it nor a
            copy.
        code: An archive, and the folder to unpack it to.
        node: Node of the pod. Empty outside of Kubernetes.
        is_launched: Whether `launcher run` started this agent and reports the end itself.
        output_patience_s: Seconds for which programs wait for a stalled reader of their output,
            before lines are dropped.
        run_started_at: Unix time at which the run started. None if it started with this agent.
        fault: An error that only this host can see, for which the leader ends the gang.
    """

    leader_address: tuple[str, int]
    hosts: int
    host: int
    uid: str
    generation: int
    pod: str
    job: AgentJob
    spec_digest: str
    handshake_key: bytes = dataclasses.field(repr=False)
    certificates: Path | None = None
    pod_ip: str = ""
    run_dir: Path | None = None
    has_run_folder: bool = False
    code: tuple[str, str] | None = None
    node: str = ""
    is_launched: bool = False
    output_patience_s: float = 0.0
    run_started_at: float | None = None
    fault: str | None = None

    @property
    def is_leader(self) -> bool:
        """Return whether this is host 0, whose agent leads the gang."""
        return self.host == 0

    @property
    def is_pod(self) -> bool:
        """Return whether this agent runs in a pod."""
        return bool(self.node)

    @property
    def listen_address(self) -> str:
        """Address that the leader listens on, or empty for every interface."""
        return self.leader_address[0] if self.is_local else self.pod_ip

    @property
    def gang_sizes(self) -> Sequence[int]:
        """Numbers of hosts that may hold ranks, ascending."""
        return self.job.sizes or (self.hosts,)

    @property
    def members(self) -> Members:
        """Assignment of ranks to hosts in a gang that has lost no host."""
        return Members(range(self.gang_sizes[-1]), self.job.processes_per_host)

    @property
    def process_count(self) -> int:
        """Number of processes of a gang that has lost no host."""
        return self.members.process_count

    @property
    def is_local(self) -> bool:
        """Return whether the whole gang runs on this machine."""
        return self.leader_address[0] in ("127.0.0.1", "::1", "localhost")

    def host_ranks(self, host: int | None = None) -> range:
        """Return the ranks of a host, by default this one, in a gang that has lost no host."""
        return self.members.ranks_of(self.host if host is None else host)


def read_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the configuration of the agent.

    Raises:
        ConfigError: A variable is missing or wrong. The message names it and its value.
    """
    hosts = _read_number(environ, contract.HOSTS, 1)
    slices = _read_number(environ, contract.SLICES, 1)
    index = _read_number(environ, contract.INDEX, 0)
    slice_index = _read_number(environ, contract.SLICE, 0)
    if not 0 <= index < hosts:
        raise ConfigError(f"{contract.INDEX} = {index} is not below {contract.HOSTS} = {hosts}")
    if not 0 <= slice_index < slices:
        limit = f"{contract.SLICES} = {slices}"
        raise ConfigError(f"{contract.SLICE} = {slice_index} is not below {limit}")
    job = _read_job(environ)
    spec = environ[contract.JOB] + environ.get(contract.TRAIN_SPEC, "")
    run_dir, code = environ.get(contract.RUN_DIR), None
    if environ.get(contract.CODE):
        code = environ[contract.CODE], _read_code_root(environ)
    read_notify_options(environ)
    read_tracker_name(environ)
    return Config(
        leader_address=_read_leader_address(environ),
        hosts=hosts * slices,
        host=slice_index * hosts + index,
        uid=_read_uid(environ),
        generation=_read_number(environ, contract.GENERATION, 0),
        pod=environ.get(contract.POD_UID) or f"{socket.gethostname()}:{os.getpid()}",
        job=job,
        spec_digest=hashlib.sha256(spec.encode(errors="backslashreplace")).hexdigest(),
        handshake_key=_read_handshake_key(environ),
        certificates=_find_certificates(environ),
        pod_ip=environ.get(contract.POD_IP, ""),
        run_dir=Path(run_dir) if run_dir and "://" not in run_dir else None,
        has_run_folder=bool(run_dir or environ.get(contract.RUN_URL)),
        code=code,
        node=environ.get(contract.NODE, ""),
        is_launched=bool(environ.get(contract.PARENT)),
        output_patience_s=_read_seconds(environ, contract.OUTPUT_PATIENCE) or 0.0,
        run_started_at=_read_seconds(environ, contract.STARTED, codec.MAX_TIME_S),
        fault=_find_tpu_index_conflict(environ, job, index, slice_index),
    )


def read_versions() -> dict[str, str | None]:
    """Return the versions that must be equal on every host.

    The version of JAX is read from its metadata, because the agent never imports it.
    """
    try:
        jax = importlib.metadata.version("jax")
    except importlib.metadata.PackageNotFoundError:
        # The program may run another interpreter.
        jax = None
    return {"python": platform.python_version(), "jax": jax, "agent": PROTOCOL_VERSION}


def coordinator_warning(config: Config) -> str | None:
    """Return a warning if the coordinator of this JAX does not check the gang's certificates."""
    jax_version = read_versions()["jax"]
    if config.certificates is None or config.process_count == 1 or jax_version is None:
        return None
    release = tuple(int(part) for part in jax_version.split(".")[:3] if part.isdecimal())
    if release >= MUTUAL_TLS_JAX:
        return None
    checking = f"as {'.'.join(map(str, MUTUAL_TLS_JAX))} and later do by the gang's certificates"
    return (
        f"jax {jax_version} does not ask who connects to its coordinator, {checking}: until then "
        "the job's NetworkPolicy alone keeps others from it"
    )


def _read_number(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, "")
    if not text:
        return default
    # int() refuses thousands of digits.
    if not text.isdecimal() or len(text) > MAX_DIGITS:
        raise ConfigError(f"{name} = {text[:200]!r} is not a whole number from 0; {_SETTER_HINT}")
    return int(text)


def _read_seconds(environ: Mapping[str, str], name: str, maximum: float = math.inf) -> float | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    # NaN is not in any range.
    if not 0 <= seconds <= maximum:
        limit = "" if maximum == math.inf else f" to {maximum}"
        expected = f"is not a number of seconds from 0{limit}; `launcher run` sets it"
        raise ConfigError(f"{name} = {text[:200]!r} {expected}")
    return seconds


def _read_code_root(environ: Mapping[str, str]) -> str:
    folder = environ.get(contract.CODE_ROOT, "")
    if not folder:
        archive = f"{contract.CODE} = {environ[contract.CODE]!r}"
        raise ConfigError(f"{contract.CODE_ROOT} is not set, the folder for {archive}")
    return folder


@dataclasses.dataclass(frozen=True)
class NotifyOptions:
    """The webhook of a job.

    Attributes:
        url: Name of the variable that holds the address.
        format: Format of the messages, "json" or "slack".
        events: Events that are reported.
        stall_s: Seconds without progress that count as a stall. None for no limit.
    """

    url: str
    format: str = "json"
    events: Sequence[str] = ()
    stall_s: codec.Seconds | None = None


def read_notify_options(environ: Mapping[str, str]) -> NotifyOptions | None:
    """Return the webhook of the job, or None if it has none. Raises ConfigError."""
    return _read_json(environ, contract.NOTIFY, NotifyOptions)


@dataclasses.dataclass(frozen=True)
class _Tracker:
    tracker: str


def read_tracker_name(environ: Mapping[str, str]) -> str | None:
    """Return the tracker of the job, or None if it has none. Raises ConfigError."""
    settings = _read_json(environ, contract.TRACKER, _Tracker)
    return None if settings is None else settings.tracker


def _read_json(environ: Mapping[str, str], name: str, record: type[R]) -> R | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        fields = codec.parse_json(text.encode(errors="backslashreplace"))
        return None if fields is None else codec.read_record(record, fields)
    except ValueError as error:
        fault = f"is not the JSON that the launcher writes: {error}"
        raise ConfigError(f"{name} = {text[:200]!r} {fault}") from None


def _read_leader_address(environ: Mapping[str, str]) -> tuple[str, int]:
    text = environ.get(contract.LEADER, "")
    host, _, port = text.rpartition(":")
    is_port = port.isdecimal() and len(port) <= MAX_DIGITS and int(port) <= MAX_PORT
    if not host or not is_port:
        expected = f"host:port with a port up to {MAX_PORT}"
        raise ConfigError(f"{contract.LEADER} = {text[:200]!r} is not {expected}; {_SETTER_HINT}")
    return host.strip("[]"), int(port)


def _read_uid(environ: Mapping[str, str]) -> str:
    # The agents of one gang recognize each other by this uid.
    uid = environ.get(contract.UID, "")
    if not uid:
        hint = "`launcher run` sets it, and a JobSet of version 0.10 or later"
        raise ConfigError(f"{contract.UID} is not set; {hint}")
    return uid


def _read_handshake_key(environ: Mapping[str, str]) -> bytes:
    """Return the key of the gang: its secret, if it has one, followed by the uid of the run.

    The uid is part of the key because the secret may outlive its JobSet and be used again by a
    JobSet of the same name.
    """
    path = environ.get(contract.GANG_SECRET, "")
    if not path:
        return _read_uid(environ).encode()
    try:
        secret = Path(path).read_bytes()
    except OSError as error:
        fault = f"cannot be read: {error.strerror}"
        raise ConfigError(f"{contract.GANG_SECRET} = {path!r} {fault}") from None
    if len(secret) < MIN_SECRET_BYTES:
        fault = f"holds {len(secret)} bytes, and needs at least {MIN_SECRET_BYTES}"
        raise ConfigError(f"{contract.GANG_SECRET} = {path!r} {fault}")
    return secret + _read_uid(environ).encode()


def _find_certificates(environ: Mapping[str, str]) -> Path | None:
    """Return the folder of the gang's Secret, or None if it has no certificates."""
    path = environ.get(contract.GANG_SECRET, "")
    folder = Path(path).parent
    return folder if path and (folder / contract.CERTIFICATE).exists() else None


def _read_job(environ: Mapping[str, str]) -> AgentJob:
    text = environ.get(contract.JOB, "")
    try:
        return codec.read_record(AgentJob, codec.parse_record(text))
    except ValueError as error:
        raise ConfigError(f"{contract.JOB} = {text[:200]!r} is not a valid job: {error}") from None


def _find_tpu_index_conflict(
    environ: Mapping[str, str], job: AgentJob, index: int, slice_index: int
) -> str | None:
    """Return an error if Google's variables, from which JAX takes TPU ranks, differ from ours."""
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


# Hexadecimal digits of the digest of the code.
DIGEST_DIGITS = 12
# A code folder with more files or bytes gets no digest.
_MAX_FILES, _MAX_BYTES = 2000, 16 << 20
# Folders whose name begins with a dot are excluded, too.
_EXCLUDED_FOLDERS = {"__pycache__", "runs", "node_modules", "venv"}


def describe_versions(
    versions: Mapping[str, str | None], environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the versions and the code digest for the record of an attempt.

    The version of JAX is that of the agent's interpreter.
    """
    record_versions = {
        name: version for name in ("python", "jax") if (version := versions.get(name)) is not None
    }
    # The package may not be installed in the image.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        record_versions["jaxlaunch"] = importlib.metadata.version("jaxlaunch")
    return record_versions | code_digest(environ)


def code_digest(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `{"code": digest}` of the Python files in the job's code folder.

    The digest covers names and contents. The result is empty without a code folder, or if it is too
    large or cannot be read.
    """
    root = environ.get(contract.CODE_ROOT)
    if not root:
        return {}
    digest, remaining_bytes = hashlib.sha256(), _MAX_BYTES
    try:
        for count, path in enumerate(sorted(_python_files(root))):
            content = regular_files.read_bounded(path, remaining_bytes + 1)
            remaining_bytes -= len(content)
            if remaining_bytes < 0 or count >= _MAX_FILES:
                return {}
            header = f"{os.path.relpath(path, root)} {len(content)}\n"
            digest.update(header.encode("utf-8", "surrogateescape") + content)
    except OSError:
        return {}
    return {"code": digest.hexdigest()[:DIGEST_DIGITS]}


def _python_files(root: str) -> Iterator[str]:
    file_count = 0
    for parent, folders, names in os.walk(root):
        # os.walk enters only the folders that stay in this list.
        folders[:] = [
            folder
            for folder in folders
            if not folder.startswith(".") and folder not in _EXCLUDED_FOLDERS
        ]
        file_count += len(names)
        if file_count > 10 * _MAX_FILES:
            raise OSError("too many files")
        yield from (os.path.join(parent, name) for name in names if name.endswith(".py"))

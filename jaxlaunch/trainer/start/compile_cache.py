"""Compiled programs, kept on the host and beside the run's checkpoints: a restart loads them and does not compile.

What is loaded is machine code. Its folder is named after all that it depends on and JAX's key lacks: versions, kind of
device and, for code of the CPU, the processor. An entry appears whole, begins with a digest of itself, and is skipped
where it differs. No fault of the cache ends a run.

In a gang, process 0 says at the start which entries exist, and no process uses another one. On GPUs one process
that loads a program while another compiles it could keep the other waiting: processes share the autotuning.

Private names of JAX that this needs, in 0.10 and 0.11: compilation_cache.get_file_cache, without which JAX keeps files
of its own in the host's folder; for gangs on CPU cache_key._hash_devices.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax._src import cache_key, compilation_cache

from jaxlaunch import contract, user_cache
from jaxlaunch.atomic_file import DRAFT_SUFFIX, draft
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.spec import AUTO
from jaxlaunch.trainer.start import distributed

BESIDE = ".compiled"  # in the run folder
LIMIT = 2 << 30  # bytes of a folder's entries, of all versions and devices together
MOST = 1000  # entries
DIGEST = hashlib.sha256().digest_size

_config: Any = jax.config
_key: Any = cache_key
_jax: Any = compilation_cache
_later = ThreadPoolExecutor(1, "compile-cache")  # what no step has to wait for


def settle(named: str | None) -> None:
    """Tells JAX the folder or URL that a job names, and XLA where it can keep files of its own.

    XLA opens files, not URLs ("File system scheme 'gs' not implemented"), in its results of autotuning too.
    """
    if named not in (None, AUTO):
        jax.config.update("jax_compilation_cache_dir", named)
    if remote.is_remote(_config.jax_compilation_cache_dir or ""):
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def install(run_folder: str | None, note: Callable[[str], None]) -> None:
    """Has JAX keep programs on this host and, for hosts that come later, in the run folder: a path or a URL.

    A folder that the user has given JAX stays. Collective, after `distributed.initialize`.
    """
    if _config.jax_compilation_cache_dir or not _config.jax_enable_compilation_cache:
        return
    try:
        here = _private(user_cache.home("programs") / _kind())
    except OSError as error:
        here = None
        note(f"train.compile_cache = auto: {error}; each start compiles its programs again")
    beside = None if run_folder is None else epath.Path(run_folder) / BESIDE
    known = _known(here, beside)
    if here is None:
        return
    programs = Programs(here, None if beside is None else beside / here.name, known)
    _later.submit(sweep, here.parent, beside)
    # The path of XLA's own files would be part of every key, and differ between homes.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(here))
    _jax.get_file_cache = lambda path: (programs, path)
    if jax.process_count() > 1 and jax.default_backend() == "cpu" and hasattr(_key, "_hash_devices"):
        # JAX's key of a gang's program on CPU holds the process's own devices: only process 0 would find what it kept.
        _key._hash_accelerator_config = _key._hash_devices


class Programs:
    """What JAX asks of a cache (its CacheInterface): entries by key, in `here` and, for others, in `beside`."""

    def __init__(self, here: Path, beside: epath.Path | None, known: set[str]) -> None:
        """`known` are the names of entries that this process may use."""
        self._path = here  # of JAX's own interface
        self._here, self._beside, self._known = epath.Path(here), beside, known
        self._is_alone = jax.process_count() == 1

    def get(self, key: str) -> bytes | None:
        """The entry, or None."""
        name = _name(key)
        if name not in self._known:
            return None
        value = _read(self._here / name)
        if value is not None:
            with contextlib.suppress(OSError):
                os.utime(self._here / name)  # what was used last is swept last
        elif self._beside is not None and (value := _read(self._beside / name)) is not None:
            _write(self._here / name, value)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Keeps the entry here at once, and beside the checkpoints while the program runs."""
        name = _name(key)
        if self._is_alone:
            self._known.add(name)
        _write(self._here / name, value)
        if self._beside is not None:
            _later.submit(_write, self._beside / name, value)


def _known(here: Path | None, beside: epath.Path | None) -> set[str]:
    """The entries that every process of the gang may use: those of the run and, on one host, those of the host."""

    def find() -> list[str]:
        if here is None:
            return []
        found = [] if beside is None else _names(beside / here.name)
        hosts = int(os.environ.get(contract.HOSTS, "1")) * int(os.environ.get(contract.SLICES, "1"))
        return found + (_names(epath.Path(here)) if hosts == 1 else [])

    return set(distributed.of_primary(find))


def _kind() -> str:
    device = jax.devices()[0]
    versions = [jax.__version__, importlib.metadata.version("jaxlib"), device.client.platform_version]
    parts = [*versions, device.platform, device.device_kind]
    if device.platform == "cpu":
        parts.append(_processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The features of this host's processor, which XLA compiles for; where they are unknown, the host's name."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(?:model name|flags|Features|CPU \w+)\s*:.*", Path("/proc/cpuinfo").read_text(), re.M)
        if lines:
            return "\n".join(sorted(set(lines)))
    return " ".join(os.uname())


def _private(folder: Path) -> Path:
    """The folder, made for this user alone: who can write to it has this user run code. Raises OSError."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for place in (folder.parent, folder):
        about = place.stat()
        if about.st_uid != os.geteuid() or about.st_mode & 0o022:
            raise PermissionError(f"{place} can be written by other users")
    return folder


def _name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _names(folder: epath.Path) -> list[str]:
    try:
        return sorted(found.name for found in folder.iterdir() if not found.name.endswith(DRAFT_SUFFIX))[:MOST]
    except Exception:  # there is none yet; or a store's own error, which its checkpoints will say
        return []


def _read(path: epath.Path) -> bytes | None:
    """The entry; None where there is none, or what is there is not what was written."""
    try:
        raw = path.read_bytes()
    except Exception:  # not there, or a store's own error
        return None
    digest, value = raw[:DIGEST], raw[DIGEST:]
    return value if value and hashlib.sha256(value).digest() == digest else None


def _write(path: epath.Path, value: bytes) -> None:
    """Keeps the entry, whole or not at all; a disk that is full or a store that is away keeps none."""
    raw = hashlib.sha256(value).digest() + value
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        if remote.is_remote(str(path)):
            path.write_bytes(raw)  # an object appears whole
            return
        with draft(Path(path)) as file:
            file.write_bytes(raw)


def sweep(home: Path, beside: epath.Path | None) -> None:
    """Removes what was used least recently from folders that are over their limits."""
    for folder in [epath.Path(home)] + ([beside] if beside is not None and jax.process_index() == 0 else []):
        with contextlib.suppress(Exception):  # another process removes it too; a store is away
            found = [(about.mtime, about.length, file) for file in folder.glob("*/*") for about in [file.stat()]]
            total = 0
            for number, (_, size, file) in enumerate(sorted(found, key=lambda one: one[0], reverse=True)):
                total += size
                if total > LIMIT or number >= MOST:
                    file.unlink(missing_ok=True)

"""The cache of compiled programs, on the host and next to the run's checkpoints, from which a restart loads them.

Entries are machine code. Their folder is named after everything that they depend on and JAX's key does not include:
versions, kind of device and, on CPUs, the features of the processor. An entry is written atomically and begins with a
digest of its contents; a damaged one is skipped. No fault of the cache ends a run.

In a gang, process 0 announces at the start which entries exist, and all processes use only those. On GPUs, a process
that loads a program while another compiles it would otherwise block it, because processes share the autotuning.

Private names of JAX 0.10 and 0.11 in use: compilation_cache.get_file_cache, without which JAX writes its own files to
the folder of the host; for gangs on CPUs cache_key._hash_devices.
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

# The folder of the cache in the run folder.
BESIDE = ".compiled"
# Bytes of the entries in a cache, for all versions and devices together.
LIMIT = 2 << 30
MOST = 1000
DIGEST = hashlib.sha256().digest_size

_config: Any = jax.config
_key: Any = cache_key
_jax: Any = compilation_cache
# Runs everything that no step has to wait for.
_later = ThreadPoolExecutor(1, "compile-cache")


def settle(named: str | None) -> None:
    """Configure JAX with the folder or URL that a job names, and XLA with its own files if that is a folder.

    XLA cannot open URLs ("File system scheme 'gs' not implemented"), not even for results of autotuning.
    """
    if named not in (None, AUTO):
        jax.config.update("jax_compilation_cache_dir", named)
    if remote.is_remote(_config.jax_compilation_cache_dir or ""):
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def install(run_folder: str | None, note: Callable[[str], None]) -> None:
    """Install a cache on this host and, for hosts that join later, in the run folder, which is a path or a URL.

    A folder that the user has configured in JAX remains. Collective, after `distributed.initialize`.
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
    # The path of XLA's own files would be part of every key, and it differs between users.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(here))
    _jax.get_file_cache = lambda path: (programs, path)
    if jax.process_count() > 1 and jax.default_backend() == "cpu" and hasattr(_key, "_hash_devices"):
        # On CPUs, JAX's key includes the devices of the process, so only process 0 would find its entries again.
        _key._hash_accelerator_config = _key._hash_devices


class Programs:
    """Implementation of JAX's CacheInterface, with entries on this host and in the run folder."""

    def __init__(self, here: Path, beside: epath.Path | None, known: set[str]) -> None:
        """Create a cache of which this process may use the entries in `known`."""
        # Part of JAX's interface.
        self._path = here
        self._here, self._beside, self._known = epath.Path(here), beside, known
        self._is_alone = jax.process_count() == 1

    def get(self, key: str) -> bytes | None:
        """Return the entry, or None."""
        name = _name(key)
        if name not in self._known:
            return None
        value = _read(self._here / name)
        if value is not None:
            with contextlib.suppress(OSError):
                # Entries are removed in the order of their last use.
                os.utime(self._here / name)
        elif self._beside is not None and (value := _read(self._beside / name)) is not None:
            _write(self._here / name, value)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Write the entry to this host at once, and to the run folder in the background."""
        name = _name(key)
        if self._is_alone:
            self._known.add(name)
        _write(self._here / name, value)
        if self._beside is not None:
            _later.submit(_write, self._beside / name, value)


def _known(here: Path | None, beside: epath.Path | None) -> set[str]:
    """Return the entries that all processes may use: those of the run and, with a single host, those of the host."""

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
    """Return the features of the processor that XLA compiles for, or the name of the host if they are unknown."""
    with contextlib.suppress(OSError):
        lines = re.findall(r"^(?:model name|flags|Features|CPU \w+)\s*:.*", Path("/proc/cpuinfo").read_text(), re.M)
        if lines:
            return "\n".join(sorted(set(lines)))
    return " ".join(os.uname())


def _private(folder: Path) -> Path:
    """Create the folder for this user only, since whoever can write to it can run code as this user. Raises OSError."""
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
        return sorted(entry.name for entry in folder.iterdir() if not entry.name.endswith(DRAFT_SUFFIX))[:MOST]
    except Exception:
        # The folder does not exist yet, or the store fails, which saving a checkpoint will report.
        return []


def _read(path: epath.Path) -> bytes | None:
    """Return the entry, or None if it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except Exception:
        return None
    digest, value = raw[:DIGEST], raw[DIGEST:]
    return value if value and hashlib.sha256(value).digest() == digest else None


def _write(path: epath.Path, value: bytes) -> None:
    """Write the entry atomically, or not at all if the disk is full or the store is unavailable."""
    raw = hashlib.sha256(value).digest() + value
    with contextlib.suppress(Exception):
        path.parent.mkdir(parents=True, exist_ok=True)
        if remote.is_remote(str(path)):
            # Objects are written atomically.
            path.write_bytes(raw)
            return
        with draft(Path(path)) as file:
            file.write_bytes(raw)


def sweep(home: Path, beside: epath.Path | None) -> None:
    """Remove the least recently used entries of folders that exceed their limits."""
    for folder in [epath.Path(home)] + ([beside] if beside is not None and jax.process_index() == 0 else []):
        # Another process may remove the same entries, or the store may be unavailable.
        with contextlib.suppress(Exception):
            found = [(about.mtime, about.length, file) for file in folder.glob("*/*") for about in [file.stat()]]
            total = 0
            for number, (_, size, file) in enumerate(sorted(found, key=lambda item: item[0], reverse=True)):
                total += size
                if total > LIMIT or number >= MOST:
                    file.unlink(missing_ok=True)

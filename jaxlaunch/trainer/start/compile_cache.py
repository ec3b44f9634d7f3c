"""The cache of compiled programs, from which a restarted run loads them.

It is on the host and in the run folder, for hosts that join later. Entries are machine code. Their
folder is named after everything that they depend on and that JAX's key does not include: versions,
the kind of device and, on CPUs, the features of the processor. An entry is written atomically and
begins with a digest of its contents; a damaged one is skipped. A failure of the cache never ends a
run.

In a gang, process 0 announces at the start which entries exist, and all processes use only those.
Otherwise, on GPUs, a process that loads a program would block another that compiles it, because
the processes share the autotuning.

Private names of JAX 0.10 and 0.11 in use: compilation_cache.get_file_cache, without which JAX
writes its own files to the folder of the host; for gangs on CPUs cache_key._hash_devices.
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
from jaxlaunch.atomic_file import DRAFT_SUFFIX, open_draft
from jaxlaunch.trainer.buckets import remote
from jaxlaunch.trainer.spec import AUTO
from jaxlaunch.trainer.start import distributed

# The folder of the cache in the run folder.
RUN_CACHE_NAME = ".compiled"
# Limits of one cache, for all versions and devices together.
MAX_BYTES = 2 << 30
MAX_ENTRIES = 1000
DIGEST_BYTES = hashlib.sha256().digest_size

# These names are private, and JAX declares no types for them.
_config: Any = jax.config
_jax_cache_key: Any = cache_key
_jax_cache: Any = compilation_cache
# Writes to the run folder and removes old entries, so that no step waits for them.
_background = ThreadPoolExecutor(1, "compile-cache")


def configure_cache(cache_folder: str | None) -> None:
    """Set JAX's cache to the folder or URL that a job names, if it names one.

    For a URL, XLA's own cache is switched off, because XLA cannot open URLs ("File system scheme
    'gs' not implemented"), not even for results of autotuning.
    """
    if cache_folder not in (None, AUTO):
        jax.config.update("jax_compilation_cache_dir", cache_folder)
    if remote.is_remote(_config.jax_compilation_cache_dir or ""):
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")


def install_cache(run_folder: str | None, note: Callable[[str], None]) -> None:
    """Install a cache on this host and, for hosts that join later, in the run folder.

    If the user has configured a folder in JAX, that one stays in use. Every process must call this,
    after `distributed.initialize`.
    """
    if _config.jax_compilation_cache_dir or not _config.jax_enable_compilation_cache:
        return
    try:
        host_folder = _make_private(user_cache.cache_folder("programs") / _environment_digest())
    except OSError as error:
        host_folder = None
        note(f"train.compile_cache = auto: {error}; each start compiles its programs again")
    run_cache = None if run_folder is None else epath.Path(run_folder) / RUN_CACHE_NAME
    entry_names = _shared_entries(host_folder, run_cache)
    if host_folder is None:
        return
    run_programs = None if run_cache is None else run_cache / host_folder.name
    programs = ProgramCache(host_folder, run_programs, entry_names)
    _background.submit(sweep_folders, host_folder.parent, run_cache)
    # The path of XLA's own cache would be part of every key, and it differs between users.
    jax.config.update("jax_persistent_cache_enable_xla_caches", "none")
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_compilation_cache_dir", str(host_folder))
    _jax_cache.get_file_cache = lambda path: (programs, path)
    is_cpu_gang = jax.process_count() > 1 and jax.default_backend() == "cpu"
    if is_cpu_gang and hasattr(_jax_cache_key, "_hash_devices"):
        # On CPUs, JAX's key includes the devices of the process, so only process 0 would find its
        # entries again.
        _jax_cache_key._hash_accelerator_config = _jax_cache_key._hash_devices


class ProgramCache:
    """Implementation of JAX's CacheInterface, with entries on this host and in the run folder."""

    def __init__(
        self, host_folder: Path, run_folder: epath.Path | None, entry_names: set[str]
    ) -> None:
        """Create a cache. This process may use its entries in `entry_names`."""
        # JAX's interface requires this attribute.
        self._path = host_folder
        self._host_folder = epath.Path(host_folder)
        self._run_folder = run_folder
        self._entry_names = entry_names
        self._is_alone = jax.process_count() == 1

    def get(self, key: str) -> bytes | None:
        """Return the entry, or None."""
        name = _entry_name(key)
        if name not in self._entry_names:
            return None
        value = _read_entry(self._host_folder / name)
        if value is not None:
            with contextlib.suppress(OSError):
                # The least recently used entries are removed first.
                os.utime(self._host_folder / name)
        elif self._run_folder is not None:
            value = _read_entry(self._run_folder / name)
            if value is not None:
                _write_entry(self._host_folder / name, value)
        return value

    def put(self, key: str, value: bytes) -> None:
        """Write the entry to this host at once, and to the run folder in the background."""
        name = _entry_name(key)
        if self._is_alone:
            self._entry_names.add(name)
        _write_entry(self._host_folder / name, value)
        if self._run_folder is not None:
            _background.submit(_write_entry, self._run_folder / name, value)


def _shared_entries(host_folder: Path | None, run_cache: epath.Path | None) -> set[str]:
    """Return the entries that all processes can read.

    These are the entries in the run folder and, if the run has only one host, those on the host.
    """

    def list_shared() -> list[str]:
        if host_folder is None:
            return []
        entries = [] if run_cache is None else _list_entries(run_cache / host_folder.name)
        hosts = int(os.environ.get(contract.HOSTS, "1")) * int(os.environ.get(contract.SLICES, "1"))
        return entries + (_list_entries(epath.Path(host_folder)) if hosts == 1 else [])

    return set(distributed.broadcast_from_primary(list_shared))


def _environment_digest() -> str:
    device = jax.devices()[0]
    versions = [jax.__version__, importlib.metadata.version("jaxlib")]
    parts = [*versions, device.client.platform_version, device.platform, device.device_kind]
    if device.platform == "cpu":
        parts.append(_processor_features())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor_features() -> str:
    """Return the features of the processor, which XLA compiles for, or else the host's name."""
    pattern = r"^(?:model name|flags|Features|CPU \w+)\s*:.*"
    with contextlib.suppress(OSError):
        if lines := re.findall(pattern, Path("/proc/cpuinfo").read_text(), re.M):
            return "\n".join(sorted(set(lines)))
    return " ".join(os.uname())


def _make_private(folder: Path) -> Path:
    """Create a folder for this user only, because its files are run as code. Raises OSError."""
    folder.mkdir(0o700, parents=True, exist_ok=True)
    for path in (folder.parent, folder):
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} can be written by other users")
    return folder


def _entry_name(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def _list_entries(folder: epath.Path) -> list[str]:
    try:
        names = (entry.name for entry in folder.iterdir())
        return sorted(name for name in names if not name.endswith(DRAFT_SUFFIX))[:MAX_ENTRIES]
    except Exception:
        # The folder does not exist yet, or the store fails, which saving a checkpoint will report.
        return []


def _read_entry(path: epath.Path) -> bytes | None:
    """Return the entry, or None if it is missing or damaged."""
    try:
        raw = path.read_bytes()
    except Exception:
        return None
    digest, value = raw[:DIGEST_BYTES], raw[DIGEST_BYTES:]
    return value if value and hashlib.sha256(value).digest() == digest else None


def _write_entry(path: epath.Path, value: bytes) -> None:
    """Write the entry atomically, or not at all if the disk is full or the store is unavailable."""
    raw = hashlib.sha256(value).digest() + value
    with contextlib.suppress(Exception):
        remote.create_folder(path.parent)
        if remote.is_remote(str(path)):
            # Objects are written atomically.
            path.write_bytes(raw)
            return
        with open_draft(Path(path)) as file:
            file.write_bytes(raw)


def sweep_folders(host_caches: Path, run_cache: epath.Path | None) -> None:
    """Remove the least recently used entries of folders that exceed their limits."""
    folders = [epath.Path(host_caches)]
    if run_cache is not None and jax.process_index() == 0:
        folders.append(run_cache)
    for folder in folders:
        # Another process may remove the same entries, or the store may be unavailable.
        with contextlib.suppress(Exception):
            files = [(file.stat(), file) for file in folder.glob("*/*")]
            files.sort(key=lambda item: item[0].mtime, reverse=True)
            total = 0
            for number, (status, file) in enumerate(files):
                total += status.length
                if total > MAX_BYTES or number >= MAX_ENTRIES:
                    file.unlink(missing_ok=True)

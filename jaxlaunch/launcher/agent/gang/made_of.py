"""What an attempt is made of beside its job: the versions of Python, JAX and ours, and a digest of the job's code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping

from jaxlaunch import contract, regular_files

DIGITS = 12  # hexadecimal, of the digest
_MOST_FILES, _MOST_BYTES = 2000, 16 << 20  # of a folder with more, nothing is said
_LEFT_OUT = {"__pycache__", "runs", "node_modules", "venv"}  # and whatever begins with a dot


def of(versions: Mapping[str, str | None], environ: Mapping[str, str]) -> dict[str, str]:
    """What is known when the first attempt of a generation starts; JAX's version is that of the agent's interpreter."""
    found = {name: version for name in ("python", "jax") if (version := versions.get(name)) is not None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an image without our package
        found["jaxlaunch"] = importlib.metadata.version("jaxlaunch")
    return found | code(environ)


def code(environ: Mapping[str, str]) -> dict[str, str]:
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

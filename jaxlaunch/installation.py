"""The installation of jaxlaunch on this machine, and the command that adds an extra to it.

Messages name the source that jaxlaunch was installed from, which pip and uv record in
direct_url.json (PEP 610). While ON_INDEX is False, jaxlaunch is not on the package index, so the
pages install it from a clone. The release that uploads the package sets ON_INDEX; `make generated`
then rewrites the commands of the pages.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
import sys
import urllib.parse
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

NAME = "jaxlaunch"
ON_INDEX = False
# The modules that each extra installs, by their import names.
_MODULES_BY_EXTRA = {
    "train": (
        *("jax", "flax", "optax", "orbax", "grain", "etils", "array_record", "tensorflow_datasets"),
        *("sklearn", "absl", "numpy", "PIL", "prometheus_client", "safetensors", "fsspec"),
    ),
    "text": ("tokenizers", "pyarrow", "jinja2"),
    "haiku": ("haiku",),
    "gcs": ("gcsfs",),
    "s3": ("s3fs",),
}


def missing_extra_message(error: BaseException) -> str | None:
    """Return the message for an import that failed without an extra, or None for other errors."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    extra = next((extra for extra, names in _MODULES_BY_EXTRA.items() if name in names), None)
    if extra is None:
        return None
    return f"the package {name} is not installed here: {install_hint(extra)}"


def install_hint(*extras: str) -> str:
    """Return the advice that adds the extras to this installation: `install it with …`."""
    origin = _read_origin()
    if origin is not None and "dir_info" in origin and not _url_path(origin["url"]).is_dir():
        # The folder that jaxlaunch was installed from no longer exists, as in an image.
        return f"build this image again with the extra {' and '.join(extras)} of jaxlaunch"
    requirement = _format_requirement(origin, ",".join(extras))
    # uvx creates its environments in a folder of uv's cache, for one call each.
    if Path(sys.prefix).parent.name.startswith("archive-v"):
        return f"start it with uvx --from {requirement} launcher"
    return f"install it with {_installer_command()} {requirement}"


def _read_origin() -> dict[str, Any] | None:
    """Return the PEP 610 record of this installation, or None if it is from an index."""
    try:
        text = importlib.metadata.distribution(NAME).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin: dict[str, Any] | None = None if text is None else json.loads(text)
    return origin


def _format_requirement(origin: dict[str, Any] | None, extras: str) -> str:
    """Return the requirement for a shell, such as `'jaxlaunch[train] @ URL'`."""
    if origin is None:
        return shlex.quote(f"{NAME}[{extras}]")
    if "dir_info" in origin:
        editable = "-e " if origin["dir_info"].get("editable") else ""
        return editable + shlex.quote(f"{_url_path(origin['url'])}[{extras}]")
    url = origin["url"]
    if "vcs_info" in origin:
        url = f"{origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return shlex.quote(f"{NAME}[{extras}] @ {url}")


def _url_path(url: str) -> Path:
    return Path(urllib.parse.unquote(urllib.parse.urlsplit(url).path))


def _installer_command() -> str:
    """Return the install command for this environment: uv, pipx or pip."""
    environment = Path(sys.prefix)
    if (environment / "uv-receipt.toml").exists():
        return "uv tool install"
    if (environment / "pipx_metadata.json").exists():
        return "pipx install --force"
    # importlib.util.find_spec would also call the finder of setuptools, which on a search for pip
    # removes distutils, and warns.
    if PathFinder.find_spec("pip") is None:
        return f"uv pip install --python {shlex.quote(sys.executable)}"
    pip_path = shutil.which("pip")
    if pip_path is not None and Path(pip_path).parent == Path(sys.executable).parent:
        return "pip install"
    return f"{shlex.quote(sys.executable)} -m pip install"

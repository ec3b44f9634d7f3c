"""Programs of others, each in an environment that is built once into the user's cache directory.

An environment is a list in tests/requirements; its folder's name contains a hash of the list and of
this file.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from pathlib import Path

LISTS = Path(__file__).parent / "requirements"
INSTALL = Path(__file__).parents[1] / "requirements" / "install.py"

# torch's wheel for Linux is linked to 2 GB of libraries that only a GPU calls. Under their names
# stands one of its own that holds nothing: symbols that nobody calls are never looked for, as long
# as they are bound when they are called.
GPU_ONLY = (
    "libcublas.so.12",
    "libcublasLt.so.12",
    "libcufft.so.11",
    "libcupti.so.12",
    "libcurand.so.10",
    "libnvrtc.so.12",
    "libcublas.so.13",
    "libcublasLt.so.13",
    "libcudnn.so.9",
    "libcufft.so.12",
    "libcufile.so.0",
    "libcupti.so.13",
    "libcusparse.so.12",
    "libcusparseLt.so.0",
    "libnccl.so.2",
    "libnvrtc.so.13",
)
EMPTY = "libtorch_global_deps.so"
LAZY = {"TORCH_USE_RTLD_GLOBAL": "1"}  # has torch bind symbols when they are called


class MissingEnvironmentError(RuntimeError):
    """An environment that cannot be built here, with the installer's message."""


def environment_folder(name: str) -> Path:
    """Return the folder of the environment `name`, built or not."""
    digest = hashlib.sha256(Path(__file__).read_bytes() + (LISTS / f"{name}.txt").read_bytes())
    digest.update(f"{sys.version_info[:2]}".encode())
    cache = (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "jaxlaunch"
        / "environments"
    )
    return cache / f"{name}-{digest.hexdigest()[:16]}"


def run_program(name: str, program: str, *arguments: str) -> str:
    """Return the output of a Python program in environment `name`.

    Raises CalledProcessError if it fails, and Missing.
    """
    command = [str(find_python(name)), "-I", program, *arguments]
    return subprocess.run(
        command, env=os.environ | LAZY, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def find_python(name: str) -> Path:
    """Return the interpreter of environment `name`, built if necessary. Raises Missing."""
    home = environment_folder(name)
    home.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{home}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (home / ".ready").exists():
            _build_environment(name, home)
            (home / ".ready").touch()
    return home / "bin" / "python"


def _build_environment(name: str, home: Path) -> None:
    print(f"building {home}: {name}", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", "--without-pip", home], check=True)
    install = [sys.executable, str(INSTALL), "--python", str(home / "bin" / "python")]
    options = ["--no-deps", "--no-cache-dir", "--no-compile", "-r", str(LISTS / f"{name}.txt")]
    done = subprocess.run(
        [*install, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise MissingEnvironmentError(
            f"environment {name} cannot be built: {' '.join(done.stderr.split()[-60:])}"
        )
    for library in home.glob(f"lib/python3*/site-packages/torch/lib/{EMPTY}"):
        for absent in GPU_ONLY:
            (library.parent / absent).symlink_to(EMPTY)

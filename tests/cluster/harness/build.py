"""The programs of a cluster, built from the Go modules next to this package.

They are built once into the user's cache directory, under a key of the modules and the flags, so
that a fresh clone on the same machine does not build again.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

MODULES = Path(__file__).parents[1] / "go"

# One set of flags for all: another set changes every key of Go's own cache, and all is compiled
# again.
FLAGS = ["-trimpath", "-buildvcs=false"]
STAMP = "k8s.io/component-base/version."
LINK = f"-s -w -X {STAMP}gitVersion=v1.35.4 -X {STAMP}gitMajor=1 -X {STAMP}gitMinor=35"

GO = "go1.26.8"  # downloaded where the machine's own is older than
OLDEST_GO = (1, 26)

# Module folder -> what to build in it. kubectl only renders the kustomizations of JobSet and Kueue.
PROGRAMS = {
    "kubernetes": [
        "./kube-apiserver",
        "./kube-controller-manager",
        "./kube-scheduler",
        "./kubelet",
        "./kubectl",
    ],
    "etcd": ["."],
    "jobset": ["sigs.k8s.io/jobset"],
    "kueue": ["sigs.k8s.io/kueue/cmd/kueue"],
    "kwok": ["sigs.k8s.io/kwok/cmd/kwok"],
    "coredns": ["."],
    "pause": ["."],
}


class MissingToolError(RuntimeError):
    """The machine lacks something that a cluster needs; the message says how to get it."""


def cache_folder() -> Path:
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxlaunch" / "cluster"
    )


def find_go() -> str:
    """Return a Go compiler that is new enough: the machine's own, or one that it downloads."""
    machine_go = find_machine_go()
    version = go_env(machine_go, "GOVERSION")
    if tuple(map(int, re.findall(r"\d+", version)[:2])) >= OLDEST_GO:
        return machine_go
    return download_go(machine_go)


def find_machine_go() -> str:
    """Return the machine's Go of any version, from PATH or its usual folder."""
    for path in (shutil.which("go"), "/usr/local/go/bin/go"):
        if path and os.access(path, os.X_OK):
            return path
    raise MissingToolError(
        "no Go compiler, which builds a cluster's programs: apt-get install golang-go (any "
        "age will do)"
    )


def go_env(compiler: str, name: str) -> str:
    return subprocess.run(
        [compiler, "env", name], capture_output=True, text=True, check=True
    ).stdout.strip()


def download_go(machine_go: str) -> str:
    """Return a Go that an older one downloads as a module and checks like any other.

    Files of modules are not executable; Go's own launcher also sets that bit.
    """
    platform = f"{go_env(machine_go, 'GOOS')}-{go_env(machine_go, 'GOARCH')}"
    root = download_module(machine_go, f"golang.org/toolchain@v0.0.1-{GO}.{platform}", Path.home())
    for program in (*(root / "bin").iterdir(), *(root / "pkg" / "tool").glob("*/*")):
        program.chmod(0o755)
    return str(root / "bin" / "go")


def download_module(compiler: str, module: str, folder: Path) -> Path:
    """Return the folder of a module's source in Go's module cache."""
    command = [compiler, "mod", "download", "-json", module]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | {"GOFLAGS": ""}, capture_output=True, text=True
    )
    if done.returncode:
        raise MissingToolError(f"{module} cannot be downloaded: {done.stdout} {done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])


def build_key() -> str:
    """Return a hash of what the programs depend on; go.sum pins the modules' sources."""
    digest = hashlib.sha256("\0".join([*FLAGS, LINK]).encode())
    for path in sorted(MODULES.rglob("*")):
        if path.is_file():
            digest.update(f"\0{path.relative_to(MODULES)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def programs_folder() -> Path:
    """Return the folder of the programs, built or not."""
    return cache_folder() / build_key()


def is_built() -> bool:
    return all((programs_folder() / f".{module}").exists() for module in PROGRAMS)


def build_programs() -> Path:
    """Return the folder of the programs, built now if necessary (25 minutes on two cores)."""
    folder = programs_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for module, packages in PROGRAMS.items():
            built = folder / f".{module}"
            if not built.exists():
                build_module(module, packages, folder)
                built.touch()
    return folder


def build_module(module: str, packages: list[str], folder: Path) -> None:
    print(f"building {module}: {' '.join(packages)}", file=sys.stderr, flush=True)
    # "." would be named after the module's last element, which is the folder's name.
    command = [find_go(), "build", *FLAGS, "-ldflags", LINK, "-o", f"{folder}/", *packages]
    subprocess.run(
        command,
        cwd=MODULES / module,
        env=os.environ | {"CGO_ENABLED": "0", "GOFLAGS": ""},
        check=True,
    )


def module_source(module: str, path: str) -> Path:
    """Return the folder of a module's source, for the manifests that it ships."""
    return download_module(find_go(), path, MODULES / module)

"""The images of the cluster, made from this machine's files: no registry is asked.

localhost/pause:1 holds the namespaces of a pod, localhost/pybase:1 is Python and a shell, and
localhost/jaxbare:test adds jax, but nothing of jaxlaunch.
"""

import fcntl
import hashlib
import shutil
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from tests.cluster.harness import containerd, oci, rootfs
from tests.cluster.harness.containerd import PAUSE
from tests.cluster.harness.places import IMAGES, hash_sources

BASE = "localhost/pybase:1"
BARE = "localhost/jaxbare:test"
# jax and what it imports.
DISTRIBUTIONS = ("jax", "jaxlib", "numpy", "scipy", "ml_dtypes", "opt_einsum")
ENVIRONMENT = (
    "PATH=/usr/local/bin:/usr/bin:/bin",
    "PYTHONUNBUFFERED=1",
    "PYTHONDONTWRITEBYTECODE=1",
    "HOME=/tmp",
)
VENV = "/opt/venv"


def get_or_make(name: str, stamp: str, make: Callable[[Path], None]) -> Path:
    """Return the file or folder of this name and stamp, made if necessary; others are removed."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = IMAGES / f"{name}-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"
    with open(IMAGES / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            for old in IMAGES.glob(f"{name}-*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            with tempfile.TemporaryDirectory(dir=IMAGES) as folder:
                make(Path(folder, "made"))
                Path(folder, "made").rename(path)
    return path


def base_stamp() -> str:
    return f"{rootfs.find_interpreter()} {sys.version} {hash_sources('oci', 'rootfs', 'images')}"


def base_folder() -> Path:
    """Return the base image's root folder, from which buildah starts."""
    return get_or_make("rootfs", base_stamp(), rootfs.make_root)


def pause_archive(home: Path) -> Path:
    layers = [oci.Layer(home / "pause", "/pause")]
    return get_or_make(
        "pause", f"{home}", lambda path: oci.write_image(path, PAUSE, layers, entrypoint=["/pause"])
    )


def base_archive() -> Path:
    layers = [oci.Layer(base_folder())]
    return get_or_make(
        "pybase", base_stamp(), lambda path: oci.write_image(path, BASE, layers, env=ENVIRONMENT)
    )


def bare_archive() -> Path:
    versions = " ".join(f"{name}={metadata.version(name)}" for name in DISTRIBUTIONS)
    return get_or_make("jaxbare", f"{base_stamp()} {versions}", write_bare)


def write_bare(path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=IMAGES) as folder:
        make_venv(Path(folder))
        layers = [oci.Layer(base_folder()), oci.Layer(Path(folder), VENV)]
        env = [f"PATH={VENV}/bin:{ENVIRONMENT[0].removeprefix('PATH=')}", *ENVIRONMENT[1:]]
        oci.write_image(path, BARE, layers, env=env)


def make_venv(folder: Path) -> None:
    """Make a venv on the image's Python with the distributions that are installed here."""
    folder.chmod(0o755)
    (folder / "pyvenv.cfg").write_text(
        "home = /usr/local/bin\ninclude-system-site-packages = false\n"
    )
    (folder / "bin").mkdir()
    for name in ("python", "python3"):
        (folder / "bin" / name).symlink_to(f"/usr/local/bin/{rootfs.VERSION}")
    site = folder / "lib" / rootfs.VERSION / "site-packages"
    for name in DISTRIBUTIONS:
        copy_distribution(name, site)
    rootfs.compile_all(site)


def copy_distribution(name: str, site: Path) -> None:
    for file in metadata.distribution(name).files or ():
        parts = set(file.parts)
        if file.parts[0] == ".." or parts & {"tests", "__pycache__"}:
            continue
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file.locate(), site / file)


def import_archive(archive: Path, name: str) -> None:
    """Put the image of `archive` into the node's store under `name`, unless it is there."""
    digest = oci.read_digest(archive)
    images = dict(containerd.list_images())
    if images.get(name) == digest:
        return
    containerd.run_ctr("images", "import", archive)
    if dict(containerd.list_images()).get(name) != digest:
        raise RuntimeError(f"{archive} was imported, and {name} is not its image {digest}")


def import_all(home: Path) -> None:
    archives = {PAUSE: pause_archive(home), BASE: base_archive(), BARE: bare_archive()}
    for name, archive in archives.items():
        import_archive(archive, name)

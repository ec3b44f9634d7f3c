"""The product's own image, built from its Dockerfile with buildah on the base image, and put into the node's store.

Built again it takes seconds: buildah keeps every layer whose inputs are the same, and the node is
given only the layers that it lacks.
"""

import ast
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.cluster.harness import containerd, images, mounts, oci
from tests.cluster.harness.places import IMAGES

IMAGE = "localhost/jaxlaunch:test"
ROOT = Path(__file__).parents[3]
# Where pip finds packages, as the user's own configuration says it; the rest of it is about other
# machines.
INDEX = {
    "index-url",
    "extra-index-url",
    "no-index",
    "find-links",
    "trusted-host",
    "cert",
    "client-cert",
    "proxy",
}


def load() -> None:
    """The node holds the image of this checkout as it is now."""
    with locked():
        store = base_store()
        identity = build(store)
        record = store / "loaded"
        known = json.loads(record.read_text()) if record.exists() else {}
        digest = dict(containerd.images()).get(IMAGE)
        if digest is None or known != {"image": identity, "digest": digest}:
            record.write_text(json.dumps({"image": identity, "digest": put_on_node(store)}))


@contextmanager
def locked() -> Iterator[None]:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with open(IMAGES / ".image.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def buildah(store: Path, *words: str | Path) -> str:
    """What buildah prints. Raises RuntimeError with its own words."""
    program = [
        "buildah",
        "--root",
        store / "root",
        "--runroot",
        store / "run",
        "--storage-driver",
        "overlay",
    ]
    done = subprocess.run([*program, *words], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"buildah {words[0]}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    return done.stdout.strip()


def base_store() -> Path:
    """buildah's store with the base image in it; layers on another base are of no more use."""
    base = images.base_folder()
    store = IMAGES / f"buildah-{base.name}"
    for old in IMAGES.glob("buildah-*"):
        if old != store:
            mounts.remove(old)  # a build that failed leaves its containers mounted
            shutil.rmtree(old)
    if images.BASE not in buildah(store, "images", "--format", "{{.Name}}:{{.Tag}}").split():
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write("FROM scratch\nCOPY . /\n")
            file.flush()
            buildah(store, "bud", "--tag", images.BASE, "--file", file.name, base)
    return store


def build(store: Path) -> str:
    """The image's identity. Its layers come from the cache where nothing that goes into them has changed."""
    settings = pip_settings()
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        file.flush()
        options = ["--isolation", "chroot", "--layers", "--pull=never", "--quiet", "--tag", IMAGE]
        secret = ["--secret", f"id=pip,src={file.name}"]
        base = ["--build-arg", f"BASE={images.BASE}"]
        return buildah(store, "bud", *options, *secret, *volumes(settings), *base, ROOT)


def pip_settings() -> dict[str, str]:
    """Where this machine's pip finds packages; the later of two says it, as for pip itself."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in INDEX:
            found[key] = " ".join(str(ast.literal_eval(value)).split())
    return found


def volumes(settings: Mapping[str, str]) -> list[str]:
    """Options that show the build the files and folders which pip's settings name."""
    named = {word for value in settings.values() for word in value.split() if os.path.exists(word)}
    return [option for path in sorted(named) for option in ("--volume", f"{path}:{path}:ro")]


def put_on_node(store: Path) -> str:
    """The image goes from buildah's store to the node's; gives its digest there."""
    with tempfile.TemporaryDirectory(dir=IMAGES) as folder:
        whole, lacking = Path(folder, "whole"), Path(folder, "lacking")
        buildah(store, "push", "--quiet", IMAGE, f"docker-archive:{whole}:{IMAGE}")
        digest = convert(whole, lacking, set(containerd.ctr("content", "list", "--quiet").split()))
        try:
            containerd.ctr("images", "import", lacking)
        except (
            RuntimeError
        ):  # a store that was killed in an import may have a layer, and not the snapshots below it
            held = [
                name
                for name, _ in containerd.images()
                if name == IMAGE or name.startswith("sha256:")
            ]
            containerd.ctr("images", "delete", "--sync", *held)
            convert(whole, lacking, set())
            containerd.ctr("images", "import", lacking)
        return digest


def convert(whole: Path, lacking: Path, held: set[str]) -> str:
    """Writes Docker's archive `whole` as an OCI archive without the blobs that are held; gives the image's digest."""
    blobs: dict[str, Path] = {}
    with tarfile.open(whole) as packed:

        def described(member: str, kind: str) -> dict[str, Any]:
            digest = member.partition(".")[0]
            if f"sha256:{digest}" not in held:
                blobs[digest] = lacking.parent / member
                content = packed.extractfile(member)
                assert content is not None, "layers and configs are files"
                with (
                    content,
                    blobs[digest].open("wb") as file,
                ):  # `extract` has filters since Python 3.11.4 alone
                    shutil.copyfileobj(content, file)
            return {
                "mediaType": kind,
                "digest": f"sha256:{digest}",
                "size": packed.getmember(member).size,
            }

        listed = packed.extractfile("manifest.json")
        assert listed is not None
        (image,) = json.load(listed)
        manifest = {
            "schemaVersion": 2,
            "mediaType": oci.MANIFEST,
            "config": described(image["Config"], oci.CONFIG),
            "layers": [described(layer, oci.LAYER) for layer in image["Layers"]],
        }
        whole_manifest = oci.add(blobs, oci.text(manifest, lacking.parent / "manifest"))
        named = {"mediaType": oci.MANIFEST, **whole_manifest, "annotations": {oci.NAME: IMAGE}}
        oci.bundle(lacking, {"schemaVersion": 2, "manifests": [named]}, blobs)
        return str(whole_manifest["digest"])

"""The product's image, built from its Dockerfile with buildah and put into the node's store.

Another build takes seconds: buildah keeps every layer whose inputs are equal, and the node gets
only the layers that it lacks.
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


def load_image() -> None:
    """Put the image of this checkout into the node's store."""
    with lock_store():
        store = base_store()
        identity = build_image(store)
        record = store / "loaded"
        record_of_image = json.loads(record.read_text()) if record.exists() else {}
        digest = dict(containerd.list_images()).get(IMAGE)
        if digest is None or record_of_image != {"image": identity, "digest": digest}:
            record.write_text(json.dumps({"image": identity, "digest": put_on_node(store)}))


@contextmanager
def lock_store() -> Iterator[None]:
    IMAGES.mkdir(parents=True, exist_ok=True)
    with open(IMAGES / ".image.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run_buildah(store: Path, *words: str | Path) -> str:
    """Return the output of buildah. Raises RuntimeError with its error."""
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
    """Return buildah's store with the base image; layers on another base are removed."""
    base = images.base_folder()
    store = IMAGES / f"buildah-{base.name}"
    for old in IMAGES.glob("buildah-*"):
        if old != store:
            mounts.unmount_below(old)  # a build that failed leaves its containers mounted
            shutil.rmtree(old)
    if images.BASE not in run_buildah(store, "images", "--format", "{{.Name}}:{{.Tag}}").split():
        with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
            file.write("FROM scratch\nCOPY . /\n")
            file.flush()
            run_buildah(store, "bud", "--tag", images.BASE, "--file", file.name, base)
    return store


def build_image(store: Path) -> str:
    """Build the image and return its id. Unchanged layers come from the cache."""
    settings = pip_settings()
    with tempfile.NamedTemporaryFile("w", suffix=".conf") as file:
        file.write("[global]\n" + "".join(f"{key} = {value}\n" for key, value in settings.items()))
        file.flush()
        options = ["--isolation", "chroot", "--layers", "--pull=never", "--quiet", "--tag", IMAGE]
        secret = ["--secret", f"id=pip,src={file.name}"]
        base = ["--build-arg", f"BASE={images.BASE}"]
        return run_buildah(store, "bud", *options, *secret, *volume_options(settings), *base, ROOT)


def pip_settings() -> dict[str, str]:
    """Return where this machine's pip finds packages; later settings override earlier ones."""
    listed = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    settings = {}
    for line in listed.splitlines():
        name, _, value = line.partition("=")
        key = name.rpartition(".")[2]
        if key in INDEX:
            settings[key] = " ".join(str(ast.literal_eval(value)).split())
    return settings


def volume_options(settings: Mapping[str, str]) -> list[str]:
    """Return options that mount the files and folders of pip's settings into the build."""
    paths = {word for value in settings.values() for word in value.split() if os.path.exists(word)}
    return [option for path in sorted(paths) for option in ("--volume", f"{path}:{path}:ro")]


def put_on_node(store: Path) -> str:
    """Copy the image from buildah's store to the node's and return its digest there."""
    with tempfile.TemporaryDirectory(dir=IMAGES) as folder:
        whole, lacking = Path(folder, "whole"), Path(folder, "lacking")
        run_buildah(store, "push", "--quiet", IMAGE, f"docker-archive:{whole}:{IMAGE}")
        digest = convert_archive(
            whole, lacking, set(containerd.run_ctr("content", "list", "--quiet").split())
        )
        try:
            containerd.run_ctr("images", "import", lacking)
        except (
            RuntimeError
        ):  # a store that was killed in an import may have a layer, and not the snapshots below it
            existing_blobs = [
                name
                for name, _ in containerd.list_images()
                if name == IMAGE or name.startswith("sha256:")
            ]
            containerd.run_ctr("images", "delete", "--sync", *existing_blobs)
            convert_archive(whole, lacking, set())
            containerd.run_ctr("images", "import", lacking)
        return digest


def convert_archive(whole: Path, lacking: Path, existing_blobs: set[str]) -> str:
    """Write Docker's archive as an OCI archive without the existing blobs; return its digest."""
    blobs: dict[str, Path] = {}
    with tarfile.open(whole) as packed:

        def described(member: str, kind: str) -> dict[str, Any]:
            digest = member.partition(".")[0]
            if f"sha256:{digest}" not in existing_blobs:
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
        whole_manifest = oci.add_blob(blobs, oci.text_layer(manifest, lacking.parent / "manifest"))
        named = {"mediaType": oci.MANIFEST, **whole_manifest, "annotations": {oci.NAME: IMAGE}}
        oci.write_bundle(lacking, {"schemaVersion": 2, "manifests": [named]}, blobs)
        return str(whole_manifest["digest"])

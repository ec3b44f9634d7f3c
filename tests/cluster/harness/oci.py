"""Image archives in the OCI layout, written and read without a container engine."""

import hashlib
import io
import json
import os
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NAME = "io.containerd.image.name"  # by which containerd names what it imports
LAYER = "application/vnd.oci.image.layer.v1.tar"
CONFIG = "application/vnd.oci.image.config.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"


class Layer(NamedTuple):
    source: Path
    at: str = "/"  # where in the image


def write_image(
    archive: Path,
    name: str,
    layers: Sequence[Layer],
    *,
    env: Sequence[str] = (),
    entrypoint: Sequence[str] = (),
) -> None:
    """Write one image; all its files are root's and without times, so that digests are stable."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        blobs: dict[str, Path] = {}
        descriptors = [
            add_blob(blobs, pack_layer(layer, Path(folder, f"layer-{i}")))
            for i, layer in enumerate(layers)
        ]
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": list(env), "Entrypoint": list(entrypoint), "WorkingDir": "/"},
            "rootfs": {
                "type": "layers",
                "diff_ids": [descriptor["digest"] for descriptor in descriptors],
            },
        }
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {
                "mediaType": CONFIG,
                **add_blob(blobs, text_layer(config, Path(folder, "config"))),
            },
            "layers": [{"mediaType": LAYER, **descriptor} for descriptor in descriptors],
        }
        described = add_blob(blobs, text_layer(manifest, Path(folder, "manifest")))
        named = {"mediaType": MANIFEST, **described, "annotations": {NAME: name}}
        unfinished = Path(folder, "archive")
        write_bundle(unfinished, {"schemaVersion": 2, "manifests": [named]}, blobs)
        unfinished.rename(archive)


def pack_layer(layer: Layer, path: Path) -> Path:
    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as packed:
        packed.add(layer.source.resolve(), arcname=layer.at.strip("/") or ".", filter=anonymous)
    return path


def text_layer(content: object, path: Path) -> Path:
    path.write_text(json.dumps(content, sort_keys=True))
    return path


def add_blob(blobs: dict[str, Path], path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    blobs[digest] = path
    return {"digest": f"sha256:{digest}", "size": path.stat().st_size}


def write_bundle(archive: Path, index: object, blobs: dict[str, Path]) -> None:
    with tarfile.open(archive, "w") as packed:
        for name, content in (
            ("oci-layout", {"imageLayoutVersion": "1.0.0"}),
            ("index.json", index),
        ):
            data = json.dumps(content).encode()
            member = tarfile.TarInfo(name)
            member.size = len(data)
            packed.addfile(member, io.BytesIO(data))
        for digest, path in blobs.items():
            packed.add(path, arcname=f"blobs/sha256/{digest}")


def read_digest(archive: Path | os.PathLike[str]) -> str:
    """Return the digest of the single image in an archive."""
    with tarfile.open(archive) as packed:
        index = packed.extractfile("index.json")
        assert index is not None
        (manifest,) = json.load(index)["manifests"]
        return str(manifest["digest"])

"""The state that every cluster starts from: JobSet and Kueue installed, the keys made. Made once a machine.

Applying CRDs and their like takes as long as everything else together, so it is done once, and
etcd's folder kept. It holds throw-away private keys: it stays in the cache, readable by its owner.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tests.cluster.harness import control, controllers, kwok, manifests, pki, process
from tests.cluster.harness.places import (
    ADMIN,
    JOBSET_WEBHOOK,
    KUBECONFIGS,
    KUEUE_WEBHOOK,
    PKI,
    RUN,
    sources,
)

PARTS = ("etcd", "pki", "kubeconfig", controllers.KUEUE_CERTIFICATE.name, kwok.STAGES_FILE)
MADE_BY = ("build", "control", "controllers", "golden", "kwok", "manifests", "pki", "places")


def folder(home: Path) -> Path:
    return home / f"golden-{sources(*MADE_BY)}"


def lay_out(home: Path) -> None:
    """The run folder as a cluster finds it before its first program starts."""
    for part in PARTS:
        source = folder(home) / part
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, RUN / part)


def make(home: Path) -> None:
    """Runs a control plane in the run folder, installs all, stops it again and keeps what it wrote."""
    (RUN / kwok.STAGES_FILE).write_text(kwok.config())
    pki.make(PKI)
    pki.kubeconfigs(PKI, KUBECONFIGS)
    control.start(home)
    jobset = manifests.rendered(home, "jobset", JOBSET_WEBHOOK, PKI / "ca.crt")
    kueue = manifests.rendered(home, "kueue", KUEUE_WEBHOOK, None)
    install(home, [*manifests.DNS, *jobset, *kueue])
    controllers.start_jobset(home)
    controllers.start_kueue(home)
    controllers.copy_kueue_certificate()
    controllers.settled()
    control.settled()
    process.kill(but="etcd")
    process.stop("etcd")
    keep(home)


def install(home: Path, objects: list[dict[str, object]]) -> None:
    for words, text in (
        (
            ["apply", "--server-side", "--force-conflicts", "--filename", "-"],
            json.dumps({"kind": "List", "apiVersion": "v1", "items": objects}),
        ),
        (["wait", "--for=condition=Established", "crd", "--all", "--timeout=300s"], None),
    ):
        command = [home / "kubectl", f"--kubeconfig={ADMIN}", *words]
        done = subprocess.run(command, input=text, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"kubectl {' '.join(words)}: {done.stderr.strip()}")


def keep(home: Path) -> None:
    """In one step, so that a half-made one is never taken; those of other sources go."""
    for old in home.glob("golden-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=home) as unfinished:
        for part in PARTS:
            os.rename(RUN / part, Path(unfinished, part))
        shutil.copytree(unfinished, f"{unfinished}.whole")
        os.rename(f"{unfinished}.whole", folder(home))

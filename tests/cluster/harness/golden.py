"""The initial state of every cluster: JobSet and Kueue installed, the keys made.

It is made once per machine, since applying CRDs takes as long as everything else together, and
etcd's folder is kept. It holds throw-away private keys: it stays in the cache, readable by its
owner alone.
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
    hash_sources,
)

PARTS = ("etcd", "pki", "kubeconfig", controllers.KUEUE_CERTIFICATE.name, kwok.STAGES_FILE)
MADE_BY = ("build", "control", "controllers", "golden", "kwok", "manifests", "pki", "places")


def state_folder(home: Path) -> Path:
    return home / f"golden-{hash_sources(*MADE_BY)}"


def lay_out(home: Path) -> None:
    """Prepare the run folder for the first program of a cluster."""
    for part in PARTS:
        source = state_folder(home) / part
        (shutil.copytree if source.is_dir() else shutil.copy2)(source, RUN / part)


def make_state(home: Path) -> None:
    """Run a control plane in the run folder, install everything, stop it and keep its state."""
    (RUN / kwok.STAGES_FILE).write_text(kwok.make_config())
    pki.make_certificates(PKI)
    pki.write_kubeconfigs(PKI, KUBECONFIGS)
    control.start(home)
    jobset = manifests.render_module(home, "jobset", JOBSET_WEBHOOK, PKI / "ca.crt")
    kueue = manifests.render_module(home, "kueue", KUEUE_WEBHOOK, None)
    install_objects(home, [*manifests.DNS, *jobset, *kueue])
    controllers.start_jobset(home)
    controllers.start_kueue(home)
    controllers.copy_kueue_certificate()
    controllers.wait_until_settled()
    control.wait_until_settled()
    process.kill(but="etcd")
    process.stop("etcd")
    keep_state(home)


def install_objects(home: Path, objects: list[dict[str, object]]) -> None:
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


def keep_state(home: Path) -> None:
    """Keep the state in one step, never a part of it, and remove states of other sources."""
    for old in home.glob("golden-*"):
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory(dir=home) as unfinished:
        for part in PARTS:
            os.rename(RUN / part, Path(unfinished, part))
        shutil.copytree(unfinished, f"{unfinished}.whole")
        os.rename(f"{unfinished}.whole", state_folder(home))

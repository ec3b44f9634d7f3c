"""A submitter without other rights runs the cluster commands of README and first-cluster-job.md."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch import contract
from jaxlaunch.launcher.errors import ClusterError
from tests import tutorials
from tests.cluster import preparations
from tests.cluster.access import Access
from tests.cluster.gangs import PATIENCE_S, wait_for
from tests.cluster.releases import Release, chart_values
from tests.compiled import QUICK_COMPILES
from tests.helm.charts import Helm

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]


@pytest.fixture
def submitter(
    helm: Helm, cluster: Access, namespace: str, image: str, tmp_path: Path
) -> Iterator[Access]:
    """Return a user with the chart's rights; its cluster defaults complete the job."""
    user, release = f"alice-{namespace}", Release(helm, cluster, namespace)
    storage = {"checkpoints": {"size": "1Gi", "storageClass": ""}}
    people = {"submitters": [{"kind": "User", "name": user}]}
    plain: dict[str, Any] = {
        "kueue": {"enabled": False},
        "resourceDefaults": {},
        "storage": storage,
    }
    release.install(chart_values(cluster, image, rbac=people, **plain))
    yield preparations.impersonate(cluster, user, namespace, tmp_path)
    release.uninstall()


def shell_env(user: Access) -> dict[str, str]:
    """Return the environment of a shell that finds `launcher` and the cluster."""
    return user.env | {"PATH": f"{sys.prefix}/bin{os.pathsep}{user.env['PATH']}"}


@pytest.mark.usefixtures("steady_nodes")
def test_cluster_commands_of_the_readme_work(
    cluster: Access, namespace: str, submitter: Access, tmp_path: Path
) -> None:
    checkpoints = preparations.make_volume(cluster, namespace, "team-checkpoints")
    block = re.search(
        r"^```sh cluster\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert block is not None
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with (tmp_path / "examples" / "digits.yaml").open("a") as job:
        job.write(yaml.safe_dump({"env": QUICK_COMPILES}))
    done = subprocess.run(
        ["bash", "-c", "set -ex\n" + block[1]],
        cwd=tmp_path,
        env=shell_env(submitter),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(
        r"^\[0\] step \d+/\d+  eval .* accuracy 0\.9[7-9]\d*  examples 360$",
        done.stdout,
        re.MULTILINE,
    )
    assert "done (0): every process finished" in done.stdout
    assert "digits is done: all of 2 hosts" in done.stdout
    assert "jobset.jobset.x-k8s.io/digits deleted" in done.stdout
    assert list((checkpoints / "digits").iterdir())


# --- docs/first-cluster-job.md --------------------------------------------------------------------

SMALL: dict[str, Any] = {
    "accelerator": {"type": "cpu", "per_host": 2},
    "resources": {"cpu": "50m", "memory": "2Gi"},
    "grace": "20s",
    "env": QUICK_COMPILES,
}
SMALL_MODEL = {"kind": "decoder", "layers": 1, "width": 32, "heads": 2, "vocab": 256, "length": 64}
LOOKS = ("launcher status", "launcher explain")  # they show what the leader wrote some seconds ago
STAYS = (" --follow", " -f ")


def adapt_to_cpus(text: str) -> str:
    """Return the page's job on CPU devices with a small model, without image and volume."""
    job = {
        key: value
        for key, value in yaml.safe_load(text).items()
        if key not in ("image", "volumes", "node_selector")
    }
    endless = {
        "model": SMALL_MODEL,
        "batch": 16,
        "steps": 1_000_000,
        "eval": {"every": None, "batches": 1},
    }
    return yaml.safe_dump(job | SMALL | {"train": job["train"] | endless})


class Terminal:
    """A terminal for the commands of one step of a page."""

    def __init__(self, step: tutorials.Step, home: Path, env: dict[str, str]) -> None:
        self.step, self.stays = step, any(word in step.text for word in STAYS)
        with tempfile.NamedTemporaryFile("w", dir=home, delete=False) as output:
            command = ["bash", "-euc", step.text]
            self.shell = subprocess.Popen(
                command, cwd=home, env=env, stdout=output, stderr=subprocess.STDOUT
            )
        self.output = Path(output.name)

    def ends(self) -> int:
        """Return the exit code, or None."""
        return self.shell.wait(PATIENCE_S)

    def shows_it(self) -> bool:
        """Check that it has shown what the page shows."""
        return not list(tutorials.missing_lines(self.step.output, self.output.read_text()))


def type_step(
    step: tutorials.Step, home: Path, env: dict[str, str], terminals: list[Terminal]
) -> None:
    """Type a step in another terminal until that shows what the page shows."""
    terminals.append(Terminal(step, home, env))

    def is_there() -> bool:
        last = terminals[-1]
        code = last.shell.poll() if last.stays else last.ends()
        if last.shows_it() and (last.stays or code == 0):
            return True
        if code is not None:
            assert step.text.startswith(LOOKS), (
                f"{step.text}exit {code}\n{last.output.read_text()[-4000:]}"
            )
            terminals.append(Terminal(step, home, env))
        return False

    wait_for(step.text, is_there)


@pytest.mark.usefixtures("steady_nodes")
def test_first_cluster_job_prints_what_its_page_shows(
    cluster: Access, namespace: str, submitter: Access, tmp_path: Path
) -> None:
    checkpoints = preparations.make_volume(cluster, namespace, "team-checkpoints")
    file, *commands = tutorials.find_steps(
        (ROOT / "docs" / "first-cluster-job.md").read_text(), "bash"
    )
    (tmp_path / str(file.file)).write_text(adapt_to_cpus(file.text))
    terminals: list[Terminal] = []
    try:
        for step in commands:
            type_step(step, tmp_path, shell_env(submitter), terminals)
            if step.text.startswith("launcher stop"):
                assert [
                    terminal.ends() for terminal in terminals if "--wait" in terminal.step.text
                ] == [contract.PREEMPTED]
        # The last step deletes the job whose lines are followed.
        assert [terminal.ends() for terminal in terminals if "logs" in terminal.step.text] == [
            ClusterError.exit_code
        ]
    finally:
        for terminal in terminals:
            terminal.shell.kill()
    assert [step.text.split()[1] for step in commands] == [
        *("doctor", "submit", "status", "explain", "logs", "profile", "stop", "submit", "delete")
    ]
    assert list((checkpoints / "first-gpu").iterdir())

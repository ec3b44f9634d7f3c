"""Access to the tests' cluster: the harness's own or one that the user names."""

import os
import subprocess
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.cluster.harness.api import Api


@dataclass(frozen=True)
class Access:
    kubeconfig: Path
    kubectl_path: Path
    is_ours: bool  # of this harness: its real node is this machine, and kwok plays fake ones

    @cached_property
    def api(self) -> Api:
        return Api(self.kubeconfig)

    @property
    def env(self) -> dict[str, str]:
        """Return variables with which a program finds the cluster and kubectl."""
        path = f"{self.kubectl_path.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return os.environ | {"KUBECONFIG": os.fspath(self.kubeconfig), "PATH": path}

    def kubectl(self, *words: str, text: str | None = None) -> str:
        """Run kubectl and return its output. Raises AssertionError with its error."""
        done = subprocess.run(
            [self.kubectl_path, *words], input=text, capture_output=True, text=True, env=self.env
        )
        assert done.returncode == 0, f"kubectl {' '.join(words)}: {done.stderr.strip()}"
        return done.stdout

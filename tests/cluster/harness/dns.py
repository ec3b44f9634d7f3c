"""CoreDNS on the bridge, the pods' name server. It knows only the cluster's names."""

from pathlib import Path

from tests.cluster.harness import process
from tests.cluster.harness.control import is_healthy
from tests.cluster.harness.places import DOMAIN, HEALTH, IP, KUBECONFIGS, RUN

# No cache: it would keep answering that a pod has no name after the name was published.
CONFIG = f"""
.:53 {{
  bind {IP}
  errors
  ready 127.0.0.1:{HEALTH["coredns"]}
  kubernetes {DOMAIN} {{
    kubeconfig {KUBECONFIGS}/coredns.conf test
    pods insecure
    ttl 1
  }}
}}
"""


def start(home: Path) -> None:
    (RUN / "Corefile").write_text(CONFIG)
    process.start("coredns", [home / "coredns", "-conf", RUN / "Corefile"])


def wait_until_settled() -> None:
    process.wait_until_ready(
        "coredns", lambda: is_healthy(f"http://127.0.0.1:{HEALTH['coredns']}/ready")
    )

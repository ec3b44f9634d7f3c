"""The bridge that is the node's address, and the CNI network that puts pods on it."""

import json
import subprocess
from pathlib import Path

from tests.cluster.harness.places import BRIDGE, IP, NETWORK, POD_NETWORK, POD_RANGE, RUN

# A bridge without an address of its own takes the lowest of its ports': with each pod that comes or
# goes it may change, and for most of a minute the others' packets reach nobody.
MAC = "02:6a:61:78:00:01"
PLUGINS = Path("/usr/lib/cni")
CONFIG = RUN / "cni" / "conf"


def run_ip(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["ip", *words], capture_output=True, text=True)


def make_bridge() -> None:
    """Make a bridge; without ports it shows no carrier, but its address works."""
    for words in (
        ("link", "add", BRIDGE, "address", MAC, "type", "bridge"),
        ("address", "add", f"{IP}/{POD_NETWORK.partition('/')[2]}", "dev", BRIDGE),
        ("link", "set", BRIDGE, "up"),
    ):
        done = run_ip(*words)
        if done.returncode:
            raise RuntimeError(
                f"ip {' '.join(words)}: {done.stderr.strip()} (a bridge needs root and "
                "CAP_NET_ADMIN)"
            )


def remove_bridge() -> None:
    run_ip("link", "delete", BRIDGE)


def write_config() -> None:
    CONFIG.mkdir(parents=True)
    pods = {
        "subnet": POD_NETWORK,
        "rangeStart": POD_RANGE[0],
        "rangeEnd": POD_RANGE[1],
        "gateway": IP,
    }
    routes = [{"dst": "0.0.0.0/0"}]
    addresses = {
        "type": "host-local",
        "dataDir": f"{RUN}/cni/addresses",
        "ranges": [[pods]],
        "routes": routes,
    }
    bridge = {
        "type": "bridge",
        "bridge": BRIDGE,
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
    }
    network = {"cniVersion": "0.4.0", "name": NETWORK, "plugins": [bridge | {"ipam": addresses}]}
    (CONFIG / "10-test.conflist").write_text(json.dumps(network, indent=1))

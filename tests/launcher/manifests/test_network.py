"""Variables of the communication libraries, and how a job overrides them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from jaxlaunch.launcher.job import defaults, load
from jaxlaunch.launcher.kubernetes.objects import pod_template
from jaxlaunch.launcher.manifests.jobset import render, resolve
from jaxlaunch.launcher.platforms import eks, gke

PAGE = Path(__file__).parents[3] / "docs" / "kubernetes.md"
H100 = "name: x\nimage: i\ncommand: [a]\naccelerator: {type: h100}\n"
H200 = H100.replace("h100", "h200")
TCPXO = "platform: gke\ntcpxo: {image: i%s}"
GIB = gke.GIB_VARIABLES.value
UNUSED = dict(gke.WITHOUT_PLUGINS.value)


def network_environment(text: str, cluster: str) -> dict[str, str]:
    """The variables of the main container that are about the network, as the manifest has them."""
    spec = pod_template(render(resolve(load.parse_job(text), defaults.parse_defaults(cluster)))[0])[
        "spec"
    ]
    variables = {
        variable["name"]: variable.get("value", "") for variable in spec["containers"][0]["env"]
    }
    return {
        name: value
        for name, value in variables.items()
        if name.startswith(("NCCL_", "FI_", "CUDA_", "LD_PRELOAD"))
    }


@pytest.mark.parametrize(
    ("text", "cluster", "expected"),
    [
        (H100, "platform: gke", UNUSED),
        (H100, "platform: generic", {}),
        (
            H100 + "env: {NCCL_FASTRAK_NUM_FLOWS: '2'}\n",
            "platform: gke",
            {"NCCL_FASTRAK_NUM_FLOWS": "2"},
        ),
        (H100.replace("h100", "gb200"), "platform: gke", UNUSED),
        (H100.replace("h100", "l4"), "platform: gke", {}),
        (H100 + "network: gpudirect-tcpxo\n", TCPXO % "", dict(gke.TCPXO_VARIABLES.value)),
        (
            H100 + "network: gpudirect-tcpxo\n",
            TCPXO % ", env: {NCCL_ALGO: Ring}",
            {"NCCL_ALGO": "Ring"},
        ),
        (H100 + "network: efa\n", "platform: eks", dict(eks.WITHOUT_HUGEPAGES.value)),
        (H100 + "network: efa\nresources: {cpu: 1, hugepages: 1Gi}\n", "platform: eks", {}),
        (H200, "platform: gke", UNUSED),
        (H200, "platform: eks", {}),
        (H200 + "env: {NCCL_NET: gIB}\n", "platform: gke", {"NCCL_NET": "gIB"}),
        (
            H200 + "pod: {spec: {volumes: [{name: gib, hostPath: {path: /usr/local/gib}}]}}\n",
            "platform: gke",
            {},
        ),
        (
            H200.replace("[a]", "[bash, -c, . /usr/local/gib/scripts/set_nccl_env.sh]"),
            "platform: gke",
            {},
        ),
        (
            H200 + "env: {NCCL_NET_PLUGIN: mine}\n",
            "platform: gke",
            UNUSED | {"NCCL_NET_PLUGIN": "mine"},
        ),
    ],
)
def test_network_sets_library_variables(text: str, cluster: str, expected: dict[str, str]) -> None:
    assert network_environment(text, cluster) == expected


def test_documented_networks_of_other_clouds() -> None:
    rows = re.findall(r"^  \|([^|]+)\| `(\{profile: rdma[^`]*\})`", PAGE.read_text(), re.MULTILINE)
    rows.append(
        ("AKS, shared", rows[0][1].replace("rdma/ib, count: 8", "rdma/shared_ib, count: 1"))
    )
    text = H100 + "node_selector: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}\n"
    limits_of_cloud = {}
    for nodes, value in rows:
        if "…" not in value and "RESOURCE" not in value:
            profile = yaml.safe_load(value)
            cluster = f"network: {{h100: {value}}}"
            limits = pod_template(
                render(resolve(load.parse_job(text), defaults.parse_defaults(cluster)))[0]
            )["spec"]["containers"][0]
            limits_of_cloud[nodes.split(",")[0]] = limits["resources"]["limits"][
                profile["resource"]
            ]
            assert network_environment(text, cluster) == profile["env"]
    assert limits_of_cloud == {" AKS": "8", " CoreWeave": "1", "AKS": "1"}


@pytest.mark.parametrize(("kind", "tuner"), [("h200", "a3u"), ("b200", "a4")])
def test_gib_tuner_and_overrides(kind: str, tuner: str) -> None:
    text = H100.replace("h100", kind) + "network: gpudirect-rdma\nenv: {NCCL_IB_TC: '1'}\n"
    of_machine = {"NCCL_TUNER_CONFIG_PATH": f"/usr/local/gib/configs/tuner_config_{tuner}.txtpb"}
    assert network_environment(text, "platform: gke") == {**GIB, **of_machine, "NCCL_IB_TC": "1"}


def test_tcpxo_preloads_its_nccl() -> None:
    # LD_LIBRARY_PATH would not do: JAX loads the NCCL of the image by its path.
    variables = network_environment(H100 + "network: gpudirect-tcpxo\n", TCPXO % "")
    assert variables["LD_PRELOAD"] == "/usr/local/nvidia/lib64/libnccl.so.2"
    assert variables["NCCL_NVLS_ENABLE"] == "1"


def test_secret_overrides_network_variable() -> None:
    text = H200 + "secrets: {NCCL_NET_PLUGIN: {name: s, key: k}}\n"
    spec = pod_template(
        render(resolve(load.parse_job(text), defaults.parse_defaults("platform: gke")))[0]
    )["spec"]
    (variable,) = (
        variable
        for variable in spec["containers"][0]["env"]
        if variable["name"] == "NCCL_NET_PLUGIN"
    )
    assert "valueFrom" in variable

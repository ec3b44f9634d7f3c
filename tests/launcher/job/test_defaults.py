from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import Defaults

ROOT = Path(__file__).parents[3]


def parse_faults(text: str) -> str:
    with pytest.raises(JobFaultsError) as error:
        defaults.parse_defaults(text)
    return str(error.value)


def test_missing_and_empty_file_give_builtin_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert (
        defaults.load_defaults(None).values
        == defaults.load_defaults(tmp_path / "empty.yaml").values
        == Defaults()
    )


def test_configmap_equals_plain_file() -> None:
    plain = "platform: gke\nimage: registry.example/train:1\n"
    wrapped = (
        "kind: ConfigMap\nmetadata: {name: x}\ndata:\n  defaults.yaml: |\n    "
        + plain.replace("\n", "\n    ")
    )
    expected = Defaults(platform="gke", image="registry.example/train:1")
    assert (
        defaults.parse_defaults(wrapped).values == defaults.parse_defaults(plain).values == expected
    )


def test_example_defaults_are_valid() -> None:
    assert defaults.load_defaults(ROOT / "k8s" / "defaults.yaml").values.platform == "gke"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "platfrom: gke",
            'defaults.yaml:1: unknown key "platfrom" in defaults. Did you mean "platform"?',
        ),
        ("\nplatform: gce", "defaults.yaml:2: platform = gce is not one of gke, eks, generic."),
        ("user: 0", "defaults.yaml:1: user = 0 is not a whole number above 0."),
        ("checkpoint: {path: /x}", "checkpoint"),
        ("checkpoint: {url: /x}", "checkpoint.url"),
        ("tcpxo: {}", "tcpxo.image is missing."),
        ("tcpxo: {image: i, networks: [a]}", "tcpxo.networks"),
        ("nodes: {h100: {node_selectr: {}}}", 'unknown key "node_selectr" in nodes.h100.'),
        ("nodes: {h1000: {}}", "h1000"),
        ("capacity: {cheap: {}}", "cheap"),
        ("- a", "defaults.yaml: is not a block of keys."),
        ("a: b: c", "is not YAML"),
        ("image: a\nimage: b", 'duplicate key "image"'),
    ],
)
def test_wrong_defaults_are_refused(text: str, message: str) -> None:
    assert message in parse_faults(text)


def test_all_faults_are_reported_at_once() -> None:
    assert parse_faults("platform: gce\nuser: x\n").count("defaults.yaml:") == 2


def test_fault_in_configmap_names_its_entry() -> None:
    text = "kind: ConfigMap\ndata: {p.yaml: 'platform: gce'}\n"
    assert "defaults.yaml, p.yaml:1: platform = gce" in parse_faults(text)


@pytest.mark.parametrize("data", ["{}", "{a: x, b: y}", "{a: {}}", "null"])
def test_configmap_must_have_one_entry(data: str) -> None:
    with pytest.raises(UserError, match="has one entry"):
        defaults.parse_defaults(f"kind: ConfigMap\ndata: {data}\n")


def test_missing_defaults_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing.yaml: no such file"):
        defaults.load_defaults(tmp_path / "missing.yaml")

from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaultsError, UserError
from jaxlaunch.launcher.job import defaults
from jaxlaunch.launcher.job.defaults import Defaults

ROOT = Path(__file__).parents[3]


def faults(text: str) -> str:
    with pytest.raises(JobFaultsError) as error:
        defaults.parse_defaults(text)
    return str(error.value)


def test_no_file_and_an_empty_one_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert (
        defaults.load_defaults(None).values
        == defaults.load_defaults(tmp_path / "empty.yaml").values
        == Defaults()
    )


def test_a_configmap_and_a_plain_file_say_the_same() -> None:
    plain = "platform: gke\nimage: registry.example/train:1\n"
    wrapped = (
        "kind: ConfigMap\nmetadata: {name: x}\ndata:\n  defaults.yaml: |\n    "
        + plain.replace("\n", "\n    ")
    )
    found = Defaults(platform="gke", image="registry.example/train:1")
    assert defaults.parse_defaults(wrapped).values == defaults.parse_defaults(plain).values == found


def test_the_defaults_that_the_repository_shows_are_valid() -> None:
    assert defaults.load_defaults(ROOT / "k8s" / "defaults.yaml").values.platform == "gke"


@pytest.mark.parametrize(
    ("text", "said"),
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
def test_wrong_defaults_are_refused_by_line_and_key(text: str, said: str) -> None:
    assert said in faults(text)


def test_everything_wrong_is_said_at_once() -> None:
    assert faults("platform: gce\nuser: x\n").count("defaults.yaml:") == 2


def test_a_fault_inside_a_configmap_names_its_entry() -> None:
    text = "kind: ConfigMap\ndata: {p.yaml: 'platform: gce'}\n"
    assert "defaults.yaml, p.yaml:1: platform = gce" in faults(text)


@pytest.mark.parametrize("data", ["{}", "{a: x, b: y}", "{a: {}}", "null"])
def test_a_configmap_holds_one_file_of_defaults(data: str) -> None:
    with pytest.raises(UserError, match="has one entry"):
        defaults.parse_defaults(f"kind: ConfigMap\ndata: {data}\n")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing.yaml: no such file"):
        defaults.load_defaults(tmp_path / "missing.yaml")

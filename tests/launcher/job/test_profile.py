from __future__ import annotations

from pathlib import Path

import pytest

from jaxlaunch.launcher.errors import JobFaults, UserError
from jaxlaunch.launcher.job import profile
from jaxlaunch.launcher.job.profile import Profile

ROOT = Path(__file__).parents[3]


def faults(text: str) -> str:
    with pytest.raises(JobFaults) as error:
        profile.parse(text)
    return str(error.value)


def test_no_file_and_an_empty_one_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert profile.load(None).values == profile.load(tmp_path / "empty.yaml").values == Profile()


def test_a_configmap_and_a_plain_file_say_the_same() -> None:
    plain = "platform: gke\nimage: registry.example/train:1\n"
    wrapped = "kind: ConfigMap\nmetadata: {name: x}\ndata:\n  profile.yaml: |\n    " + plain.replace("\n", "\n    ")
    found = Profile(platform="gke", image="registry.example/train:1")
    assert profile.parse(wrapped).values == profile.parse(plain).values == found


def test_the_profile_that_the_repository_shows_is_a_profile() -> None:
    assert profile.load(ROOT / "k8s" / "profile.yaml").values.platform == "gke"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("platfrom: gke", 'profile.yaml:1: unknown key "platfrom" in profile. Did you mean "platform"?'),
        ("\nplatform: gce", "profile.yaml:2: platform = gce is not one of gke, eks, generic."),
        ("user: 0", "profile.yaml:1: user = 0 is not a whole number above 0."),
        ("checkpoint: {path: /x}", "checkpoint"),
        ("checkpoint: {url: /x}", "checkpoint.url"),
        ("tcpxo: {}", "tcpxo.image is missing."),
        ("tcpxo: {image: i, networks: [a]}", "tcpxo.networks"),
        ("nodes: {h100: {node_selectr: {}}}", 'unknown key "node_selectr" in nodes.h100.'),
        ("nodes: {h1000: {}}", "h1000"),
        ("capacity: {cheap: {}}", "cheap"),
        ("- a", "profile.yaml: is not a block of keys."),
        ("a: b: c", "is not YAML"),
        ("image: a\nimage: b", 'duplicate key "image"'),
    ],
)
def test_a_wrong_profile_is_refused_by_line_and_key(text: str, said: str) -> None:
    assert said in faults(text)


def test_everything_wrong_is_said_at_once() -> None:
    assert faults("platform: gce\nuser: x\n").count("profile.yaml:") == 2


def test_a_fault_inside_a_configmap_names_its_entry() -> None:
    text = "kind: ConfigMap\ndata: {p.yaml: 'platform: gce'}\n"
    assert "profile.yaml, p.yaml:1: platform = gce" in faults(text)


@pytest.mark.parametrize("data", ["{}", "{a: x, b: y}", "{a: {}}", "null"])
def test_a_configmap_holds_one_profile(data: str) -> None:
    with pytest.raises(UserError, match="has one entry"):
        profile.parse(f"kind: ConfigMap\ndata: {data}\n")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="missing.yaml: no such file"):
        profile.load(tmp_path / "missing.yaml")

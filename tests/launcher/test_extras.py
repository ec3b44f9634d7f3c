"""The lists of requirements/ hold what each extra asks for, to the last hash: pip installs nothing beside them."""

import importlib.metadata
import re
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
EVERY_IMAGE = PYPROJECT["project"]["dependencies"] + EXTRAS["train"]
ADDED = sorted(set(EXTRAS) - {"train"})
ENTRY = re.compile(r"[\w.-]+==[^\s;]+(?: ; [^\\\n]+)?(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n")


def versions(name: str) -> dict[str, str]:
    """The packages of a list and their versions. Fails where one has no hash, or an open version."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    head, _, body = text.partition("\n")
    assert head.startswith("# ") and "Written by `make lock`" in head
    assert ENTRY.sub("", body) == "", "an entry without a version or a hash"
    pairs = [entry.group().split(maxsplit=1)[0].split("==") for entry in ENTRY.finditer(body)]
    assert len({package for package, _ in pairs}) == len(pairs), (
        "a package with two versions: say here how it is judged"
    )
    return {canonicalize_name(package): version for package, version in pairs}


LISTS = {path.stem: versions(path.stem) for path in sorted((ROOT / "requirements").glob("*.txt"))}


def faults(texts: list[str], pins: dict[str, str]) -> list[str]:
    """Where a list lacks or breaks what these requirements and, all the way down, theirs ask for."""
    found, seen, queue = [], set(), [("jaxlaunch", text) for text in texts]
    while queue:
        asker, text = queue.pop()
        want = Requirement(text)
        name = canonicalize_name(want.name)
        if name == "jaxlaunch":
            queue += [("jaxlaunch", listed) for extra in want.extras for listed in EXTRAS[extra]]
            continue
        if name not in pins or not want.specifier.contains(pins[name], prereleases=True):
            found.append(f"{asker} wants {text}, the list has {pins.get(name)}")
            continue
        for extra in want.extras | {""}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                queue += [
                    (f"{name} {pins[name]}", str(each).split(";")[0].strip())
                    for each in requirements(name)
                    if each.marker is None or each.marker.evaluate({"extra": extra})
                ]
    return found


def requirements(name: str) -> list[Requirement]:
    """What an installed package asks for. Those for accelerators are not installed here: uv alone has read theirs."""
    try:
        return [Requirement(text) for text in importlib.metadata.requires(name) or []]
    except importlib.metadata.PackageNotFoundError:
        assert any(name in LISTS[extra] for extra in ("cuda12", "cuda13", "tpu")), f"{name} is not installed"
        return []


@pytest.mark.parametrize("extra", ADDED)
def test_what_an_extra_asks_for_is_in_its_list_or_in_every_image_s(extra: str) -> None:
    assert faults(EVERY_IMAGE + EXTRAS[extra], LISTS["train"] | LISTS[extra]) == []


def test_every_image_s_list_and_those_of_the_build_stand_alone() -> None:
    assert faults(EVERY_IMAGE, LISTS["train"]) == []
    assert faults(PYPROJECT["build-system"]["requires"], LISTS["build"]) == []
    assert faults(["pip"], LISTS["tools"]) == []


def test_a_version_that_does_not_fit_and_a_package_that_is_lacking_are_found() -> None:
    complete = LISTS["train"] | LISTS["s3"]
    (old,) = faults(EXTRAS["s3"], complete | {"botocore": "1.0"})
    assert old.startswith("aiobotocore ") and old.endswith("the list has 1.0")
    lacking = {name: version for name, version in complete.items() if name != "python-dateutil"}
    assert all("python-dateutil" in fault and fault.endswith("None") for fault in faults(EXTRAS["s3"], lacking) or [""])


def test_each_extra_has_its_list_and_no_package_has_two_versions() -> None:
    assert sorted(LISTS) == sorted([*ADDED, "build", "tools", "train", "uv"])
    for package in set(chain.from_iterable(LISTS.values())):
        assert len({pins[package] for pins in LISTS.values() if package in pins}) == 1, package
    assert [LISTS["train"].keys() & LISTS[extra].keys() for extra in ADDED] == [set()] * len(ADDED)

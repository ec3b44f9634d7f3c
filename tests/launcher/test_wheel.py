"""What pip installs: one top-level name with every source file."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.extended

ROOT = Path(__file__).parents[2]
BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which they change
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


@pytest.fixture(scope="module")
def package_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("wheel") / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("jaxlaunch", "docs"):
        ignored = shutil.ignore_patterns("__pycache__", "assets")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
    shutil.copytree(ROOT / "tests" / "fixtures", source / "tests" / "fixtures")
    if (ROOT / ".git").exists():
        # As in a checkout on a file system without symbolic links: files that hold a path.
        checkout = [
            "git",
            "-c",
            "core.symlinks=false",
            "checkout-index",
            f"--prefix={source}/",
            "launcher",
            "trainer",
        ]
        subprocess.run(checkout, cwd=ROOT, check=True)
        assert (source / "trainer").read_text() == "jaxlaunch/trainer" and not (
            source / "trainer"
        ).is_symlink()
    created = source.parent / "made"
    subprocess.run(
        [sys.executable, "-c", BUILD, str(created)], cwd=source, check=True, capture_output=True
    )
    return created


def test_wheel_installs_one_package_with_every_source(package_folder: Path) -> None:
    wheel = zipfile.ZipFile(next(package_folder.glob("*.whl")))
    names = [
        name for name in wheel.namelist() if ".dist-info/" not in name and ".data/" not in name
    ]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "jaxlaunch").rglob("*.py")}
    assert {name.partition("/")[0] for name in names} == {"jaxlaunch"}
    assert sources <= set(names)
    assert not any(info.external_attr >> 28 == 0o12 for info in wheel.infolist())  # a link
    assert len(names) == len(set(names))
    web = {
        f"jaxlaunch/launcher/report/web/{path.name}"
        for path in (ROOT / "jaxlaunch/launcher/report/web").iterdir()
    }
    assert (
        web <= set(names) and "jaxlaunch/launcher/report/web/uPlot.LICENSE" in web
    )  # what a page is made of
    assert (
        wheel.read("jaxlaunch/trainer/train.py")
        == (ROOT / "jaxlaunch/trainer/train.py").read_bytes()
    )


def test_command_of_the_wheel_runs(package_folder: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(next(package_folder.glob("*.whl"))).extractall(tmp_path)
    program = (
        "import jaxlaunch; print(jaxlaunch.__file__); from jaxlaunch.launcher.entry import "
        "main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[0] == str(tmp_path / "jaxlaunch" / "__init__.py")
    assert done.stdout.splitlines()[1].endswith(metadata.version("jaxlaunch"))


def test_source_distribution_has_no_links(package_folder: Path) -> None:
    with tarfile.open(next(package_folder.glob("*.tar.gz"))) as archive:
        assert not [member.name for member in archive if member.issym() or member.islnk()]
        names = {member.name.partition("/")[2] for member in archive}
    files = {"jaxlaunch/launcher/cli/main.py", "jaxlaunch/trainer/train.py", "pyproject.toml"}
    assert files <= names
    there = {
        name.removeprefix("tests/fixtures/") for name in names if name.endswith(".safetensors")
    }
    assert there == {f"{name}/{name}.safetensors" for name in ("clip", "optimizers", "schedules")}
    assert "tests/fixtures/qwen2_tiny/config.json" in names

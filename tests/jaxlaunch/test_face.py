"""What users import: `jaxlaunch`, its names, and their types."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import jaxlaunch
from jaxlaunch.launcher.agent.host.folders import FALLBACK_FILES
from tests import compiled

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "jaxlaunch" / "__init__.py"
CONSUMER = Path(__file__).with_name("consumer.py")


def list_type_checked_names() -> dict[str, str]:
    """Where the names of `__all__` are imported from for it, as `module:name`."""
    imports = [
        node for node in ast.walk(ast.parse(SOURCE.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    named = [
        (name.asname or name.name, f"{node.module}:{name.name}")
        for node in imports
        for name in node.names
    ]
    return {name: home for name, home in named if name in jaxlaunch.__all__}


def test_exported_members_equal_all() -> None:
    assert jaxlaunch.__all__ == sorted(set(jaxlaunch.__all__)) == dir(jaxlaunch)
    of_its_own = {"load", "report", "run"}
    assert set(jaxlaunch._LAZY_IMPORTS) | of_its_own == set(jaxlaunch.__all__)
    assert list_type_checked_names() == jaxlaunch._LAZY_IMPORTS | {
        "report": "jaxlaunch.reporting:report"
    }
    assert all(getattr(jaxlaunch, name) is not None for name in jaxlaunch.__all__)
    with pytest.raises(AttributeError, match="module 'jaxlaunch' has no attribute 'nothing'"):
        _ = jaxlaunch.nothing  # type: ignore[attr-defined]


def test_missing_trainer_names_package_to_install(tmp_path: Path) -> None:
    """As in an image into which the agent has brought a few files."""
    (tmp_path / "jaxlaunch").mkdir()
    for name in FALLBACK_FILES:
        shutil.copy(SOURCE.parent / name, tmp_path / "jaxlaunch")
    program = """
import sys
sys.path.insert(0, sys.argv[1])
import jaxlaunch
jaxlaunch.report(step=1)
for use in (
    lambda: jaxlaunch.Loss,
    lambda: jaxlaunch.load("lm"),
    lambda: jaxlaunch.run(None, None, steps=1),
):
    try:
        use()
    except ModuleNotFoundError as error:
        print(error)
"""
    command = [sys.executable, "-I", "-S", "-c", program, str(tmp_path)]
    message = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    install = "which is not installed here: install jaxlaunch in this image with the extra train"
    assert message == [
        f"jaxlaunch.Loss needs jaxlaunch.trainer, {install}",
        f"jaxlaunch.load needs jaxlaunch.launcher, {install}",
        f"jaxlaunch.run needs jaxlaunch.trainer, {install}",
    ]


@pytest.mark.extended
def test_typed_user_code_passes_strict_mypy(tmp_path: Path) -> None:
    nodes = list(ast.walk(ast.parse(CONSUMER.read_text())))
    used = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    used |= {name.name for node in nodes if isinstance(node, ast.ImportFrom) for name in node.names}
    assert set(jaxlaunch.__all__) <= used
    home = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
    (site,) = home.glob("lib/python3*/site-packages")
    (site / "jaxlaunch").symlink_to(
        ROOT / "jaxlaunch"
    )  # as it is installed: mypy does not follow an editable finder
    (site / "others.pth").write_text(sysconfig.get_path("purelib"))
    cache = (
        Path(os.environ[compiled.FOLDER_VARIABLE]).parents[1] / "mypy"
    )  # a quarter of a minute without it
    how = [
        "--strict",
        "--config-file=",
        "--cache-dir",
        cache,
        "--python-executable",
        home / "bin" / "python",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *how, CONSUMER],
        cwd=tmp_path,
        text=True,
        stdout=-1,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout

"""`make venv` installs with uv, or with pip where uv is missing or fails."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.extended

SCRIPT = Path(__file__).parents[2] / "requirements" / "install.py"
LISTING = r"""
global.cert='/etc/ca.pem'
global.index-url='https://user:a=b@index.example/simple'
global.extra-index-url='\nhttps://one.example\nhttps://two.example'
install.index-url='https://install.example/simple'
list.index-url='https://list.example/simple'
:env:.find-links='/wheels /more'
:env:.timeout='180'
"""
Install = Callable[..., list[str]]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: ModuleType) -> Install:
    """Return a function that installs with or without uv, and lists its commands."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def program(name: str, code: int) -> None:
        lists = 'case "$*" in *"config list") exit 0;; esac'
        (tmp_path / name).write_text(
            f'#!/bin/sh\n{lists}\necho "{name} $*" >>{tmp_path}/ran\nexit {code}\n'
        )
        (tmp_path / name).chmod(0o755)

    def run(uv_code: int | None) -> list[str]:
        program("python", 0)
        if uv_code is not None:
            program("uv", uv_code)
        assert script.install("there/python", ["--no-deps", "."]) == 0
        return (tmp_path / "ran").read_text().splitlines()

    return run


def test_pip_settings_have_the_precedence_of_pip(script: ModuleType) -> None:
    settings = script.read_settings(LISTING + ":env:.cert='/mine.pem'\n")
    assert settings["index-url"] == "https://install.example/simple"
    assert settings["cert"] == "/mine.pem"


def test_uv_gets_the_index_settings_of_pip(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("UV_", "SSL_"))]:
        monkeypatch.delenv(name)
    variables = script.uv_environment(script.read_settings(LISTING))
    assert variables["UV_DEFAULT_INDEX"] == "https://install.example/simple"
    assert variables["UV_INDEX"] == "https://one.example https://two.example"
    assert variables["UV_FIND_LINKS"] == "/wheels,/more"
    assert variables["SSL_CERT_FILE"] == "/etc/ca.pem"
    assert variables["UV_INDEX_STRATEGY"] == "unsafe-best-match"
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://mine.example")
    assert script.uv_environment({"index-url": "x"})["UV_DEFAULT_INDEX"] == "https://mine.example"


def test_uv_installs_if_available(install: Install) -> None:
    assert install(uv_code=0) == ["uv pip install --quiet --python there/python --no-deps ."]


def test_pip_installs_without_uv(install: Install) -> None:
    assert install(uv_code=None) == [
        "python -m pip --python there/python install --quiet --no-deps ."
    ]


def test_pip_installs_if_uv_fails(install: Install, capfd: pytest.CaptureFixture[str]) -> None:
    assert [line.split()[0] for line in install(uv_code=2)] == ["uv", "python"]
    assert "uv could not install these packages; pip tries" in capfd.readouterr().err

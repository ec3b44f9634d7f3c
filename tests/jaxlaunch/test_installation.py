"""What a message says about a missing extra is the command for the installation that lacks it."""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import installation
from jaxlaunch.launcher.errors import UserError
from jaxlaunch.launcher.local import trainer_process


def _installed(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    origin: dict[str, Any] | None,
    *files: str,
    pip: bool = True,
) -> None:
    """Has jaxlaunch come from `origin` into an environment with these files."""

    class Distribution:
        def read_text(self, name: str) -> str | None:
            assert name == "direct_url.json"
            return None if origin is None else json.dumps(origin)

    (folder / "bin").mkdir(parents=True)
    for name in (*files, *(["bin/pip"] if pip else [])):
        (folder / name).touch(0o755)
    monkeypatch.setattr(importlib.metadata, "distribution", lambda name: Distribution())
    finder = types.SimpleNamespace(find_spec=lambda name: object() if pip else None)
    monkeypatch.setattr(installation, "PathFinder", finder)
    monkeypatch.setattr(sys, "prefix", str(folder))
    monkeypatch.setattr(sys, "executable", str(folder / "bin/python"))
    monkeypatch.setenv("PATH", str(folder / "bin"))


CLONE = {"url": "file:///tmp", "dir_info": {"editable": True}}
WHEEL = {"url": "file:///tmp/jaxlaunch-0.1.0-py3-none-any.whl", "archive_info": {}}
COMMIT = {"url": "https://git.example/jaxlaunch", "vcs_info": {"vcs": "git", "commit_id": "0" * 40}}


@pytest.mark.parametrize(
    ("origin", "files", "pip", "command"),
    [
        (None, (), True, "install it with pip install 'jaxlaunch[train]'"),
        (CLONE, (), True, "install it with pip install -e '/tmp[train]'"),
        (
            {"url": "file:///tmp", "dir_info": {}},
            (),
            True,
            "install it with pip install '/tmp[train]'",
        ),
        (WHEEL, (), True, f"install it with pip install 'jaxlaunch[train] @ {WHEEL['url']}'"),
        (
            COMMIT,
            (),
            True,
            f"pip install 'jaxlaunch[train] @ git+https://git.example/jaxlaunch@{'0' * 40}'",
        ),
        (
            WHEEL,
            (),
            False,
            "install it with uv pip install --python {bin}/python 'jaxlaunch[train] @ ",
        ),
        (None, ("uv-receipt.toml",), False, "install it with uv tool install 'jaxlaunch[train]'"),
        (
            None,
            ("pipx_metadata.json",),
            True,
            "install it with pipx install --force 'jaxlaunch[train]'",
        ),
        (
            {"url": "file:///gone/src", "dir_info": {}},
            (),
            False,
            "build this image again with the extra train of",
        ),
    ],
)
def test_command_belongs_to_this_installation(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    origin: Any,
    files: tuple[str, ...],
    pip: bool,
    command: str,
) -> None:
    _installed(monkeypatch, tmp_path / "env", origin, *files, pip=pip)
    assert command.format(bin=tmp_path / "env/bin") in installation.install_hint("train")


def test_uvx_command_has_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, tmp_path / "archive-v0" / "qRSLExHFlggD5CFb", None, pip=False)
    assert (
        installation.install_hint("train") == "start it with uvx --from 'jaxlaunch[train]' launcher"
    )


def test_pip_of_another_environment_is_not_suggested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _installed(monkeypatch, tmp_path / "env", None)
    monkeypatch.setenv("PATH", "/nowhere")
    assert (
        f"{tmp_path}/env/bin/python -m pip install 'jaxlaunch[train,text]'"
        in installation.install_hint("train", "text")
    )


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("jax.numpy", "train"),
        ("sklearn", "train"),
        ("pyarrow", "text"),
        ("haiku", "haiku"),
        ("of_mine", None),
    ],
)
def test_failed_import_names_its_extra(package: str, extra: str | None) -> None:
    why = installation.missing_extra_message(ModuleNotFoundError(name=package))
    assert why is None if extra is None else (why is not None and extra in why.rpartition(":")[2])
    assert installation.missing_extra_message(ImportError(name=package)) is None


def test_search_for_pip_keeps_imported_distutils(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The finder of setuptools replaces it for pip, with a warning."""
    distutils = types.ModuleType("distutils")
    monkeypatch.setitem(sys.modules, "distutils", distutils)
    assert "install it with" in (
        installation.missing_extra_message(ModuleNotFoundError(name="haiku")) or ""
    )
    assert sys.modules["distutils"] is distutils


def test_command_without_trainer_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trainer_process, "is_installed", lambda: False)
    with pytest.raises(
        UserError, match="launcher eval needs the trainer, which is not installed here"
    ) as raised:
        trainer_process.require_trainer("launcher eval")
    assert raised.value.exit_code == 2 and "install" in str(raised.value)

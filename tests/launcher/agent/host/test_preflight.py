"""Faults of a host before a program starts: TPU device files, and pinned memory."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import pytest

from jaxlaunch.contract import AgentJob
from jaxlaunch.launcher.agent.io import resources

CPU = AgentJob("t")
TPU = AgentJob("t", platform="tpu", accelerator="v5e")
EFA = AgentJob("t", platform="cuda", accelerator="h100", pinning="efa")
MIB = 1024**2


@pytest.fixture
def dev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /dev with the files of a TPU host, of which those with a digit are closed."""
    (tmp_path / "vfio" / "devices").mkdir(parents=True)
    for name in ("vfio/vfio", "vfio/0", "vfio/1", "accelerometer"):
        (tmp_path / name).touch(0o600 if name[-1].isdigit() else 0o666)
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).name.isdigit())
    return tmp_path


def test_closed_device_file_is_named_with_owner_and_key(dev: Path) -> None:
    uid = os.geteuid()
    assert resources.find_fault(TPU, is_pod=True, dev=dev) == (
        f"cannot open {dev}/vfio/0 as uid {uid}: its owner is uid {uid}, its mode 0600; set users: "
        "{v5e: root} in "
        "the cluster defaults, or device_ownership_from_security_context = true in the "
        "configuration of the nodes' "
        "containerd"
    )
    messages = resources.find_fault(TPU, is_pod=False, dev=dev)
    assert messages is not None and messages.endswith(
        f"run as that user, or give uid {uid} the file"
    )


def test_open_device_files_are_no_fault(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.find_fault(AgentJob("t", platform="cuda"), is_pod=True, dev=dev) is None
    monkeypatch.undo()
    for path in (dev / "vfio").iterdir():
        path.chmod(0o777)
    assert resources.find_fault(TPU, is_pod=True, dev=dev) is None
    assert resources.find_fault(TPU, is_pod=True, dev=dev / "vfio" / "devices") is None


def test_closed_device_folder_is_named(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "access", lambda path, how: Path(path) != dev / "vfio"
    )  # root reads every folder
    messages = resources.find_fault(TPU, is_pod=True, dev=dev)
    assert messages is not None and messages.startswith(f"cannot open {dev}/vfio as uid")


@pytest.mark.parametrize(
    ("limit", "has_capability", "messages"),
    [
        (64 * 1024, False, "this pod may pin 64 KiB"),
        (8 * MIB, False, "this pod may pin 8 MiB"),
        (8 * MIB, True, None),
        (64 * MIB + 1, False, None),
        (resource.RLIM_INFINITY, False, None),
    ],
)
def test_small_pinning_limit_is_reported_for_fast_networks(
    limit: int, has_capability: bool, messages: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: raised.append(pair))
    monkeypatch.setattr(resources, "_has_capability", lambda number: has_capability)
    assert resources.find_fault(CPU, is_pod=True) is None and not raised
    assert resources.find_fault(TPU, is_pod=True, dev=Path("/nowhere")) is None
    result = resources.find_fault(EFA, is_pod=True)
    assert raised == 2 * [(limit, limit)]
    if messages is None:
        assert result is None
    else:
        assert result is not None and messages in result
        assert result.startswith("network = efa needs memory") and "LimitMEMLOCK=infinity" in result
        assert "users: {h100: root}" in result

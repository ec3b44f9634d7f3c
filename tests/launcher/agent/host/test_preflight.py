"""What the agent says of its host before a program starts: TPU device files, and memory for a fast network."""

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
    """A /dev with the files of a TPU host, of which those with a digit are closed to us whoever we are."""
    (tmp_path / "vfio" / "devices").mkdir(parents=True)
    for name in ("vfio/vfio", "vfio/0", "vfio/1", "accelerometer"):
        (tmp_path / name).touch(0o600 if name[-1].isdigit() else 0o666)
    monkeypatch.setattr(os, "access", lambda path, mode: not Path(path).name.isdigit())
    return tmp_path


def test_a_closed_device_file_is_named_with_its_owner_and_the_key(dev: Path) -> None:
    uid = os.geteuid()
    assert resources.find_fault(TPU, is_pod=True, dev=dev) == (
        f"cannot open {dev}/vfio/0 as uid {uid}: its owner is uid {uid}, its mode 0600; set users: "
        "{v5e: root} in "
        "the cluster defaults, or device_ownership_from_security_context = true in the "
        "configuration of the nodes' "
        "containerd"
    )
    said = resources.find_fault(TPU, is_pod=False, dev=dev)
    assert said is not None and said.endswith(f"run as that user, or give uid {uid} the file")


def test_open_device_files_and_other_jobs_are_no_fault(
    dev: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resources.find_fault(AgentJob("t", platform="cuda"), is_pod=True, dev=dev) is None
    monkeypatch.undo()
    for path in (dev / "vfio").iterdir():
        path.chmod(0o777)
    assert resources.find_fault(TPU, is_pod=True, dev=dev) is None
    assert resources.find_fault(TPU, is_pod=True, dev=dev / "vfio" / "devices") is None


def test_a_closed_folder_of_devices_is_named(dev: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "access", lambda path, how: Path(path) != dev / "vfio"
    )  # root reads every folder
    said = resources.find_fault(TPU, is_pod=True, dev=dev)
    assert said is not None and said.startswith(f"cannot open {dev}/vfio as uid")


@pytest.mark.parametrize(
    ("limit", "has_capability", "said"),
    [
        (64 * 1024, False, "this pod may pin 64 KiB"),
        (8 * MIB, False, "this pod may pin 8 MiB"),
        (8 * MIB, True, None),
        (64 * MIB + 1, False, None),
        (resource.RLIM_INFINITY, False, None),
    ],
)
def test_a_small_limit_on_pinned_memory_is_told_of_a_network_that_needs_it(
    limit: int, has_capability: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, limit))
    monkeypatch.setattr(resource, "setrlimit", lambda which, both: raised.append(both))
    monkeypatch.setattr(resources, "_has_capability", lambda number: has_capability)
    assert resources.find_fault(CPU, is_pod=True) is None and not raised
    assert resources.find_fault(TPU, is_pod=True, dev=Path("/nowhere")) is None
    found = resources.find_fault(EFA, is_pod=True)
    assert raised == 2 * [(limit, limit)]
    if said is None:
        assert found is None
    else:
        assert found is not None and said in found
        assert found.startswith("network = efa needs memory") and "LimitMEMLOCK=infinity" in found
        assert "users: {h100: root}" in found

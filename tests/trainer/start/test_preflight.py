"""Checks before the first compilation, their messages, and their exit codes."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from etils import epath

from jaxlaunch import contract
from jaxlaunch.contract import AgentJob
from jaxlaunch.trainer.checkpoint import consensus, storage
from jaxlaunch.trainer.errors import DataError, SpecError, StorageError, TrainerError
from jaxlaunch.trainer.spec import LM, TrainSpec
from jaxlaunch.trainer.start import preflight
from jaxlaunch.trainer.start.process import exit_code

DISK_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
PATH_ERRNOS = (errno.EACCES, errno.EROFS, errno.ENOTDIR)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        *((number, contract.STORAGE) for number in (*DISK_ERRNOS, errno.ETIMEDOUT)),
        *((number, contract.BAD_SPEC) for number in PATH_ERRNOS),
    ],
)
@pytest.mark.parametrize("call", ["mkdir", "write_text", "unlink"])
def test_wrong_path_is_spec_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, code: int
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr(type(epath.Path(tmp_path)), call, fail)
    with pytest.raises(TrainerError, match=os.strerror(number)) as caught:
        storage.check_writable(str(tmp_path / "checkpoints"))
    assert caught.value.code == code


@pytest.mark.parametrize("known_by", ["the agent", "its steps"])
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_folder_refused_after_saves_is_retried_storage_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
    known_by: str,
) -> None:
    if known_by == "the agent":
        monkeypatch.setenv(contract.SAVED, "0")
    else:
        (tmp_path / "10").mkdir()
        (tmp_path / "10" / contract.MANIFEST).touch()
    monkeypatch.setenv(contract.STORAGE_WAIT, "60")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    real, refusals = type(epath.Path(tmp_path)).write_text, [number, errno.EIO]

    def refuse(*args: Any, **keys: Any) -> Any:
        if refusals:
            raise OSError(number := refusals.pop(0), os.strerror(number))
        return real(*args, **keys)

    monkeypatch.setattr(type(epath.Path(tmp_path)), "write_text", refuse)
    storage.check_writable(str(tmp_path))
    assert capsys.readouterr().out.count(f"cannot be written: [Errno {number}]") == 2
    refusals.append(number)
    monkeypatch.setenv(contract.STORAGE_WAIT, "0")
    with pytest.raises(StorageError, match="cannot be written"):
        storage.check_writable(str(tmp_path))


@pytest.mark.parametrize("path", ["file", "file/below", "x" * 300])
def test_file_in_place_of_folder_is_spec_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match="cannot be written"):
        storage.check_writable(str(tmp_path / path))


@pytest.mark.parametrize("number", DISK_ERRNOS)
@pytest.mark.parametrize("has_stepped", [False, True])
def test_disk_failure_is_storage_error(number: int, has_stepped: bool) -> None:
    error = OSError(number, os.strerror(number))
    assert exit_code(error, has_stepped=has_stepped) == contract.STORAGE


def test_program_error_is_no_storage_error() -> None:
    assert exit_code(FileNotFoundError(errno.ENOENT, "gone"), has_stepped=False) == contract.STARTUP


def meta(**train: Any) -> dict[str, Any]:
    """Return the record of such a train block in a checkpoint."""
    spec = TrainSpec(task=LM, **train)
    return spec.model_dump(mode="json", include={"model", "optimizer", "precision"})


def environ(platform: str, devices: int, processes: int = 1, **more: str) -> dict[str, str]:
    """Return the environment of one process of such a job."""
    job = AgentJob(
        "t", platform=platform, devices_per_process=devices, processes_per_host=processes
    )
    return {contract.JOB: job.to_json(), **more}


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
def test_job_of_accelerators_is_refused_on_cpu(platform: str) -> None:
    words = r"asks for 8 .*, this machine \(.*\) has 8 CPU devices: .*--simulate"
    with pytest.raises(SpecError, match=words) as raised:
        preflight.check_devices(environ(platform, 8))
    assert {"cuda": "the extra cuda13 of", "tpu": "the extra tpu of"}[platform] in str(raised.value)


def test_device_count_is_checked_per_process() -> None:
    preflight.check_devices(environ("cpu", 8))
    words = r"asks for 4 CPU devices in each process, this process \(.*\) has 8 CPU dev"
    with pytest.raises(SpecError, match=words):
        preflight.check_devices(environ("cpu", 4, processes=2))


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        (
            "nowhere.invalid",
            r"nowhere\.invalid, does not resolve \(.*\), and JAX connects CPU devices at "
            r"its address",
        ),
        (
            "192.0.2.1",
            r"192\.0\.2\.1, resolves to 192\.0\.2\.1, which is not an address of this "
            r"host, and JAX",
        ),
        ("localhost", None),
    ],
)
def test_unusable_host_name_is_refused_first(
    name: str, fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    preflight.check_name({})
    preflight.check_name(environ("cuda", 8))
    preflight.check_name(environ("cpu", 8, **{contract.COORDINATOR: "127.0.0.1:1234"}))
    with pytest.raises(SpecError, match=fault) if fault else contextlib.nullcontext():
        preflight.check_name(environ("cpu", 8, **{contract.COORDINATOR: "host-0.gang:1234"}))


def test_devices_are_unchecked_without_agent() -> None:
    preflight.check_devices({})
    preflight.check_driver({})


@pytest.mark.parametrize(
    ("driver", "processes", "fits"),
    [(0, 1, False), (7, 1, False), (8, 1, True), (None, 1, True), (8, 2, False), (16, 2, True)],
)
def test_driver_with_too_few_gpus_is_refused(
    driver: int | None, processes: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_count_gpus", lambda: driver)
    split = {contract.LOCAL_DEVICE_IDS: "0,1,2,3,4,5,6,7"} if processes > 1 else {}
    check = functools.partial(preflight.check_driver, environ("cuda", 8, processes, **split))
    if fits:
        check()
    else:
        with pytest.raises(SpecError, match=f"asks for 8 GPUs.* has {driver} GPU"):
            check()
    preflight.check_driver(environ("cpu", 8, processes))


OPEN_MODULE = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15  Release Build  "
    "(b@h)  Tue\nGCC: 12.2.0\n"
)
CLOSED_MODULE = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.82.01  Wed Oct 27 21:21:55 UTC 2021\n"
)


@pytest.mark.parametrize(
    ("module", "supported", "installed", "message"),
    [
        (
            OPEN_MODULE,
            12040,
            [13],
            r"driver 550\.54\.15 .*too old for CUDA 13.* CUDA 12\.4 .* 580 .*cuda12 of "
            r"jaxlaunch, or update",
        ),
        (
            CLOSED_MODULE,
            11040,
            [12],
            r"driver 470\.82\.01 .*too old for CUDA 12.* CUDA 11\.4 .* 525 or newer; update",
        ),
        ("", 12040, [13], "the driver on this machine"),
        # CUDA's forward compatibility package comes before the node's own library.
        (OPEN_MODULE, 13000, [13], None),
        (OPEN_MODULE, 12040, [12, 13], None),
        (OPEN_MODULE, 12040, [], None),
    ],
)
def test_driver_too_old_for_cuda_is_refused(
    module: str,
    supported: int,
    installed: list[int],
    message: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "version").write_text(module)
    monkeypatch.setattr(preflight, "DRIVER_VERSION_FILE", tmp_path / "version")
    monkeypatch.setattr(preflight, "_installed_cuda", lambda: installed)
    monkeypatch.setattr(preflight, "_load_libcuda", lambda: Libcuda(supported, gpus=8))
    with pytest.raises(SpecError, match=message) if message else contextlib.nullcontext():
        preflight.check_driver(environ("cuda", 8))
    preflight.check_driver(environ("cpu", 8))


class Libcuda:
    """The driver's library, as the preflight calls it."""

    def __init__(self, version: int, gpus: int) -> None:
        self.cuInit = lambda flags: 0
        self.cuDriverGetVersion = functools.partial(self.set_number, version)
        self.cuDeviceGetCount = functools.partial(self.set_number, gpus)

    def set_number(self, value: int, number: Any) -> int:
        number._obj.value = value
        return 0


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"dp": 3}, "train.mesh: dp 3 × fsdp 1 × mp 1 asks for 3 devices, there are 8"),
        (
            {"dp": -1, "mp": 3},
            "dp -1 × fsdp 1 × mp 3 asks for a multiple of 3 devices, there are 8",
        ),
    ],
)
def test_mesh_for_other_devices_is_refused(mesh: dict[str, int], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        preflight.check_mesh(TrainSpec(task=LM, mesh=mesh))


ADAMW, SGD = {"name": "adamw"}, {"name": "sgd", "momentum": 0.9}
SMALL = {"kind": "decoder", "layers": 2, "width": 64}


@pytest.mark.parametrize(
    ("then", "now", "changes"),
    [
        ({"optimizer": ADAMW}, {"optimizer": SGD}, "was trained with adamw, the job says sgd"),
        ({"optimizer": SGD}, {"optimizer": {"name": "sgd"}}, "optimizer.momentum: 0.9, null"),
        ({}, {"optimizer": {"ema": 0.9}}, "optimizer.ema: null, 0.9"),
        ({"optimizer": {"lr": 1.0}}, {"optimizer": {"lr": 2.0}}, ""),
        ({"model": SMALL}, {"model": SMALL | {"layers": 3}}, "model.layers: 2, 3"),
        ({"model": SMALL}, {"model": SMALL | {"tied": True}}, "model.tied: false, true"),
        ({"model": SMALL}, {"model": {"kind": "gpt2"}}, "model.kind: decoder, gpt2"),
        ({"model": SMALL}, {"model": SMALL | {"init_from": "/hf"}}, ""),
        ({}, {"precision": "fp16"}, "precision: fp32, fp16"),
    ],
)
def test_changed_state_is_described_by_keys(
    then: dict[str, Any], now: dict[str, Any], changes: str
) -> None:
    key, is_key, values = changes.partition(": ")
    if is_key:
        old, new = values.split(", ")
        changes = f"train.{key} was {old}, the job says {new}"
    assert preflight.describe_changes(meta(**then), meta(**now)) == changes


def test_unrecorded_keys_are_not_compared() -> None:
    assert preflight.describe_changes({"data": "x"}, meta()) == ""


@pytest.mark.parametrize(
    ("length", "words"),
    [
        (
            {"epochs": 2},
            "train.epochs = 2 is 23 steps; step 57 is already saved in /ckpt. Raise "
            "train.epochs, or",
        ),
        (
            {"steps": 23},
            "train.steps = 23; step 57 is already saved in /ckpt. Raise train.steps, or",
        ),
    ],
)
def test_run_shorter_than_checkpoint_is_refused(length: dict[str, int], words: str) -> None:
    with pytest.raises(SpecError) as raised:
        preflight.check_length(TrainSpec(task=LM, **length), 23, 57, "/ckpt")
    assert words in str(raised.value)
    preflight.check_length(TrainSpec(task=LM, **length), 57, 57, "/ckpt")


def test_hosts_with_different_data_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    consensus.check_same_data({"train": "text a"})  # alone
    reports: list[list[str]] = []

    def gather(mine: list[str]) -> list[list[str]]:
        reports.append(mine)
        return [mine, mine]

    monkeypatch.setattr(consensus, "gather_values", gather)
    consensus.check_same_data({"train": "text a"})
    monkeypatch.setattr(consensus, "gather_values", lambda mine: [reports[0], mine])
    consensus.check_same_data({"train": "text a"})
    words = r"process 1 on \S+ would read .*text b.*, not .*text a.*the same files"
    with pytest.raises(DataError, match=words):
        consensus.check_same_data({"train": "text b"})

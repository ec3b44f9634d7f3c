"""Where compiled programs are kept, what of it is used again, and what XLA is told of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
from etils import epath
from jax._src import compiler

from jaxlaunch.trainer.start import compile_cache
from jaxlaunch.trainer.start.compile_cache import ProgramCache

DIR, CACHES = "jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches"
KEY, VALUE = "jit_step-0123", b"machine code" * 100


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """JAX's own settings, which a test may change."""
    previous = {key: getattr(jax.config, key) for key in (DIR, CACHES)}
    yield
    for key, value in previous.items():
        jax.config.update(key, value)


@pytest.mark.parametrize(
    ("named", "from_environment", "folder"),
    [
        ("gs://bucket/cache", None, ""),
        ("s3://bucket/cache", None, ""),
        ("auto", "gs://bucket/cache", ""),
        (None, "gs://bucket/cache", ""),
        ("/ckpt/cache", None, "/ckpt/cache/xla_gpu_per_fusion_autotune_cache_dir"),
    ],
)
def test_xla_gets_no_url_for_its_files(
    named: str | None, from_environment: str | None, folder: str
) -> None:
    jax.config.update(DIR, from_environment)
    compile_cache.configure_cache(named)
    assert getattr(jax.config, DIR) == (from_environment or named)
    options = compiler.get_compile_options(1, 1)
    reports = options.executable_build_options.debug_options
    assert reports.xla_gpu_per_fusion_autotune_cache_dir == folder
    assert reports.xla_gpu_kernel_cache_file == ""


def test_configured_folder_stays(tmp_path: Path) -> None:
    jax.config.update(DIR, str(tmp_path))
    compile_cache.install_cache(str(tmp_path / "run"), pytest.fail)
    assert getattr(jax.config, DIR) == str(tmp_path)
    assert not (tmp_path / "run").exists()


def make_cache(local: Path, beside: Path) -> None:
    """Has a process keep one program in both folders."""
    ProgramCache(local, epath.Path(beside), set()).put(KEY, VALUE)
    compile_cache._background.submit(lambda: None).result()  # it is there, too


def test_later_host_copies_entries_of_run(
    tmp_path: Path,
) -> None:
    local, beside, other = (tmp_path / name for name in ("here", "beside", "other"))
    make_cache(local, beside)
    (name,) = (file.name for file in beside.iterdir())
    assert ProgramCache(other, epath.Path(beside), set()).get(KEY) is None, "it was not agreed on"
    assert ProgramCache(other, epath.Path(beside), {name}).get(KEY) == VALUE
    assert ProgramCache(other, None, {name}).get(KEY) == VALUE


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-1], lambda raw: b"", lambda raw: raw[:60] + b"?" + raw[61:]]
)
def test_damaged_entry_is_compiled_again(damage, tmp_path: Path) -> None:
    local, beside = tmp_path / "here", tmp_path / "beside"
    make_cache(local, beside)
    (name,) = (file.name for file in local.iterdir())
    for folder in (local, beside):
        (folder / name).write_bytes(damage((folder / name).read_bytes()))
    programs = ProgramCache(local, epath.Path(beside), {name})
    assert programs.get(KEY) is None
    programs.put(KEY, VALUE)
    assert programs.get(KEY) == VALUE


def test_unwritable_disk_fails_no_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    programs = ProgramCache(tmp_path / "file" / "x", epath.Path(tmp_path / "file" / "y"), set())
    programs.put(KEY, VALUE)
    assert programs.get(KEY) is None


def test_folder_writable_by_others_is_not_used(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jax.config.update(DIR, None)
    (tmp_path / "jaxlaunch" / "programs").mkdir(parents=True)
    (tmp_path / "jaxlaunch" / "programs").chmod(0o777)
    notes: list[str] = []
    compile_cache.install_cache(None, notes.append)
    assert notes == [
        f"train.compile_cache = auto: {tmp_path}/jaxlaunch/programs can be written by other users; "
        "each start compiles its programs again"
    ]
    assert getattr(jax.config, DIR) is None


def test_recently_used_entries_survive_sweep(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(compile_cache, "MAX_BYTES", 250)
    for number in range(4):
        file = tmp_path / f"kind{number % 2}" / str(number)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(bytes(100))
        os.utime(file, (number, number))
    os.utime(tmp_path / "kind0" / "0", (9, 9))
    compile_cache.sweep_folders(tmp_path, None)
    assert sorted(file.name for file in tmp_path.glob("*/*")) == ["0", "3"]


def test_environment_digest_depends_on_processor_and_version(monkeypatch) -> None:
    names = [compile_cache._environment_digest()]
    with monkeypatch.context() as other:
        other.setattr(compile_cache, "_processor_features", lambda: "flags: avx512f")
        names.append(compile_cache._environment_digest())
    monkeypatch.setattr(jax, "__version__", "0.11.0")
    names.append(compile_cache._environment_digest())
    assert len(set(names)) == 3

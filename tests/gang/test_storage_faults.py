"""What a run does when its storage fails, or is deleted: a few cases of tests/storage_faults."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gang.runs import Result, Running
from tests.storage_faults import (
    BUCKET,
    CASES,
    DISK,
    MOMENTS,
    Case,
    Disk,
    compile_shim,
    expected_codes,
    find_faults,
    make_document,
    run_case,
)

COVERED_CASES = (
    Case("EROFS", "save", for_ever=False),
    Case("403", "restore", for_ever=False, scheme="s3://"),
    Case("403", "eval", for_ever=False, scheme="gs://"),
    Case("EROFS", "start", for_ever=True),
    Case("ENOSPC", "save", for_ever=True),
)


def has_compiler() -> bool:
    return bool(shutil.which("cc") or shutil.which("gcc"))


@pytest.fixture(scope="module")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shim(tmp_path_factory.mktemp("shim")) if has_compiler() else Path()


@pytest.fixture(scope="module")
def results(
    shim_library: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Mapping[Case, Result]]:
    """Run the cases that this machine supports, two at a time, since they mostly wait."""
    cases = [case for case in COVERED_CASES if has_compiler() or case.kind in BUCKET]
    folder = tmp_path_factory.mktemp("runs")
    with ThreadPoolExecutor(2) as threads:
        results = threads.map(
            lambda case: run_case(case, folder / str(CASES.index(case)), shim_library), cases
        )
        yield dict(zip(cases, results, strict=True))


def test_table_of_the_page_has_every_case() -> None:
    assert expected_codes().keys() == {
        (kind, for_ever) for kind in (*DISK, *BUCKET) for for_ever in (False, True)
    }
    assert all(len(codes) == len(MOMENTS) for codes in expected_codes().values())


@pytest.mark.extended
@pytest.mark.parametrize("case", COVERED_CASES, ids=str)
def test_storage_fault_ends_a_run_as_the_page_says(
    case: Case, results: Mapping[Case, Result]
) -> None:
    if case not in results:
        pytest.skip("there is no C compiler")
    result = results[case]
    assert [*find_faults(case, result)] == [], result.stdout[-3000:] + result.stderr[-3000:]
    if case.for_ever and case.moment == "save":
        assert "failed at step 2" in result.stderr
        assert ": saving step 20 in " in result.verdict["message"]


def test_deleted_checkpoints_are_saved_again_with_a_note(tmp_path: Path) -> None:
    storage = Disk(tmp_path, Path())
    files = {f"{split}_FILE".upper(): path for split, path in storage.data.items()}
    with Running(tmp_path, make_document(storage, for_ever=False), env=files) as running:
        running.wait_until("a saved step", lambda: storage.has("10/jaxlaunch.manifest.json"))
        shutil.rmtree(storage.checkpoints)
        result = running.wait()
    assert result.code == 0 and result.summary["restarts"] == {}
    (note,) = result.summary["notes"]
    assert note.startswith(f"step 10 is gone from {storage.checkpoints}") and note in result.stdout
    assert storage.has("20/jaxlaunch.manifest.json") and storage.has("40/jaxlaunch.manifest.json")

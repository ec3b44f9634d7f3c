"""Storage that fails at each moment of a run: `python -m tests.storage_faults [WORD …]`.

Fifteen faults, of a disk (tests/fixtures/storage/faulty.c, which needs a C compiler) and of a
bucket on `s3://` and on `gs://` (tests/bucket_server), each for five seconds and for ever, at four
moments. Every run has to end as the table of docs/checkpoints.md says. Prints a line for each, and
the table of what was seen; WORDs choose among them: `EIO save`, `gs://`.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.bucket_server import Bucket
from tests.gang.runs import Result, Running, digits_block, make_job

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
SHIM = Path(__file__).parent / "fixtures" / "storage" / "faulty.c"
DISK = ("EIO", "ESTALE", "EROFS", "EACCES", "ENOSPC", "EDQUOT", "slow disk")
BUCKET = ("401", "403", "429", "500", "502", "503", "cut", "slow bucket")
BUCKETS = ("s3://", "gs://")
MOMENTS = ("start", "save", "restore", "eval")
MOMENT_S = 5.0
LENGTHS = {"5 s": (False,), "for ever": (True,), "either": (False, True)}
PARALLEL_RUNS = 3  # runs
TIMES = 5  # of the sentence: as two attempts end, as the new agents begin, and at the end
LONGEST = 400  # characters of the sentence of a job result


@dataclasses.dataclass(frozen=True)
class Case:
    """One run: what fails, from which moment, and whether forever."""

    kind: str
    moment: str
    for_ever: bool
    scheme: str = ""  # of the bucket; empty: a disk

    def __str__(self) -> str:
        length = "for ever" if self.for_ever else f"{MOMENT_S:.0f} s"
        return f"{self.scheme} {self.kind}, {length}, {self.moment}".strip()

    @property
    def name(self) -> str:
        """The name of its folder."""
        return str(self).replace("://", "").replace(" ", "-")

    @property
    def expected(self) -> str:
        """The exit code, by the table of the page."""
        return expected_codes()[self.kind, self.for_ever][MOMENTS.index(self.moment)]


PLACES = [("", kind) for kind in DISK] + [(scheme, kind) for scheme in BUCKETS for kind in BUCKET]
CASES = [
    Case(kind, moment, for_ever, scheme)
    for scheme, kind in PLACES
    for for_ever in (False, True)
    for moment in MOMENTS
]


def expected_codes() -> dict[tuple[str, bool], Sequence[str]]:
    """Return the page's exit codes by kind and length, one for each moment."""
    codes: dict[tuple[str, bool], Sequence[str]] = {}
    kinds: list[str] = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(MOMENTS) and cells[1] in LENGTHS:
            kinds = re.findall(r"`([^`]+)`", cells[0]) or kinds  # an empty cell: as above
            codes |= {
                (kind, for_ever): cells[2:] for kind in kinds for for_ever in LENGTHS[cells[1]]
            }
    return codes


def compile_shim(folder: Path) -> Path:
    """Compile the library that a program is started with."""
    path = folder / "faulty.so"
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler is not None, "no C compiler"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O2", "-w", "-o", path, SHIM, "-ldl"], check=True
    )
    return path


class Disk:
    """Folders on a disk that fails on demand."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self.checkpoints, self._control = str(folder / "checkpoints"), folder / "fault"
        (folder / "data").mkdir(parents=True)
        self.data = {split: str(folder / "data" / split) for split in ("train", "eval")}
        for path in self.data.values():
            Path(path).write_text(path)
        self.environ = {"LD_PRELOAD": str(shim), "STORAGE_FAULT": str(self._control)}

    def fail(self, kind: str, folder: str) -> None:
        """Fail everything below `folder` from now on."""
        draft = self._control.with_suffix(".draft")
        draft.write_text(f"{kind.split()[0]} {folder}")
        draft.rename(self._control)

    def is_hit(self) -> bool:
        """Whether something has failed."""
        return self._control.with_suffix(".hit").exists()

    def mend(self) -> None:
        """Stop failing."""
        self._control.unlink()

    def has(self, name: str) -> bool:
        """Check whether the checkpoints contain such a file."""
        return (Path(self.checkpoints) / name).exists()

    def close(self) -> None:
        """Do nothing: only files remain."""


class Store:
    """The same in a bucket."""

    def __init__(self, folder: Path, scheme: str) -> None:
        self._server, self._team = Bucket(), f"{scheme}team/"
        self.checkpoints = f"{self._team}checkpoints"
        self.data = {split: f"{self._team}data/{split}" for split in ("train", "eval")}
        self._server.objects.update(
            {path.removeprefix(scheme): path.encode() for path in self.data.values()}
        )
        self.environ = self._server.environ() | {"XDG_CACHE_HOME": str(folder / "cache")}

    def fail(self, kind: str, folder: str) -> None:
        self._server.fault = kind.split()[0], folder.removeprefix(self._team)

    def is_hit(self) -> bool:
        return self._server.is_hit.is_set()

    def mend(self) -> None:
        self._server.fault = None

    def has(self, name: str) -> bool:
        return f"team/checkpoints/{name}" in self._server.objects

    def close(self) -> None:
        self._server.close()


def make_document(storage: Disk | Store, for_ever: bool) -> dict[str, Any]:
    """Return a job of 40 steps of 1/12 s that saves every 10 and evaluates every 20."""
    train = digits_block(
        task="reads_files:ReadsFiles",
        batch=4,
        steps=40,
        data={
            "source": "synthetic",
            "examples": 512,
            "eval_examples": 8,
            "shape": [8, 8],
            "threads": 1,
        },
        eval={"every": 20},
        checkpoint={"every": 10, "path": storage.checkpoints},
    )
    restarts = {"in_place": 0, "crash": 1} if for_ever else {"in_place": 3, "crash": 1}
    timeouts = {"restore": "20s"} if for_ever else {}  # of which a half is waited for storage
    return make_job(train, per_host=1) | {
        "restarts": restarts,
        "timeouts": {"save": "1m", **timeouts},
    }


def run_case(case: Case, folder: Path, shim: Path) -> Result:
    """Run a case in `folder`."""
    storage = Store(folder, case.scheme) if case.scheme else Disk(folder, shim)
    files = {f"{split}_FILE".upper(): path for split, path in storage.data.items()}
    keys = (
        make_document(storage, case.for_ever and "slow" not in case.kind),
        storage.environ | files,
    )
    folder_to_fail = storage.data["eval"] if case.moment == "eval" else storage.checkpoints
    try:
        if case.moment == "restore":
            with Running(folder, keys[0], env=keys[1]) as running:
                running.wait_until(
                    "a saved step", lambda: storage.has("10/jaxlaunch.manifest.json")
                )
                running.signal(signal.SIGINT)
                assert running.wait().code == 80
        if case.moment in ("start", "restore"):
            storage.fail(case.kind, folder_to_fail)
        with Running(folder, keys[0], env=keys[1]) as running:
            if case.moment in ("save", "eval"):
                running.wait_until(
                    "a saved step", lambda: storage.has("10/jaxlaunch.manifest.json")
                )
                storage.fail(case.kind, folder_to_fail)
            if not case.for_ever:
                end_fault(running, storage)
            return running.wait()
    finally:
        storage.close()


def end_fault(running: Running, storage: Disk | Store) -> None:
    """Repair the storage some seconds after the first failed call, or at the end of the run."""
    while running.process.poll() is None and not storage.is_hit():
        time.sleep(0.02)
    hit = time.monotonic()
    while running.process.poll() is None and time.monotonic() < hit + MOMENT_S:
        time.sleep(0.02)
    storage.mend()


def find_faults(case: Case, result: Result) -> Iterator[str]:
    """Yield what is wrong with the result of a case."""
    if str(result.code) != case.expected:
        yield f"exit {result.code}, not {case.expected}"
    if "Traceback" in result.stdout + result.stderr:
        yield "a traceback"
    if not (result.folder / "summary.json").exists():
        yield "no summary"
        return
    if result.code and len(result.verdict["message"]) > LONGEST:
        yield f"a sentence of {len(result.verdict['message'])} characters"
    if result.code and result.stderr.count(result.verdict["message"]) > TIMES:
        yield "one sentence again and again"


def main(words: Sequence[str]) -> int:
    """Run the cases that contain all `words`; return 1 if one does not end as it should."""
    cases = [case for case in CASES if all(word in str(case) for word in words)]
    failed = 0
    with tempfile.TemporaryDirectory() as top, ThreadPoolExecutor(PARALLEL_RUNS) as threads:
        library = compile_shim(Path(top))
        results = threads.map(lambda case: run_case(case, Path(top) / case.name, library), cases)
        for case, result in zip(cases, results, strict=True):
            wrong = "; ".join(find_faults(case, result))
            failed += bool(wrong)
            message = result.verdict["message"] if "no summary" not in wrong else ""
            print(
                f"{'WRONG ' if wrong else ''}{case}: {result.code} "
                f"{message}{wrong and f' ({wrong})'}",
                flush=True,
            )
            if wrong and "KEEP" in os.environ:
                (Path(os.environ["KEEP"]) / case.name).write_text(result.stdout + result.stderr)
    print(f"{len(cases)} runs, {failed} wrong")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

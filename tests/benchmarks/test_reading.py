"""The benchmark of reading prepared text, at a small size."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from absl import flags

from benchmarks import prepare, reading
from jaxlaunch.trainer.data.examples import Batch
from jaxlaunch.trainer.spec import TrainSpec
from tests.compiled import QUICK_COMPILES

pytestmark = pytest.mark.extended

SIZES = reading.Sizes(length=64, width=16, batch=4)


def sorted_rows(batches: list[Batch]) -> dict[str, list[bytes]]:
    """Return the rows of each key, sorted."""
    keys = batches[0].keys() - {"weight"}
    return {
        key: sorted(row.tobytes() for batch in batches for row in np.asarray(batch[key]))
        for key in keys
    }


@pytest.fixture
def parsed_flags() -> Iterator[None]:
    """Count absl's flags as parsed, as grain's DataLoader demands."""
    flags.FLAGS.mark_as_parsed()
    yield
    flags.FLAGS.unparse_flags()


@pytest.mark.usefixtures("parsed_flags")
def test_both_sides_read_equal_rows_and_a_run_reports_its_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in QUICK_COMPILES.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(prepare, "VOCAB", 300)
    *read, waited = reading.measure_rows(tmp_path, SIZES, size=20_000, pairs=1, steps=10)
    assert len(read) == len(reading.LOADERS)
    assert all(row.ratio and "1 pairs" in row.detail for row in read)
    assert waited.ratio is not None
    assert 0 <= waited.ratio < 1
    assert "a step of 256 positions" in waited.detail

    job = reading.make_document(tmp_path, tmp_path / "tokenizer", SIZES._replace(batch=1), steps=1)
    spec = TrainSpec.model_validate(job["train"])
    prepared = next((tmp_path / "out").glob("*/index.json")).parent
    shards = sorted(map(str, prepared.glob("train-*.array_record")))
    mine = list(reading.read_with_jaxlaunch(prepared, spec, seed=1))
    grain_batches = list(reading.read_with_grain(shards, spec, 1, reading.LOADERS["no threads"]))
    assert sorted_rows(mine) == sorted_rows(grain_batches)

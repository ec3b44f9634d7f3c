"""The images of the benchmark of recipes: folders by class, every fifth image held out."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

from benchmarks import recipes

pytestmark = pytest.mark.extended


def test_folders_hold_out_every_fifth_image_and_train_on_a_few_of_each_class(
    tmp_path: Path,
) -> None:
    for name, dataset, classes in (
        ("digits", recipes.load_digits(), 10),
        ("shapes", recipes.draw_shapes(400), 4),
    ):
        home = Path(recipes.write_folders(tmp_path / name, itertools.islice(dataset, 400), 6))
        for split in ("train", "val"):
            counts = {
                class_folder.name: len(list(class_folder.iterdir()))
                for class_folder in (home / split).iterdir()
            }
            assert len(counts) == classes
            assert sum(counts.values()) == 80 if split == "val" else set(counts.values()) == {6}
    row = recipes.compare_errors("of two", [0.9, 1.0], [0.9, 0.8])
    assert row.ratio == pytest.approx(1 / 3)
    assert row.holds
    assert "0.9500 ± 0.0500 (2 seeds) right over 0.8500" in row.detail

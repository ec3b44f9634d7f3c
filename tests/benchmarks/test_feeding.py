"""The benchmark of images and rows, at a small size: its sides read as many examples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from absl import flags
from PIL import Image

from benchmarks import feeding, feeding_side

pytestmark = pytest.mark.extended


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Return the options of the sides for six small images and twenty rows."""
    monkeypatch.setattr(feeding, "HEIGHT", 24)
    monkeypatch.setattr(feeding, "WIDTH", 32)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    feeding.write_files(tmp_path, 6, 20)
    with Image.open(tmp_path / "photos" / "cat" / "000000.jpg") as image:
        assert image.size == (32, 24)
    yield {"folder": str(tmp_path), "size": 16, "batch": 2, "table_batch": 5, "workers": 0}
    flags.FLAGS.unparse_flags()


def test_both_sides_read_every_image_and_row(options: dict[str, object]) -> None:
    cpu_before = feeding_side.cpu_seconds()
    for name in ("ours", "grain"):
        _, read = feeding_side.SIDES[name](options)
        assert list(read("images", 1)) == [2, 2, 2] and list(read("rows", 1)) == [5] * 4, name
    assert feeding_side.cpu_seconds() >= cpu_before and feeding_side.resident_bytes() > 1 << 20
    cost = feeding_side.Cost(2.0, 1.0, 6, 1)
    row = feeding.ratio_row("images", [(cost, cost._replace(cpu_seconds=2.0))], 0.8)
    assert row.ratio == 0.5 and row.holds and "6 a second of a core over 3, 2.00 ×" in row.detail
    with pytest.raises(SystemExit, match="not as many examples"):
        feeding.ratio_row("images", [(cost, cost._replace(examples=5))], 0.8)

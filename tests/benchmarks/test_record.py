import sys
from pathlib import Path

import pytest

import benchmarks.__main__ as bench
from benchmarks.table import Row

pytestmark = pytest.mark.extended


def test_recording_keeps_the_sections_of_other_benchmarks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "RESULTS.md"
    results.write_text("# Benchmarks\n\nearlier\n\n## By hand\n\nkept\n\n## And this\n")
    monkeypatch.setattr(bench, "RESULTS", results)
    monkeypatch.setattr(bench, "BENCHMARKS", ("loop",))
    monkeypatch.setattr(bench, "run_benchmark", lambda name: [Row(name, 2.0, 3.0, "once")])
    monkeypatch.setattr(sys, "argv", ["bench", "--record"])
    assert bench.main() == 0
    text = results.read_text()
    assert "| loop | 2.000 | ≤ 3 | yes | once |" in text and "earlier" not in text
    assert text.endswith("\n\n## By hand\n\nkept\n\n## And this\n")

from pathlib import Path

import pytest

from trainer.errors import SpecError
from trainer.task import load


def test_load_finds_what_a_path_names() -> None:
    assert load("trainer.tasks.classify:Classify").__name__ == "Classify"
    assert load("collections:abc.Mapping").__name__ == "Mapping"


def test_a_module_that_is_not_there_is_said() -> None:
    with pytest.raises(SpecError, match="nowhere:Task: importing nowhere failed: ModuleNotFoundError"):
        load("nowhere:Task")


def test_a_module_that_raises_is_said_with_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "halfdone.py").write_text("raise RuntimeError('not today')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SpecError, match="halfdone failed: RuntimeError: not today"):
        load("halfdone:Task")


def test_a_name_that_is_not_there_is_said_beside_those_that_are() -> None:
    with pytest.raises(SpecError, match=r"has no 'Clasify'. It defines Classify, blended, scaled, standardized"):
        load("trainer.tasks.classify:Clasify")

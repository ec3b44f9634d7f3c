"""What docs/techniques.md tells a reader to write is what a train block takes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from jaxlaunch.trainer.spec import TrainSpec

PAGE = Path(__file__).parents[2] / "docs" / "techniques.md"
TASKS = {"data": "classify", "loss": "dpo"}
WRITTEN = [yaml.safe_load(code) for code in re.findall(r"`(\w+: [^`]+)`", PAGE.read_text())]
BLOCKS = [
    block
    for block in WRITTEN
    if isinstance(block, dict) and block.keys() <= TrainSpec.model_fields.keys()
]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_documented_keys_are_accepted(block: dict[str, Any]) -> None:
    task = TASKS.get(next(iter(block)), "lm")
    spec = TrainSpec.model_validate({"task": task} | block)
    assert spec.model_dump(exclude_unset=True, include=set(block)).keys() == block.keys()


def test_page_names_keys() -> None:
    assert len(BLOCKS) >= 15

"""The order of the gang tests' files: the longest first, so that those that run side by side end together."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = [
    HERE / f"test_{name}.py"
    for name in ("meshes", "examples", "loops", "tutorial", "lora", "resume", "tasks", "init")
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the longest files before the others of this folder."""
    turns = {path: turn for turn, path in enumerate(LONGEST, 1)}

    def turn(item: pytest.Item) -> int:
        return turns.get(item.path, len(turns) + 1) if item.path.is_relative_to(HERE) else 0

    items.sort(key=turn)

"""Run the longest test files first, so that those that run side by side end together."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
LONGEST = [
    HERE / f"test_{name}.py"
    for name in ("meshes", "examples", "loops", "tutorial", "lora", "resume", "tasks", "init")
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    positions = {path: position_of for position_of, path in enumerate(LONGEST, 1)}

    def position_of(item: pytest.Item) -> int:
        return positions.get(item.path, len(positions) + 1) if item.path.is_relative_to(HERE) else 0

    items.sort(key=position_of)

"""Packs the agent into one file that any Python >= 3.10 runs: `python agent.pyz`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path

MAIN = "from launcher.agent.__main__ import main\n\nmain()\n"
EPOCH = (1980, 1, 1, 0, 0, 0)  # zip's own: equal sources make equal bytes


def pack(target: Path) -> Path:
    """Writes the zipapp to `target`: the agent, the contract, nothing else. Returns `target`."""
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in [("__main__.py", MAIN), *_sources()]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text)
    return target


def _sources() -> Iterator[tuple[str, str]]:
    agent = Path(__file__).parent
    root = agent.parent.parent
    files = [root / "launcher" / "__init__.py", root / "trainer" / "__init__.py", root / "trainer" / "contract.py"]
    for file in sorted([*files, *agent.rglob("*.py")]):
        if file.name != Path(__file__).name:
            yield file.relative_to(root).as_posix(), file.read_text()

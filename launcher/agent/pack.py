"""Packs the agent into one file that any Python >= 3.10 runs: `python agent.pyz`."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

# Written for any Python, so that one that is too old can say so; 64 is contract.BAD_SPEC.
MAIN = """import sys

if sys.version_info < (3, 10):
    sys.stderr.write("agent: the image has Python %d.%d; jaxlaunch needs 3.10 or newer\\n" % sys.version_info[:2])
    sys.exit(64)

from jaxlaunch.launcher.agent.__main__ import main

main()
"""
PACKAGE = (
    "__init__.py",
    "contract.py",
    "reporting.py",
    "launcher/__init__.py",
)  # of jaxlaunch, beside the agent and records
EPOCH = (1980, 1, 1, 0, 0, 0)  # the first of the zip format: equal sources give equal bytes


def pack() -> bytes:
    """A zipapp that holds the agent, and what PACKAGE and jaxlaunch/records have; equal sources give equal bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, text in [("__main__.py", MAIN), *_sources()]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, text, compresslevel=9)
    return packed.getvalue()


def _sources() -> Iterator[tuple[str, str]]:
    agent = Path(__file__).parent
    ours = agent.parents[1]  # the package jaxlaunch
    files = [*(ours / name for name in PACKAGE), *(ours / "records").glob("*.py"), *agent.rglob("*.py")]
    for file in sorted(files):
        if file.name != Path(__file__).name:
            yield file.relative_to(ours.parent).as_posix(), file.read_text()

"""Pack the agent into one file that any Python >= 3.10 runs: `python -I agent.pyz`.

Python compiles the modules of a zipapp at every start. The file for this machine therefore also
contains the bytecode of each module, which other Python versions ignore.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import io
import marshal
import zipfile
from collections.abc import Iterator
from pathlib import Path

# The syntax is valid in every Python version, so that one that is too old prints the error instead
# of a SyntaxError. 64 is contract.BAD_SPEC.
MAIN_SOURCE = """import sys

if sys.version_info < (3, 10):
    text = "agent: the image has Python %d.%d; jaxlaunch needs 3.10 or newer\\n"
    sys.stderr.write(text % sys.version_info[:2])
    sys.exit(64)

from jaxlaunch.launcher.agent.__main__ import main

main()
"""
# Files of jaxlaunch that the agent imports, outside of the packages agent, records and runs.
PACKAGE_FILES = (
    "__init__.py",
    "atomic_file.py",
    "contract.py",
    "isolated.py",
    "regular_files.py",
    "reporting.py",
    "samples.py",
    "launcher/__init__.py",
)
# The first date of the zip format. A constant date makes equal sources give equal bytes.
ZIP_EPOCH = (1980, 1, 1, 0, 0, 0)

Definition = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def pack_agent() -> bytes:
    """Return a zipapp of the agent and its imports. Equal sources give equal bytes.

    It has no docstrings, because it shares a ConfigMap of 1 MiB with the user's code.
    """
    files = [(name, drop_docstrings(text).encode()) for name, text in _read_sources()]
    return _write_zip(files, zipfile.ZIP_DEFLATED)


def pack_compiled() -> bytes:
    """Return an uncompressed zipapp with the bytecode of this Python, which starts faster."""
    root = Path(__file__).parents[3]
    files = []
    for name, text in _read_sources():
        # An unchecked hash-based .pyc (PEP 552), whose tracebacks name the installed file.
        code = compile(text, str(root / name), "exec", dont_inherit=True)
        data = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + bytes(8) + marshal.dumps(code)
        files += [(name, text.encode()), (f"{name}c", data)]
    return _write_zip(files, zipfile.ZIP_STORED)


# Parsing takes most of the time, and a sweep packs the agent for each of its runs.
@functools.cache
def drop_docstrings(text: str) -> str:
    """Return Python source with empty docstrings; the lines keep their numbers.

    Docstrings of definitions inside a statement such as `if` are kept.
    """
    lines = text.splitlines(keepends=True)
    for node in _walk_definitions(ast.parse(text)):
        if ast.get_docstring(node, clean=False) is None:
            continue
        docstring = node.body[0]
        first_line, end_line = docstring.lineno - 1, docstring.end_lineno or docstring.lineno
        indent = " " * docstring.col_offset
        blank_lines = ["\n"] * (end_line - first_line - 1)
        lines[first_line:end_line] = [f'{indent}""\n', *blank_lines]
    return "".join(lines)


def _walk_definitions(node: Definition) -> Iterator[Definition]:
    """Yield `node` and, recursively, the classes and functions in its body."""
    yield node
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _walk_definitions(child)


def archive_digest() -> str:
    """Return a digest of the inputs of `pack_compiled`, the cache key of its result."""
    digest = hashlib.sha256(importlib.util.MAGIC_NUMBER + str(Path(__file__).parents[3]).encode())
    for name, text in _read_sources():
        digest.update(f"{name} {len(text)}\n{text}".encode())
    return digest.hexdigest()[:16]


def _write_zip(files: list[tuple[str, bytes]], compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression, compresslevel=9) as archive:
        for name, content in files:
            entry = zipfile.ZipInfo(name, ZIP_EPOCH)
            entry.compress_type = compression
            archive.writestr(entry, content, compresslevel=9)
    return buffer.getvalue()


def _read_sources() -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each file."""
    yield "__main__.py", MAIN_SOURCE
    agent = Path(__file__).parent
    package_folder = agent.parents[1]
    files = [*(package_folder / name for name in PACKAGE_FILES), *agent.rglob("*.py")]
    for package in ("records", "runs"):
        files += (package_folder / package).glob("*.py")
    for file in sorted(files):
        if file.name != Path(__file__).name:
            yield file.relative_to(package_folder.parent).as_posix(), file.read_text()

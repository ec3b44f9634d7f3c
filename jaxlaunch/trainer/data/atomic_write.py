"""Files that appear whole or not at all, also after a loss of power."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

ENDING = ".tmp"


@contextlib.contextmanager
def draft(path: Path) -> Iterator[Path]:
    """The path of a draft beside `path`, which takes its place at the end, and is removed where that raises.

    It is synced before it is renamed: else a loss of power may leave an empty file under the final name. Its name is
    random: hosts that share a volume have processes of the same number. Raises OSError.
    """
    draft = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ENDING}")
    try:
        yield draft
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise

"""Arrow files in either of their formats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any


def batches(mapped: Any) -> tuple[Any, Iterator[Any]]:
    """Schema and batches of the file format, or of the streaming format, which `datasets` writes. `mapped` is a memory
    map of pyarrow's: a batch that is passed over is not read. Raises what pyarrow raises, OSError and ValueError.
    """
    import pyarrow.ipc

    mapped.seek(0)
    is_file = mapped.read(6) == b"ARROW1"
    mapped.seek(0)
    if is_file:
        table = pyarrow.ipc.open_file(mapped)
        return table.schema, (table.get_batch(number) for number in range(table.num_record_batches))
    stream = pyarrow.ipc.open_stream(mapped)
    return stream.schema, iter(stream)


def features(schema: Any) -> dict[str, Any]:
    """What `datasets` notes of the columns, by name."""
    try:
        found = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (KeyError, ValueError, TypeError):
        return {}
    return {name: about for name, about in found.items() if isinstance(about, dict)}

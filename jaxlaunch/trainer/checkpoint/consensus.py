"""Agreement of all processes on values and errors, so that all take the same decision.

The functions are collectives: every process calls them in the same order, from its main thread.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxlaunch.trainer.buckets import faults
from jaxlaunch.trainer.errors import CheckpointError, DataError, StorageError

# Most messages fit into one block. The remaining bytes of a longer one are sent as a second
# message, padded to a multiple of the block.
BLOCK_BYTES = 4096
# The first bytes of the first message hold the size of the value.
HEADER_BYTES = 8
# Characters of a fingerprint in an error message.
MAX_SHOWN_CHARACTERS = 700

T = TypeVar("T")


def gather_values(value: T) -> list[T]:
    """Return the JSON values of all processes, by process index, on every process."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    first_block = np.zeros(BLOCK_BYTES, np.uint8)
    first_block[:HEADER_BYTES] = np.frombuffer(data.size.to_bytes(HEADER_BYTES, "little"), np.uint8)
    first_block[HEADER_BYTES : HEADER_BYTES + data.size] = data[: BLOCK_BYTES - HEADER_BYTES]
    rows = _all_gather(first_block)
    sizes = [int.from_bytes(row[:HEADER_BYTES].tobytes(), "little") for row in rows]
    rows = rows[:, HEADER_BYTES:]
    if (tail_bytes := max(sizes) - rows.shape[1]) > 0:
        tail_block = np.zeros(-(-tail_bytes // BLOCK_BYTES) * BLOCK_BYTES, np.uint8)
        tail = data[BLOCK_BYTES - HEADER_BYTES :]
        tail_block[: tail.size] = tail
        rows = np.concatenate([rows, _all_gather(tail_block)], axis=1)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]


def _all_gather(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Gather an array [n] of every process to [processes, n]."""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, array.size)


def run_on_primary(function: Callable[[], T]) -> T:
    """Return the JSON result of `function` on process 0, or raise its error, on every process.

    An exception of a disk or an object store becomes a StorageError, which every process raises.
    Any other exception is raised by process 0 only.
    """
    answer: dict[str, Any] = {}
    if jax.process_index() == 0:
        try:
            answer = {"value": function()}
        except CheckpointError as error:
            answer = {"checkpoint": str(error)}
        except Exception as error:
            if not isinstance(error, StorageError) and not faults.is_from_store(error):
                raise
            answer = {"storage": str(error)}
    answer = gather_values(answer)[0]
    if "checkpoint" in answer:
        raise CheckpointError(answer["checkpoint"])
    if "storage" in answer:
        raise StorageError(answer["storage"])
    result: T = answer["value"]
    return result


def check_same_data(fingerprints: Mapping[str, str]) -> None:
    """Raise DataError on every process if a process would read other data than process 0.

    This happens if hosts have different files in a folder that they do not share, or different
    versions of a package that makes the examples.
    """
    text = json.dumps(fingerprints, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    gathered = gather_values([socket.gethostname(), digest, text[:MAX_SHOWN_CHARACTERS]])
    for process, (host, digest, data) in enumerate(gathered):
        if digest != gathered[0][1]:
            raise DataError(
                f"process {process} on {host} would read different data from process 0 on "
                f"{gathered[0][0]}: {data}, not {gathered[0][2]}; give all hosts the same files "
                "and packages, or a data.data_dir that they share"
            )

"""Saves and loads the arrays and the meta of one step with Orbax.

This module uses Orbax's AsyncCheckpointer and not its CheckpointManager. On every save the manager
polls JAX's preemption service with the step as the count, and polls it again in a background thread
of process 0 only. The loop polls that service with its own count. If the count of one rank jumps,
the ranks may agree to stop at a count that this rank never reaches. The files have the same format:
`CheckpointManager(path).restore(step)` reads them.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxlaunch.trainer.checkpoint import folder as folders
from jaxlaunch.trainer.checkpoint.manifest import is_remote, map_files
from jaxlaunch.trainer.checkpoint.storage import TIMEOUT_S

# The two items of a step.
STATE, META = "state", "meta"
S3_SCHEME = "s3://"
# Shape and dtype.
Leaf = tuple[tuple[int, ...], str]
# Orbax's threads log these messages, with tracebacks, for an error that `wait` raises anyway.
DUPLICATE_LOG = re.compile(
    r"(\[.*\] )?(_SignalingThread\.run\(\) raised|Failed to run \d+ Handler Commit)"
)
logging.getLogger("absl").addFilter(lambda record: not DUPLICATE_LOG.match(record.getMessage()))


class ArrayCheckpointer:
    """Saves and loads nested dicts of jax.Arrays. All processes take part in both."""

    def __init__(self, root: epath.Path) -> None:
        enable_s3()
        atomicity, folder_type = None, _RenamedFolder
        if is_remote(root):
            mode = ocp.options.AtomicityMode.COMMIT_FILE
            atomicity, folder_type = ocp.options.AtomicityOptions(mode=mode), _InPlaceFolder
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(atomicity_options=atomicity),
            **{STATE: ocp.StandardCheckpointHandler(), META: ocp.JsonCheckpointHandler()},
        )
        self._checkpointer = ocp.AsyncCheckpointer(
            handler, timeout_secs=TIMEOUT_S, temporary_path_class=folder_type
        )

    def save(self, folder: epath.Path, tree: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Start to write a step, and return when the arrays are copied to the host.

        Raises ValueError if the folder exists.
        """
        args = {STATE: ocp.args.StandardSave(tree), META: ocp.args.JsonSave(dict(meta))}
        self._checkpointer.save(folder, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Wait until Orbax has finished the last save. Raises the save's error, of any type."""
        self._checkpointer.wait_until_finished()

    def find_difference(self, folder: epath.Path, abstract: Mapping[str, Any]) -> str | None:
        """Describe the first leaf by which the saved state differs; None if there is none."""
        metadata = self._checkpointer.handler.metadata(folder).item_metadata[STATE]
        if metadata is None:
            raise FileNotFoundError(f"file {STATE}/_METADATA is missing")
        return describe_first_difference(leaf_specs(metadata.tree), leaf_specs(abstract))

    def load(
        self, folder: epath.Path, abstract: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Load the state, sharded as in `abstract`, and the meta.

        An exception may be raised on some processes only.
        """
        args = {STATE: ocp.args.StandardRestore(abstract), META: ocp.args.JsonRestore()}
        items = self._checkpointer.handler.restore(folder, args=ocp.args.Composite(**args))
        return items[STATE], items[META]

    def probe(self, folder: epath.Path, index: int, count: int) -> None:
        """Read all stored arrays once, divided among `count` processes, to find unreadable ones.

        This is called before Orbax loads a step without a manifest, because a failing restore of
        Orbax leaves dozens of callbacks to a closed event loop, each with its own traceback. Raises
        the exceptions of tensorstore.
        """
        path = os.fspath(folder / STATE)
        base: Any = path if is_remote(folder) else f"file://{path}"
        if path.startswith(S3_SCHEME):
            base = s3_kvstore_spec(f"{path}/")
        database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        keys = sorted(database.list().result())
        if not keys:
            raise ValueError(f"{STATE}/ holds no arrays")
        map_files(lambda key: len(database.read(key).result().value), keys[index::count])

    def close(self) -> None:
        """Wait for the last save and end Orbax's threads."""
        self._checkpointer.close()


class _MarkedFolder:
    """A temporary folder of Orbax that is created with our mark, and never replaces another.

    Orbax's own `create` would remove an existing folder.
    """

    _tmp_path: epath.Path
    _checkpoint_metadata_store: Any

    async def create(self) -> epath.Path:
        """Create the folder. Raises FileExistsError when it exists."""
        await asyncio.to_thread(folders.begin_step, self._tmp_path)
        self._checkpoint_metadata_store.write(
            file_path=self._tmp_path / folders.METADATA_FILE,
            metadata={"init_timestamp_nsecs": time.time_ns()},
        )
        return self._tmp_path


class _RenamedFolder(_MarkedFolder, ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """A step on a file system: created under another name, then renamed."""


class _InPlaceFolder(_MarkedFolder, ocp.path.atomicity.CommitFileTemporaryPath):  # type: ignore[misc]
    """A step on an object store, which has no rename: created in place and completed by a file."""


def read_shapes(folder: epath.Path) -> dict[str, Any]:
    """Read the metadata of the saved arrays as a nested dict. Raises the exceptions of Orbax."""
    enable_s3()
    result: dict[str, Any] = ocp.PyTreeCheckpointHandler().metadata(folder / STATE).tree
    return result


def read_meta(folder: epath.Path) -> dict[str, Any]:
    """Read the meta of a step. Raises the exceptions of Orbax."""
    result: dict[str, Any] = ocp.JsonCheckpointHandler().restore(folder / META)
    return result


def load_array(folder: epath.Path, part: str, name: str) -> Any:
    """Read one array of a part of the state to the host. Raises the exceptions of Orbax."""
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(
        item={part: {name: 0}}, restore_args={part: {name: as_numpy}}, partial_restore=True
    )
    return ocp.PyTreeCheckpointHandler().restore(folder / STATE, args=args)[part][name]


def leaf_specs(tree: Any) -> dict[str, Leaf]:
    """Return the shape and dtype of every array of a tree, by path.

    Random keys are described by the arrays of numbers that a checkpoint holds for them.
    """
    specs = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        specs[name] = (tuple(leaf.shape), str(leaf.dtype))
    return specs


def describe_first_difference(
    saved: Mapping[str, Leaf], expected: Mapping[str, Leaf]
) -> str | None:
    """Describe the first array that differs between checkpoint and model; None without one."""

    def describe_leaf(leaf: Leaf | None) -> str:
        return "absent" if leaf is None else f"{leaf[1]}[{','.join(map(str, leaf[0]))}]"

    for name in dict.fromkeys([*expected, *saved]):
        if saved.get(name) != expected.get(name):
            old, new = describe_leaf(saved.get(name)), describe_leaf(expected.get(name))
            return f"{name} is {old} in the checkpoint and {new} in this model"
    return None


def enable_s3() -> None:
    """Patch Orbax, once, so that it also builds tensorstore specifications for s3:// URLs."""
    if gcs_utils.get_kvstore_for_gcs.__module__ == __name__:
        return

    def dispatch_s3(module: Any, name: str, replacement: Callable[[str], Any]) -> None:
        original = getattr(module, name)

        def dispatch(path: str) -> Any:
            return replacement(path) if path.startswith(S3_SCHEME) else original(path)

        setattr(module, name, dispatch)

    dispatch_s3(tensorstore_utils, "_normalize_path", lambda path: path.rstrip("/"))
    dispatch_s3(tensorstore_utils, "_use_gcs_driver", lambda path: True)
    dispatch_s3(gcs_utils, "get_kvstore_for_gcs", s3_kvstore_spec)


def s3_kvstore_spec(url: str) -> dict[str, Any]:
    """Return tensorstore's specification of s3://bucket/name, with the AWS_* variables."""
    bucket, _, name = url.removeprefix(S3_SCHEME).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": name}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        # Self-hosted stores have no regions, but the driver requires one.
        region = region or "us-east-1"
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        # The driver's default search logs an error for each place that it tries.
        spec["aws_credentials"] = {"type": "environment"}
    return spec | ({"aws_region": region} if region else {})

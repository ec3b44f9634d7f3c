"""The state's arrays and the meta beside them, on storage: Orbax behind a few calls.

Orbax's AsyncCheckpointer, not its CheckpointManager: on every save the manager asks JAX's preemption service with the
step as the count, and once more from a background thread of process 0 alone. We poll that service with a count of our
own, and a count that jumps on one rank can put the agreed stop where that rank never comes. The files are the same:
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

STATE, META = "state", "meta"  # the two items of a step
S3 = "s3://"
Leaf = tuple[tuple[int, ...], str]  # shape and dtype
# What Orbax's threads log of an error that `wait` raises, each time with its traceback.
RAISED_LATER = re.compile(r"(\[.*\] )?(_SignalingThread\.run\(\) raised|Failed to run \d+ Handler Commit)")
logging.getLogger("absl").addFilter(lambda record: not RAISED_LATER.match(record.getMessage()))


class Arrays:
    """Saves and loads a nested dict of named jax.Arrays. Every process makes the same calls in the same order."""

    def __init__(self, root: epath.Path) -> None:
        teach_s3()
        in_place = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
        self._checkpointer = ocp.AsyncCheckpointer(
            ocp.CompositeCheckpointHandler(
                composite_options=ocp.CompositeOptions(atomicity_options=in_place if is_remote(root) else None),
                **{STATE: ocp.StandardCheckpointHandler(), META: ocp.JsonCheckpointHandler()},
            ),
            timeout_secs=TIMEOUT_S,
            temporary_path_class=_InPlace if is_remote(root) else _Renamed,
        )

    def save(self, folder: epath.Path, tree: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Start to write; return when the arrays are copied. Raises ValueError when `folder` exists."""
        args = {STATE: ocp.args.StandardSave(tree), META: ocp.args.JsonSave(dict(meta))}
        self._checkpointer.save(folder, args=ocp.args.Composite(**args))

    def wait(self) -> None:
        """Return when Orbax has renamed the last save to its final name. Raises what went wrong, of any type."""
        self._checkpointer.wait_until_finished()

    def difference(self, folder: epath.Path, abstract: Mapping[str, Any]) -> str | None:
        """Return how the first leaf of the saved state that differs from `abstract` does so, in words, or None."""
        metadata = self._checkpointer.handler.metadata(folder).item_metadata[STATE]
        if metadata is None:
            raise FileNotFoundError(f"file {STATE}/_METADATA is missing")
        return first_difference(leaves(metadata.tree), leaves(abstract))

    def load(self, folder: epath.Path, abstract: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return state and meta, each array sharded as in `abstract`. No collective: one process may fail alone."""
        args = {STATE: ocp.args.StandardRestore(abstract), META: ocp.args.JsonRestore()}
        items = self._checkpointer.handler.restore(folder, args=ocp.args.Composite(**args))
        return items[STATE], items[META]

    def probe(self, folder: epath.Path, index: int, count: int) -> None:
        """Read what process `index` of `count` reads of the stored arrays. Raises what tensorstore does.

        Called before Orbax loads a step without a manifest: an Orbax restore that fails leaves dozens of callbacks to
        a closed event loop, each with a traceback of its own.
        """
        path = os.fspath(folder / STATE)
        base = kvstore(f"{path}/") if path.startswith(S3) else path if is_remote(folder) else f"file://{path}"
        database = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        keys = sorted(database.list().result())
        if not keys:
            raise ValueError(f"{STATE}/ holds no arrays")
        map_files(lambda key: len(database.read(key).result().value), keys[index::count])

    def close(self) -> None:
        """Wait for the last save and end Orbax's threads."""
        self._checkpointer.close()


class _Marked:
    """A folder in the making that carries our mark from the first. Orbax's `create` would remove what is in its way."""

    _tmp_path: epath.Path
    _checkpoint_metadata_store: Any

    async def create(self) -> epath.Path:
        """Make the folder. Raises FileExistsError when something is there already."""
        await asyncio.to_thread(folders.begin_step, self._tmp_path)
        self._checkpoint_metadata_store.write(
            file_path=self._tmp_path / folders.METADATA, metadata={"init_timestamp_nsecs": time.time_ns()}
        )
        return self._tmp_path


class _Renamed(_Marked, ocp.path.atomicity.AtomicRenameTemporaryPath):  # type: ignore[misc]
    """A step on a file system: made under another name, then renamed."""


class _InPlace(_Marked, ocp.path.atomicity.CommitFileTemporaryPath):  # type: ignore[misc]
    """A step on an object store, which has no rename: made in place, ended by a file."""


def shapes(folder: epath.Path) -> dict[str, Any]:
    """Return the saved state as a nested dict, each array by its metadata. Raises what Orbax does."""
    teach_s3()
    return ocp.PyTreeCheckpointHandler().metadata(folder / STATE).tree


def meta(folder: epath.Path) -> dict[str, Any]:
    """Return the meta of a step. Raises what Orbax does."""
    return ocp.JsonCheckpointHandler().restore(folder / META)


def load_array(folder: epath.Path, part: str, name: str) -> np.ndarray[Any, Any]:
    """Return the array `name` of a part of the state, whole, on the host; read no other. Raises what Orbax does."""
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    args = ocp.args.PyTreeRestore(item={part: {name: 0}}, restore_args={part: {name: as_numpy}}, partial_restore=True)
    return ocp.PyTreeCheckpointHandler().restore(folder / STATE, args=args)[part][name]


def leaves(tree: Any) -> dict[str, Leaf]:
    """Return the shape and dtype of every array of a tree, by path; of a random key, those of its stored numbers."""
    flat = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for name, leaf in flat.items():
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            flat[name] = jax.eval_shape(jax.random.key_data, leaf)
    return {name: (tuple(leaf.shape), str(leaf.dtype)) for name, leaf in flat.items()}


def first_difference(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf]) -> str | None:
    """Return a sentence on the first array whose shape or dtype differs between checkpoint and model; None: none."""

    def describe(leaf: Leaf | None) -> str:
        return "absent" if leaf is None else f"{leaf[1]}[{','.join(map(str, leaf[0]))}]"

    for name in dict.fromkeys([*wanted, *saved]):
        if saved.get(name) != wanted.get(name):
            then, now = describe(saved.get(name)), describe(wanted.get(name))
            return f"{name} is {then} in the checkpoint and {now} in this model"
    return None


def teach_s3() -> None:
    """Make Orbax build its storage specifications for s3:// too. Call it once or many times."""
    if gcs_utils.get_kvstore_for_gcs.__module__ == __name__:
        return

    def override(theirs: Callable[[str], Any], ours: Callable[[str], Any]) -> Callable[[str], Any]:
        return lambda path: ours(path) if path.startswith(S3) else theirs(path)

    tensorstore_utils._normalize_path = override(tensorstore_utils._normalize_path, lambda path: path.rstrip("/"))
    tensorstore_utils._use_gcs_driver = override(tensorstore_utils._use_gcs_driver, lambda path: True)
    gcs_utils.get_kvstore_for_gcs = override(gcs_utils.get_kvstore_for_gcs, kvstore)


def kvstore(url: str) -> dict[str, Any]:
    """Return tensorstore's specification of s3://bucket/name, at endpoint and region of Amazon's own variables."""
    bucket, _, name = url.removeprefix(S3).partition("/")
    spec: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": name}
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        spec["endpoint"] = endpoint.rstrip("/")
        region = region or "us-east-1"  # a store of one's own has no regions, and the driver asks for one
    if os.environ.get("AWS_ACCESS_KEY_ID"):
        spec["aws_credentials"] = {"type": "environment"}  # the driver's search writes an error for each place it tries
    return spec | ({"aws_region": region} if region else {})

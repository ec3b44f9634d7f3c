"""Make errors of Python, JAX, XLA and Orbax like users' programs; print a JSON object.

One process with eight CPU devices makes all, because starting one takes longer than any of them.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxlaunch.trainer.step.executable import Executable

MESH = Mesh(np.array(jax.devices()), ("dp",))
LEAKED: list[Any] = []


def leak() -> Any:
    jax.jit(lambda x: LEAKED.append(x) or x)(1.0)
    return LEAKED[0] + 1


def deleted() -> Any:
    x = jnp.ones(3)
    x.delete()
    return x + 1


def elsewhere() -> Any:
    first, second = (jax.device_put(jnp.ones(3), device) for device in jax.devices()[:2])
    return jax.jit(jnp.add)(first, second)


def other_tree() -> Any:
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(Path(folder, "a"), {"w": jnp.ones(3)})
        checkpointer.wait_until_finished()
        return checkpointer.restore(Path(folder, "a"), {"v": jnp.ones(3)})


def absent() -> Any:
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(Path(folder, "a"))


def donated() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return jax.jit(lambda x: x[:1], donate_argnums=0)(jnp.ones(3))


def traced_once() -> Any:
    return Executable(
        "train",
        lambda x: x + 1,
        (jax.ShapeDtypeStruct((2,), jnp.float32, sharding=NamedSharding(MESH, PartitionSpec())),),
    )(jnp.ones(3))


def damaged(subject: str, by: Callable[[Path], object]) -> Any:
    """Restores a checkpoint of whose files those that match `subject` were changed."""
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        saved = Path(folder, "a")
        checkpointer.save(saved, {"w": jnp.ones(3)})
        checkpointer.wait_until_finished()
        for path in sorted(saved.rglob(subject)):
            by(path)
        return checkpointer.restore(saved, {"w": jnp.ones(3)})


def full() -> None:
    with open("/dev/full", "w") as file:
        file.write("a line")


ERRORS: dict[str, Callable[[], Any]] = {
    "module": lambda: __import__("einops_of_mine"),
    "memory of the host": lambda: bytearray(1 << 62),
    "backend": lambda: jax.devices("gpu"),
    "memory of a device": lambda: jnp.zeros(1 << 46).block_until_ready(),
    "contraction": lambda: jnp.ones((2, 3)) @ jnp.ones((4, 5)),
    "broadcast": lambda: jnp.ones(3) + jnp.ones(4),
    "split": lambda: jax.device_put(jnp.ones(12), NamedSharding(MESH, PartitionSpec("dp"))),
    "mesh": lambda: mesh_utils.create_device_mesh((16,)),
    "devices": elsewhere,
    "axis": lambda: NamedSharding(MESH, PartitionSpec("mp")),
    "leak": leak,
    "bool": lambda: jax.jit(lambda x: 1 if x > 0 else 2)(1.0),
    "concrete": lambda: jax.jit(lambda n: jnp.zeros(n))(3),
    "deleted": deleted,
    "late": lambda: jax.distributed.initialize("127.0.0.1:1", 1, 0),
    "tree": other_tree,
    "absent": absent,
    "donated": donated,
    "traced once": traced_once,
    "no metadata": lambda: damaged(
        "_METADATA", lambda path: path.write_text('{"tree_metadata": {}}')
    ),
    "no arrays": lambda: damaged("*.ocdbt", Path.unlink),
    "full": full,
    "data file": lambda: open("/data/train.csv"),  # noqa: SIM115 (it fails)
}


def message(make: Callable[[], Any]) -> str:
    """What the last lines of the traceback would say."""
    try:
        make()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    print(json.dumps({name: message(make) for name, make in ERRORS.items()}))

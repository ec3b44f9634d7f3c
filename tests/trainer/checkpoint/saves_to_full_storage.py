"""Save steps 1 to 3; for the second no file may grow beyond 400 bytes.

A process of its own: an Orbax save that fails leaves callbacks to a closed event loop behind, and
each would be a warning in some later test.
"""

import resource
import sys

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)

from jaxlaunch.trainer.checkpoint.store import Store  # noqa: E402 (devices are counted first)
from jaxlaunch.trainer.errors import StorageError  # noqa: E402 (devices are counted first)
from tests.trainer.checkpoint.state import mesh, state  # noqa: E402 (devices are counted first)

store = Store(sys.argv[1], keep=3, uid="run-a", note=print)
store.claim()
store.save(1, state(1, mesh()), {})
store.wait()
limits = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (400, limits[1]))
store.save(2, state(2, mesh()), {})
try:
    store.wait()
except StorageError as error:
    print(type(error).__name__, str(error).partition(":")[0])
resource.setrlimit(resource.RLIMIT_FSIZE, limits)
print("committed", store.newest_committed_step())
store.save(3, state(3, mesh()), {})
store.wait()
print(store.committed_steps())
store.close()

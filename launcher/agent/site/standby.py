"""A spare interpreter: imports what the trainer needs, then waits until it is needed.

Arguments: the descriptor it is told on, the module it becomes. No JAX backend may start here: it would hold devices.
"""

import importlib
import json
import os
import runpy
import sys
import threading

NICE = 10


def warm(module: str) -> None:
    """Imports `module`'s main file, politely: on Linux a nice value belongs to a thread, and cannot be taken back."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    importlib.import_module(f"{module}.__main__")


def main() -> None:
    fd, module = int(sys.argv[1]), sys.argv[2]
    sys.path[0] = os.getcwd()  # as `python -m` has it
    polite = threading.Thread(target=warm, args=(module,), name="warm")
    polite.start()
    polite.join()
    with open(fd) as control:
        line = control.readline()
    if not line:
        os._exit(0)  # the agent has no use for it any more
    os.environ.update(json.loads(line))
    sys.argv = [module]
    sys.modules.pop(f"{module}.__main__")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()

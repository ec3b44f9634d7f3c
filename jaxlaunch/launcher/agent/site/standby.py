"""A standby process: imports what the trainer needs and reads its job, then waits for the next attempt.

Run by jaxlaunch/isolated.py.

Arguments: the descriptor on which it receives its environment, and the module it then runs. No JAX backend may start
here: it would hold the devices.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import threading

NICE = 10


def warm(module: str) -> None:
    """Imports `module`'s main file at low priority, and calls its `get_ready` with the variables that are known, if it
    has one. On Linux a nice value belongs to a thread and cannot be lowered."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    main_file = importlib.import_module(f"{module}.__main__")
    getattr(main_file, "get_ready", lambda environ: None)(os.environ)


def main() -> None:
    """Waits for the environment of an attempt, then runs the module in it."""
    fd, module = int(sys.argv[1]), sys.argv[2]
    gc.disable()  # as the site hook does where a trainer's environment is known from the start
    importer = threading.Thread(target=warm, args=(module,), name="warm")
    importer.start()
    importer.join()
    with open(fd) as control:
        line = control.readline()
    if not line:
        os._exit(0)  # the agent closed its end: no restart comes
    os.environ.update(json.loads(line))
    sys.argv = [module]
    sys.modules.pop(f"{module}.__main__")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()

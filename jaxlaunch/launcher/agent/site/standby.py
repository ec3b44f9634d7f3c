"""Standby process, which imports the trainer, reads its job and then waits for the next attempt.

It saves the time of the imports at a restart. jaxlaunch/isolated.py runs this file with two
arguments: the descriptor on which it receives its environment, and the module that it then runs. No
JAX backend may start here, because it would hold the devices.
"""

import gc
import importlib
import json
import os
import runpy
import sys
import threading

NICE_VALUE = 10


def import_trainer(module: str) -> None:
    """Import the main file of a module at low priority, and call its `get_ready` if it has one.

    This runs in its own thread: on Linux, a nice value belongs to a thread and cannot be lowered
    again.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE_VALUE)
    main_file = importlib.import_module(f"{module}.__main__")
    getattr(main_file, "get_ready", lambda environ: None)(os.environ)


def main() -> None:
    """Wait for the environment of an attempt, then run the module in it."""
    fd, module = int(sys.argv[1]), sys.argv[2]
    # Imported modules are never garbage. The site hook does the same in a process that is a rank
    # from the start.
    gc.disable()
    importer = threading.Thread(target=import_trainer, args=(module,), name="warm")
    importer.start()
    importer.join()
    with open(fd) as control:
        line = control.readline()
    if not line:
        # The agent has closed its end, so there will be no restart.
        os._exit(0)
    os.environ.update(json.loads(line))
    sys.argv = [module]
    sys.modules.pop(f"{module}.__main__")
    runpy.run_module(module, run_name="__main__", alter_sys=True)


main()

"""The program of a rank that runs a function, with a file and a folder as its arguments.

It reads the call from the file. Rank 0 writes the value that the function returns into the folder,
and a rank that fails writes its exception. If the call comes from elsewhere, rank 0 stays until the
value was copied.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import operator
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType

from jaxlaunch import contract
from jaxlaunch.launcher.client import function, values

# The name of the module that a script is in the ranks, so that what is below
# `if __name__ == "__main__":` does not run in them.
SCRIPT_MODULE = "jaxlaunch_script"
# How long a value waits for its copy.
_COPY_LIMIT_S, _POLL_S = 600.0, 0.1


def run_call(file: Path, folder: Path) -> None:
    """Call the function, and write what it returns or raises."""
    call = values.read_value(file)
    folder.mkdir(exist_ok=True)
    rank = int(os.environ.get("JAX_PROCESS_ID", "0"))
    sys.path += [entry for entry in call["path"] if entry not in sys.path]
    function.is_in_rank = True
    try:
        target = operator.attrgetter(call["function"])(_import_module(call["module"], call["file"]))
        value = getattr(target, "function", target)(*call["args"], **call["keywords"])
        if rank == 0:
            values.write_value(folder / function.VALUE, value)
            if file.parent != folder:
                _wait_until_copied(folder)
    except Exception as error:
        description = {
            "module": type(error).__module__,
            "type": type(error).__qualname__,
            "args": [argument if _is_plain(argument) else str(argument) for argument in error.args],
            "traceback": traceback.format_exc(),
        }
        values.write_value(folder / function.ERROR.format(rank=rank), description)
        raise


def _wait_until_copied(folder: Path) -> None:
    """Report that the value is complete, and wait for the file that the caller writes.

    Raises TimeoutError if there is none for a long time.
    """
    contract.send(int(os.environ[contract.PROGRESS_FD]), {"phase": "done"})
    deadline = time.monotonic() + _COPY_LIMIT_S
    while not (folder / function.TAKEN).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody has copied the value for {_COPY_LIMIT_S:.0f} s")
        time.sleep(_POLL_S)


def _is_plain(argument: object) -> bool:
    return argument is None or isinstance(argument, bool | int | float | str)


def _import_module(name: str, file: str | None) -> ModuleType:
    """Import a module by its name, or a script or the cell of a notebook from its file."""
    if file is None:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, file)
    if spec is None:
        # The name of the script does not end with .py.
        loader = importlib.machinery.SourceFileLoader(SCRIPT_MODULE, file)
        spec = importlib.util.spec_from_file_location(SCRIPT_MODULE, file, loader=loader)
    assert spec is not None and spec.loader is not None, file
    sys.modules[SCRIPT_MODULE] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    run_call(*map(Path, sys.argv[1:]))

"""The program of a rank that runs a function: `python -m jaxlaunch.launcher.client.call FOLDER`.

It reads the call from the folder. Rank 0 writes the value that the function returns, and a rank
that fails writes its exception.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import operator
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jaxlaunch.launcher.client import function, values

# The name of the module that a script is in the ranks, so that what is below
# `if __name__ == "__main__":` does not run in them.
SCRIPT_MODULE = "jaxlaunch_script"


def run_call(folder: Path) -> None:
    """Call the function, and write what it returns or raises."""
    call = values.read_value(folder / function.CALL)
    rank = int(os.environ.get("JAX_PROCESS_ID", "0"))
    sys.path += [entry for entry in call["path"] if entry not in sys.path]
    function.is_in_rank = True
    try:
        target = operator.attrgetter(call["function"])(_import_module(call["module"], call["file"]))
        value = getattr(target, "function", target)(*call["args"], **call["keywords"])
        if rank == 0:
            values.write_value(folder / function.VALUE, value)
    except Exception as error:
        description = {
            "module": type(error).__module__,
            "type": type(error).__qualname__,
            "args": [argument if _is_plain(argument) else str(argument) for argument in error.args],
            "traceback": traceback.format_exc(),
        }
        values.write_value(folder / function.ERROR.format(rank=rank), description)
        raise


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
    run_call(Path(sys.argv[1]))

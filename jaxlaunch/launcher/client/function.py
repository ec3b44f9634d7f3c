"""Functions that a gang of processes calls: the decorator `jaxlaunch.job`."""

from __future__ import annotations

import functools
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

from jaxlaunch import contract
from jaxlaunch.launcher.client import values
from jaxlaunch.launcher.client.job import Job
from jaxlaunch.launcher.errors import JobFailedError, UserError

P = ParamSpec("P")
R = TypeVar("R")

# Files of one call: the function and its arguments, its value, and the exception of a rank.
CALL, VALUE, ERROR = "call.zip", "value.zip", "error-{rank}.zip"
# The file that tells rank 0 of a job on a cluster that its value was copied from the pod.
TAKEN = "taken"
# The program of each rank, which gets the call's file and the folder of its results.
RANK_PROGRAM = "jaxlaunch.launcher.client.call"
# The cell of a notebook as a file.
_CELL = "cell.py"
# A failed function is not called again, unless the job says so.
_DEFAULTS = {"restarts": {"crash": 0, "in_place": 0}}
# Whether this process is a rank that calls a function.
is_in_rank = False


def job(
    *, cluster: bool | str = False, **keys: Any
) -> Callable[[Callable[P, R]], JobFunction[P, R]]:
    """Make a function one that all processes of a job call, on this machine or on a cluster.

    `@jaxlaunch.job(hosts=4, accelerator="cpu")` takes keys of [job.yaml](job-yaml.md). A call
    starts the processes and waits for them. Every process imports the module of the function, so
    calls of a script belong below `if __name__ == "__main__":`; in a notebook the function is sent
    alone, with its imports inside. The run is `runs/NAME`, with the name of the function, its
    `_` as `-`.

    On a cluster the call is a job of that name. The folder of the script or module travels as
    `code:` does, with the arguments: at most 1 MiB together. The image has jaxlaunch. The value
    is copied from the pod of rank 0, which needs the right `pods/exec`. Ctrl-C deletes the job.

    **Arguments:**

    - `cluster`: `True` for the cluster of the kubeconfig's current context, or the name of a
      context. By default the processes run here.
    - `keys`: keys of the job. By default a call that fails is not repeated.

    **Returns:**

    A decorator. The function then returns what rank 0 returns, or raises what the failed rank
    raised, with its traceback as a note. Arguments and values are None, booleans, numbers,
    strings, lists, dicts with strings as keys, and arrays of numbers. Tuples return as lists, and
    arrays as NumPy's.

    **Raises:**

    [`JobFailedError`](#jobfailederror) from the call, if a process ended without an exception, or
    its exception cannot be created here. [`UserError`](#usererror) for a function that is not at
    the top of its module, and for a call while a process of a job imports it.

    **Example:**

    ```python
    import os
    import jaxlaunch


    @jaxlaunch.job(hosts=2, accelerator="cpu")
    def describe(greeting):
        return f"{greeting} from rank {os.environ['JAX_PROCESS_ID']}"


    if __name__ == "__main__":
        assert describe("hello") == "hello from rank 0"
    ```
    """

    def decorate(function: Callable[P, R]) -> JobFunction[P, R]:
        return JobFunction(function, keys, cluster)

    return decorate


class JobFunction(Generic[P, R]):
    """A function that all processes of a job call."""

    def __init__(self, function: Callable[P, R], keys: dict[str, Any], cluster: bool | str) -> None:
        functools.update_wrapper(self, function)
        self.function, self._keys, self._cluster = function, keys, cluster

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Start the processes, and return what rank 0 returns or raise what a rank raised."""
        name = self.function.__name__
        if is_in_rank:
            message = f"{name} starts a job, and was called while a process of a job imports it."
            raise UserError(message, 'call it below `if __name__ == "__main__":`.')
        with tempfile.TemporaryDirectory(prefix="jaxlaunch-call-") as temporary:
            folder = Path(temporary)
            module, file = locate_function(self.function, folder)
            call = {
                "module": module,
                "file": file,
                "function": self.function.__qualname__,
                "path": [str(Path(entry).absolute()) for entry in sys.path],
                "args": args,
                "keywords": kwargs,
            }
            keys = {"name": name.strip("_").replace("_", "-").lower(), **_DEFAULTS, **self._keys}
            try:
                if self._cluster is False:
                    values.write_value(folder / CALL, call)
                    files = [str(folder / CALL), str(folder)]
                    Job(**keys, command=["python", "-m", RANK_PROGRAM, *files]).run()
                else:
                    # Imported here, because most calls need no cluster.
                    from jaxlaunch.launcher.client import cluster_call

                    context = self._cluster if isinstance(self._cluster, str) else None
                    cluster_call.run_on_cluster(call, keys, folder, context)
            except JobFailedError as failure:
                error = self._find_exception(folder, failure)
                if error is None:
                    raise
                raise error from failure
            if not (folder / VALUE).exists():
                message = f"{name}: the process of rank 0 ended before the function returned."
                raise JobFailedError(message, contract.CRASH)
            value: R = values.read_value(folder / VALUE)
            return value

    def _find_exception(self, folder: Path, failure: JobFailedError) -> Exception | None:
        """Return the exception of the rank that failed the job, or None if it cannot be made.

        Only a class that this process has imported is made, with plain arguments.
        """
        rank = None if failure.verdict is None else failure.verdict["rank"]
        file = folder / ERROR.format(rank=rank)
        if not file.exists():
            return None
        description = values.read_value(file)
        module = description["module"]
        if module not in sys.modules:
            # The script has another name in the ranks.
            module = self.function.__module__
        kind = getattr(sys.modules.get(module), description["type"], None)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            return None
        try:
            error = kind(*description["args"])
        except Exception:
            # Its constructor takes other arguments than those that it keeps.
            return None
        error.add_note(f"rank {rank}:\n{description['traceback']}")
        return error


def locate_function(function: Callable[..., Any], folder: Path) -> tuple[str, str | None]:
    """Return the module of a function and, if it cannot be imported by its name, its file.

    The source of a function in a notebook is written to `folder`.
    """
    if "<locals>" in function.__qualname__ or "<lambda>" in function.__qualname__:
        message = f"{function.__qualname__} is defined in a function, so no other process finds it."
        raise UserError(message, "define it at the top of its module.")
    module = function.__module__
    if module != "__main__":
        return module, None
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        # `python -m` runs a module, whose relative imports need its name.
        return spec.name, None
    file = getattr(main, "__file__", None)
    if file is not None:
        return module, str(Path(file).absolute())
    source = textwrap.dedent(inspect.getsource(function))
    cell = folder / _CELL
    cell.write_text(f"import jaxlaunch\nfrom jaxlaunch import job\n\n{source}", encoding="utf-8")
    return module, str(cell)

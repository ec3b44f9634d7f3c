"""What a wrapper or multiprocessing would hide: exit codes, and exceptions that Python catches.

The agent sees only how the process ends that it has started. A Python that starts the program
reports how the program ended, because `subprocess` and multiprocessing wait for a child by
`os.waitpid`, and whether it ended the program itself, by `os.kill`. In a process of
multiprocessing, no exception reaches `sys.excepthook`: multiprocessing prints what ends the
process, and a pool sends what a task raises to its parent. Only the program of a rank reports
these.

This needs private names: `_exit_function` of multiprocessing.util, which runs while the exception
is being handled, and the classes in which pools send exceptions.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

# Multiprocessing, and variants of it, run this at the end of each of their processes.
EXIT_MODULES = ("multiprocessing.util", "multiprocess.util", "billiard.util")
EXIT_FUNCTION = "_exit_function"
# The classes that a worker makes of the exception of a task.
TASK_ERRORS = {
    "concurrent.futures.process": "_ExceptionWithTraceback",
    "multiprocessing.pool": "ExceptionWithTraceback",
    "multiprocess.pool": "ExceptionWithTraceback",
    "loky.process_executor": "_ExceptionWithTraceback",
    "joblib.externals.loky.process_executor": "_ExceptionWithTraceback",
}


class ImportFinder:
    """Finds modules on the usual path, and calls functions with them once they are imported."""

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the usual spec of a module with a loader that calls its function, else None."""
        on_import = self._callbacks.pop(name, None)
        if on_import is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                on_import(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(reporter: Any) -> dict[str, Callable[[Any], None]]:
    """Report the ends of children, and return what to do with modules once they are imported.

    Args:
        reporter: The reporter of this process.
    """
    os_module: Any = os
    wait_for_child, send_signal, send_to_group = os.waitpid, os.kill, os.killpg

    @functools.wraps(wait_for_child)
    def waitpid(pid: int, options: int, /) -> tuple[int, int]:
        child, status = wait_for_child(pid, options)
        if child:
            reporter.report_child(child, status)
        return child, status

    @functools.wraps(send_signal)
    def kill(pid: int, signal_number: int, /) -> None:
        reporter.report_signal(pid, signal_number)
        send_signal(pid, signal_number)

    @functools.wraps(send_to_group)
    def killpg(group: int, signal_number: int, /) -> None:
        reporter.report_signal(group, signal_number)
        send_to_group(group, signal_number)

    for function in (waitpid, kill, killpg):
        # By this name, it can be pickled.
        function.__module__ = "os"
        setattr(os_module, function.__name__, function)
    callbacks: dict[str, Callable[[Any], None]] = {}
    for name in EXIT_MODULES:
        callbacks[name] = functools.partial(_wrap_exit_function, reporter)
    for name, class_name in TASK_ERRORS.items():
        callbacks[name] = functools.partial(_wrap_task_error, reporter, class_name)
    return callbacks


def _wrap_exit_function(reporter: Any, module: Any) -> None:
    """Report the exception that ends a process of multiprocessing."""
    exit_function = getattr(module, EXIT_FUNCTION, None)
    if exit_function is None:
        return

    @functools.wraps(exit_function)
    def report_and_clean_up(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # torch.multiprocessing writes the exception to a file, and then ends with 1.
            has_failed = error.code not in (None, 0)
            error = error.__context__ if has_failed else None
        if isinstance(error, Exception):
            reporter.report_worker_error(error)
        return exit_function(*args, **kwargs)

    setattr(module, EXIT_FUNCTION, report_and_clean_up)


def _wrap_task_error(reporter: Any, class_name: str, module: Any) -> None:
    """Report the exception of a task that a worker sends to its parent."""
    error_class = getattr(module, class_name, None)
    if error_class is None:
        return
    initialize = error_class.__init__

    @functools.wraps(initialize)
    def report_and_initialize(self: Any, error: BaseException, *args: Any, **kwargs: Any) -> None:
        if isinstance(error, Exception):
            reporter.report_worker_error(error, is_handled=True)
        initialize(self, error, *args, **kwargs)

    error_class.__init__ = report_and_initialize

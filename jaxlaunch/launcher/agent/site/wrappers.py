"""Report exit codes and exceptions that a wrapper or multiprocessing would hide from the agent.

The agent sees only the end of the process that it has started. If that process is a Python wrapper,
it reports how its child, the program, ended. For this, `os.waitpid` is wrapped, with which
`subprocess` and multiprocessing wait for a child, and `os.kill`, with which a wrapper may end the
program itself. In a process of multiprocessing, no exception reaches `sys.excepthook`:
multiprocessing prints an exception that ends the process, and a pool sends the exception of a task
to the parent. Such exceptions are reported if the process is the program of the rank.

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

# Multiprocessing and its variants run this function at the end of each of their processes.
EXIT_MODULES = ("multiprocessing.util", "multiprocess.util", "billiard.util")
EXIT_FUNCTION = "_exit_function"
# By module, the class in which a worker wraps the exception of a task.
TASK_ERRORS = {
    "concurrent.futures.process": "_ExceptionWithTraceback",
    "multiprocessing.pool": "ExceptionWithTraceback",
    "multiprocess.pool": "ExceptionWithTraceback",
    "loky.process_executor": "_ExceptionWithTraceback",
    "joblib.externals.loky.process_executor": "_ExceptionWithTraceback",
}


class ImportFinder:
    """Import hook that calls a function with each of some modules once it is imported."""

    def __init__(self, callbacks: dict[str, Callable[[Any], None]]) -> None:
        self._callbacks = callbacks

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the usual spec, with a loader that then calls the callback of the module.

        Modules without a callback are left to the other finders.
        """
        on_import = self._callbacks.pop(name, None)
        if on_import is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            original_exec_module = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original_exec_module(module)
                on_import(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install(reporter: Any) -> dict[str, Callable[[Any], None]]:
    """Wrap `os.waitpid`, `os.kill` and `os.killpg`, and return callbacks for imported modules.

    Args:
        reporter: The reporter of this process.

    Returns:
        By name of a module, the function to call with it once it is imported.
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
        # Pickle looks up a function by its module and name.
        function.__module__ = "os"
        setattr(os_module, function.__name__, function)
    callbacks: dict[str, Callable[[Any], None]] = {}
    for name in EXIT_MODULES:
        callbacks[name] = functools.partial(_wrap_exit_function, reporter)
    for name, class_name in TASK_ERRORS.items():
        callbacks[name] = functools.partial(_wrap_task_error, reporter, class_name)
    return callbacks


def _wrap_exit_function(reporter: Any, module: Any) -> None:
    """Wrap the exit function of multiprocessing to report an exception that ends the process."""
    exit_function = getattr(module, EXIT_FUNCTION, None)
    if exit_function is None:
        return

    @functools.wraps(exit_function)
    def report_and_clean_up(*args: Any, **kwargs: Any) -> Any:
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit):
            # torch.multiprocessing catches the exception, writes it to a file, and exits with 1.
            has_failed = error.code not in (None, 0)
            error = error.__context__ if has_failed else None
        if isinstance(error, Exception):
            reporter.report_worker_error(error)
        return exit_function(*args, **kwargs)

    setattr(module, EXIT_FUNCTION, report_and_clean_up)


def _wrap_task_error(reporter: Any, class_name: str, module: Any) -> None:
    """Wrap the class in which a worker sends the exception of a task, to report the exception."""
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

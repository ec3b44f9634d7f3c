"""Site hook of every Python process below the agent: it reports, and hooks the import of JAX.

The hook never imports JAX and never raises into the program. It then runs the next sitecustomize on
the path as if that were the only one. The hook imports only modules of the standard library, even
if files on the path shadow them, and removes them from `sys.modules` again. A program therefore
gets the modules that it would get without the hook.
"""

import os
import sys

# `typing` is not imported, since the program may have a module of that name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    import types
    from collections.abc import Callable
    from typing import Any

    from jaxlaunch import contract

HERE = os.path.dirname(os.path.abspath(__file__))
# jaxlaunch.isolated sets the variable for our trainer, where no file on the path shadows the
# standard library.
KEEPS_MODULES = "JAXLAUNCH_BEHIND" in os.environ


def _interpreter_path() -> "list[str]":
    """Return the entries of sys.path that belong to the standard library."""
    library, archive = os.path.dirname(os.__file__), "python{}{}.zip".format(*sys.version_info)
    return [
        entry
        for entry in sys.path
        if entry == library or os.path.basename(entry) in ("lib-dynload", archive)
    ]


def _may_shadow(name: str, module: "Any") -> bool:
    """Return whether the program may have a file of its own for an imported module."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin not in ("built-in", "frozen") and not name.startswith("_jaxlaunch")


class InterpreterModules:
    """Context in which imports find only the standard library, and leave no trace.

    With `keeps_modules`, neither the path nor `sys.modules` is changed.
    """

    def __init__(self, keeps_modules: bool) -> None:
        self._keeps_modules = keeps_modules

    def __enter__(self) -> None:
        self._path, self._modules = sys.path[:], dict(sys.modules)
        if (folders := _interpreter_path()) and not self._keeps_modules:
            sys.path[:] = folders
            prefixes = tuple(folder + os.sep for folder in folders)
            stdlib_names = getattr(sys, "stdlib_module_names", ())
            for name, module in self._modules.items():
                file = getattr(module, "__file__", None)
                is_elsewhere = isinstance(file, str) and not file.startswith(prefixes)
                if is_elsewhere and name.partition(".")[0] in stdlib_names:
                    del sys.modules[name]

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        if not self._keeps_modules:
            new_names = sys.modules.keys() - self._modules.keys()
            new_modules = {name: sys.modules[name] for name in new_names}
            removed_names = {
                name for name, module in new_modules.items() if _may_shadow(name, module)
            }
            for name in new_modules:
                # A package is removed with all its modules, because a module that stayed would not
                # be an attribute of the package that the program imports. An example is
                # importlib, which is a file, with importlib.machinery, which is frozen.
                if name in removed_names or name.partition(".")[0] in removed_names:
                    del sys.modules[name]
            sys.modules.update(self._modules)


class Reporter:
    """Writer of progress messages, in the process that the agent started."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._has_left = False
        # Runs at exit, after the handlers of the program.
        self.clean_up: Callable[[], object] | None = None
        self._excepthook = sys.excepthook
        sys.excepthook = self.excepthook
        # The code of the last sys.exit, where a job has codes that ask for a restart. A rank that
        # waits in JAX's barrier has not ended yet, and the barrier may abort it.
        self._exit_code: int | None = None
        if json.loads(os.environ.get(contract.JOB, "{}")).get("requeue_codes"):
            self._exit, self._thread = sys.exit, _thread.get_ident()
            sys.exit = self.exit  # type: ignore[assignment]
        # It runs last, because no other handler has been registered yet.
        atexit.register(self._run_exit)

    def hello(self, jax: "str | None" = None) -> None:
        """Report this interpreter, and the version of JAX once it is imported."""
        python = sys.version.split()[0]
        self._send({"hello": "site", "python": python, "jax": jax, "pid": self._pid})

    def joining(self, is_waiting: bool) -> None:
        """Report that `jax.distributed.initialize` waits for the others, or has ended."""
        self._send({"joining": is_waiting})

    def note(self, text: str) -> None:
        """Add a note to the summary of the run."""
        self._send({"note": text})

    def excepthook(
        self,
        error_type: "type[BaseException]",
        error: BaseException,
        traceback: "types.TracebackType | None",
    ) -> None:
        """Report the traceback, and exit without JAX's barrier, which waits for the peers."""
        self._excepthook(error_type, error, traceback)
        if os.getpid() == self._pid:
            self._report_error(error)

    def exit(self, status: "Any" = None, /) -> None:
        """Note the code of an exit, and exit."""
        if os.getpid() == self._pid and _thread.get_ident() == self._thread:
            code = 0 if status is None else status if isinstance(status, int) else 1
            self._exit_code = code & 0xFF
        self._exit(status)

    def _run_exit(self) -> None:
        self.leave()
        if self.clean_up is not None:
            self.clean_up()

    def leave(self) -> None:
        """Report at exit that the program ends, and whether JAX's barrier follows."""
        if self._has_left or os.getpid() != self._pid:
            return
        self._has_left = True
        error = getattr(sys, "last_value", None)
        # An excepthook of the program has printed the error.
        if error is not None:
            self._report_error(error)
        counts = {"waits": _is_distributed(), "processes": _process_count()}
        code = {} if self._exit_code is None else {"code": self._exit_code}
        self._send({"atexit": True, **counts, **code})

    @property
    def is_in_process(self) -> bool:
        """Return whether this is the process of the reporter, and not a fork of it."""
        return os.getpid() == self._pid

    @property
    def has_left(self) -> bool:
        """Return whether the program has ended, and only what `clean_up` does may follow."""
        return self._has_left

    def report_wait(self, *, is_waiting: bool) -> None:
        """Report that this process enters or leaves JAX's shutdown barrier."""
        if self.is_in_process and not self._has_left:
            self._send({"waits": is_waiting})

    def _report_error(self, error: BaseException) -> None:
        reporting: Any = sys.modules.get("jaxlaunch.reporting")
        if reporting is not None:
            # os._exit does not run the handlers of atexit.
            reporting._leave(self._pid)
        # `traceback` imports more modules while it formats.
        with InterpreterModules(KEEPS_MODULES):
            self._send(contract.error_line(error, contract.exception_code(error)))
        for stream in (sys.stdout, sys.stderr):
            # The stream may be closed or None.
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)

    def _send(self, message: "dict[str, Any]") -> None:
        contract.send(self._fd, message)


def _is_distributed() -> bool:
    """Return whether this process has joined a gang, so that JAX waits for the others at exit."""
    module: Any = sys.modules.get("jax._src.distributed")
    return module is not None and module.global_state.client is not None


def _process_count() -> int:
    """Return the number of processes with which this one used JAX, 0 if it used no device."""
    bridge: Any = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not getattr(bridge, "_backends", None):
        return 0
    try:
        return int(bridge.process_count())
    except Exception:
        # A backend that has failed must not change how the program ends.
        return 0


def _load_file(name: str, path: str) -> "Any":
    """Import a file under a private name, so that it does not shadow a module of the program."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the agent wrote this file"
    module = importlib.util.module_from_spec(spec)
    # `dataclasses` looks up the module by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _claim_reporter() -> "Reporter | None":
    """Return the reporter if this process is the first Python of its rank.

    Python processes that the program starts inherit the environment, but the descriptor may be
    another file by then. It stays open across `exec`, and `subprocess` closes it for children. The
    variable REPORTER has the pid of the reporter.
    """
    if os.environ.get(contract.REPORTER, str(os.getpid())) != str(os.getpid()):
        return None
    try:
        fd = int(os.environ[contract.PROGRESS_FD])
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return None
    except (KeyError, ValueError, OSError):
        return None
    os.environ[contract.REPORTER] = str(os.getpid())
    return Reporter(fd)


def _dump_stacks_on_signal() -> None:
    # A segmentation fault then prints a traceback.
    faulthandler.enable()
    path = os.environ.get(contract.STACKS)
    if path:
        file = open(path, "w")  # noqa: SIM115  # faulthandler keeps writing to its descriptor
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _run_next_sitecustomize() -> None:
    """Run the sitecustomize that ours shadows, and remove our folder from sys.path.

    The fallback for `jaxlaunch.report`, which the image may lack, is added at the end of sys.path.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    sys.path.append(os.path.join(HERE, "fallback"))
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


with InterpreterModules(KEEPS_MODULES):
    import _thread
    import atexit
    import contextlib
    import faulthandler
    import gc
    import importlib.machinery
    import importlib.util
    import io
    import json
    import signal
    import stat

    if not TYPE_CHECKING:
        contract = _load_file("_jaxlaunch_contract", os.path.join(HERE, "contract.py"))
    reporter = _claim_reporter()
    if reporter is not None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # Lines are neither delayed nor mixed. With PYTHONUNBUFFERED, a text and its newline
            # would be two writes.
            sys.stdout.reconfigure(line_buffering=True, write_through=False)
        _dump_stacks_on_signal()
        # The agent may send SIGUSR1 after this message, so the handler must be installed before.
        reporter.hello()
        if contract.TRAIN_SPEC in os.environ:
            # Our trainer enables it again after its imports: imported modules are never garbage,
            # and collection takes a quarter of the processor time of the imports.
            gc.disable()
    _load_file("_jaxlaunch_jaxhook", os.path.join(HERE, "jaxhook.py")).install(contract, reporter)
_run_next_sitecustomize()

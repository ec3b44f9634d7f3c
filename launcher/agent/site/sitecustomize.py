"""The site hook: runs first in every Python below the agent, reports for the program, and hooks the import of JAX.

Never imports JAX, never raises into the program, and lets the next sitecustomize on the path run as if alone.
"""

import atexit
import contextlib
import faulthandler
import gc
import importlib.machinery
import importlib.util
import io
import os
import platform
import signal
import stat
import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxlaunch import contract

HERE = os.path.dirname(os.path.abspath(__file__))


class Reporter:
    """Reports for the program on the progress pipe, from the one process that the agent started."""

    def __init__(self, fd: int) -> None:
        self._fd, self._pid = fd, os.getpid()
        self._has_left = False
        self._excepthook = sys.excepthook
        sys.excepthook = self.excepthook
        atexit.register(self.leave)

    def hello(self, jax: "str | None" = None) -> None:
        """Reports this interpreter, and the version of JAX once it is imported."""
        self._send({"hello": "site", "python": platform.python_version(), "jax": jax, "pid": self._pid})

    def note(self, text: str) -> None:
        """Adds a note to the summary of the run."""
        self._send({"note": text})

    def excepthook(
        self, kind: "type[BaseException]", error: BaseException, trace: "types.TracebackType | None"
    ) -> None:
        """Prints the traceback once, reports it, and leaves at once: JAX's atexit barrier would wait for the peers."""
        self._excepthook(kind, error, trace)
        if os.getpid() == self._pid:
            self._raised(error)

    def leave(self) -> None:
        """Reports at exit, before JAX's own handler, that the program ended, and whether JAX's barrier comes next."""
        if self._has_left or os.getpid() != self._pid:
            return
        self._has_left = True
        error = getattr(sys, "last_value", None)
        if error is not None:  # the program's own excepthook has printed it
            self._raised(error)
        self._send({"atexit": True, "waits": _is_distributed()})

    def _raised(self, error: BaseException) -> None:
        reporting: Any = sys.modules.get("jaxlaunch.reporting")
        if reporting is not None:
            reporting._leave(self._pid)  # os._exit runs nothing of atexit's
        self._send(contract.error_line(error, code=None))
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or None: nothing left to flush
                stream.flush()
        os._exit(1)

    def _send(self, message: "dict[str, Any]") -> None:
        contract.send(self._fd, message)


def _is_distributed() -> bool:
    """Whether this process joined a gang, so that JAX waits for the others at exit."""
    module: Any = sys.modules.get("jax._src.distributed")
    return module is not None and module.global_state.client is not None


def _load(name: str, path: str) -> Any:
    """The module in the file `path`, under a private name: our names must not hide the program's."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the agent wrote this file"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _claim() -> "Reporter | None":
    """The reporter, where this process is the first Python of its rank, or it has executed itself anew.

    A Python that the program starts inherits the environment, but the descriptor may be another file by then. The
    descriptor stays open across an exec: `subprocess` closes it for others, and by REPORTER they know it is not theirs.
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


def _print_whole_lines() -> None:
    """Has stdout written line by line: not 8 KiB at a time, nor in pieces that other writers get between.

    Under PYTHONUNBUFFERED the text and its newline would be two writes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True, write_through=False)


def _dump_stacks_on_signal() -> None:
    faulthandler.enable()  # a segmentation fault says where
    path = os.environ.get(contract.STACKS)
    if path:
        file = open(path, "w")  # noqa: SIM115  # faulthandler keeps writing to its descriptor
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)


def _import_without_collecting() -> None:
    """Of our trainer, which collects garbage again when it has imported what it needs: that stays, and looking for
    garbage among it takes a quarter of the processor time."""
    if contract.TRAIN_SPEC in os.environ:
        gc.disable()


def _run_the_next() -> None:
    """Runs the sitecustomize that ours shadows, and removes our folder from the program's sys.path.

    What the image may lack of ours, `jaxlaunch.report`, comes last there.
    """
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]
    sys.path.append(os.path.join(HERE, "fallback"))
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if not TYPE_CHECKING:
    contract = _load("_jaxlaunch_contract", os.path.join(HERE, "contract.py"))
reporter = _claim()
if reporter is not None:
    _print_whole_lines()
    _dump_stacks_on_signal()
    reporter.hello()  # only now: after it the agent may send SIGUSR1
    _import_without_collecting()
_load("_jaxlaunch_jaxhook", os.path.join(HERE, "jaxhook.py")).install(contract, reporter)
_run_the_next()

"""The site hook: runs first in every Python below the agent, reports for the program, and hooks the import of JAX.

Never imports JAX, never raises into the program, and lets the next sitecustomize on the path run as if alone. What it
imports itself is the interpreter's, whatever files are on the path, and the program imports it anew: so a program gets
the modules that it would get without this hook.
"""

import os
import sys

TYPE_CHECKING = False  # typing's: the program may have a module of that name
if TYPE_CHECKING:
    import types
    from typing import Any

    from jaxlaunch import contract

HERE = os.path.dirname(os.path.abspath(__file__))
KEEPS = "JAXLAUNCH_BEHIND" in os.environ  # jaxlaunch.isolated's: the program is ours, and its path is clean


def _of_the_interpreter() -> "list[str]":
    """The entries of sys.path that are the standard library's."""
    library, archive = os.path.dirname(os.__file__), "python{}{}.zip".format(*sys.version_info)
    return [each for each in sys.path if each == library or os.path.basename(each) in ("lib-dynload", archive)]


def _is_elsewhere(module: "Any", folders: "list[str]") -> bool:
    """Whether a module has been imported from a file that is not in `folders`."""
    file = getattr(module, "__file__", None)
    return isinstance(file, str) and not any(file.startswith(folder + os.sep) for folder in folders)


def _can_be_the_programs(name: str, module: "Any") -> bool:
    """Whether a module that the hook imported is one that a program may have in a file of its own."""
    origin = getattr(getattr(module, "__spec__", None), "origin", None)
    return origin not in ("built-in", "frozen") and not name.startswith("_jaxlaunch")


class TheInterpreters:
    """While entered, an import gets the interpreter's own module; afterwards the program's modules are as before.

    With `keeps`, which changes nothing, what was imported meanwhile stays.
    """

    def __init__(self, keeps: bool) -> None:
        self._keeps = keeps

    def __enter__(self) -> None:
        self._path, self._modules = sys.path[:], dict(sys.modules)
        if (folders := _of_the_interpreter()) and not self._keeps:
            sys.path[:] = folders
            for name in [name for name, module in self._modules.items() if _is_elsewhere(module, folders)]:
                if name.partition(".")[0] in getattr(sys, "stdlib_module_names", ()):
                    del sys.modules[name]

    def __exit__(self, *_: object) -> None:
        sys.path[:] = self._path
        if not self._keeps:
            new = {name: module for name, module in sys.modules.items() if name not in self._modules}
            gone = {name for name, module in new.items() if _can_be_the_programs(name, module)}
            for name in new:
                # With a package goes all that is in it: a module that stayed would be no attribute of the package that
                # the program imports. importlib is a file, importlib.machinery is frozen.
                if name in gone or name.partition(".")[0] in gone:
                    del sys.modules[name]
            sys.modules.update(self._modules)


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
        self._send({"hello": "site", "python": sys.version.split()[0], "jax": jax, "pid": self._pid})

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
        with TheInterpreters(KEEPS):  # traceback imports more while it formats
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


def _load(name: str, path: str) -> "Any":
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


with TheInterpreters(KEEPS):
    import atexit
    import contextlib
    import faulthandler
    import gc
    import importlib.machinery
    import importlib.util
    import io
    import signal
    import stat

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

"""Site hook of every Python process below the agent.

It creates the reporter of the process, and hooks the import of JAX and of some other modules. The
hook itself never imports JAX and never raises into the program. It imports only modules of the
standard library, even if files on the path shadow them, and removes them from `sys.modules` again.
A program therefore gets the modules that it would get without the hook. At its end, the hook runs
the next sitecustomize on the path as if that were the only one.
"""

import os
import sys

# `typing` is not imported, because the program may have a module of that name.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
# jaxlaunch.isolated sets the variable for our trainer, where no file on the path shadows the
# standard library.
KEEPS_MODULES = "JAXLAUNCH_BEHIND" in os.environ


def _interpreter_path() -> "list[str]":
    """Return the entries of sys.path that hold the standard library."""
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
    """Context in which imports find only the standard library, and after which they are undone.

    With `keeps_modules`, neither `sys.path` nor `sys.modules` is changed.
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


def _load_file(name: str, path: str) -> "Any":
    """Import a file under a private name, so that it does not shadow a module of the program."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "the agent wrote this file"
    module = importlib.util.module_from_spec(spec)
    # `dataclasses` looks up the module by name.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


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
    import gc
    import importlib.machinery
    import importlib.util

    contract = _load_file("_jaxlaunch_contract", os.path.join(HERE, "contract.py"))
    site_reporter = _load_file("_jaxlaunch_reporter", os.path.join(HERE, "reporter.py"))
    reporter = site_reporter.create_reporter(contract, lambda: InterpreterModules(KEEPS_MODULES))
    site_reporter.reporter = reporter
    if contract.TRAIN_SPEC in os.environ and reporter is not None and reporter.role is not None:
        # The trainer enables it again after its imports. Imported modules are never garbage, and
        # garbage collection takes a quarter of the processor time of the imports.
        gc.disable()
    jaxhook = _load_file("_jaxlaunch_jaxhook", os.path.join(HERE, "jaxhook.py"))
    wrappers = _load_file("_jaxlaunch_wrappers", os.path.join(HERE, "wrappers.py"))
    callbacks = {} if reporter is None else wrappers.install(reporter)
    callbacks["jax"] = jaxhook.make_callback(contract, site_reporter)
    sys.meta_path.insert(0, wrappers.ImportFinder(callbacks))
_run_next_sitecustomize()

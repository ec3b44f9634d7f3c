"""The agent's temporary folder: the site hook that child processes load, their sockets and their stacks.

The files are copied because the agent may run from a zipapp, which its children cannot import from.
"""

from __future__ import annotations

import itertools
import os
import pkgutil
import shutil
import tempfile

from jaxlaunch import isolated
from jaxlaunch.launcher.agent.host import temporary_folder

STANDBY = "standby.py"
HOOKS = ("sitecustomize.py", "jaxhook.py", STANDBY)  # of launcher/agent/site
CONTRACT, ISOLATED = "contract.py", "isolated.py"  # of jaxlaunch
FALLBACK = "fallback"  # a folder that comes last on a program's sys.path: for images without our package
# Of jaxlaunch, without packages below it: where the package is installed to be edited, a program's `jaxlaunch` is this
# folder, and the finder of such an installation gives only the direct children of a package.
FALLBACK_FILES = ("__init__.py", "reporting.py", "atomic_file.py")
MAX_SOCKET_PATH = 100  # sun_path holds 108 bytes on Linux


class SiteFolder:
    """The folder, made once per agent; `site` is the part that comes first on a child's PYTHONPATH."""

    def __init__(self) -> None:
        is_long = len(tempfile.gettempdir()) > MAX_SOCKET_PATH - 40
        temporary_folder.sweep()
        self._folder, self._lock = temporary_folder.make(folder="/tmp" if is_long else None)
        self._numbers = itertools.count()
        self.site = os.path.join(self._folder, "site")
        os.mkdir(self.site)
        for name in HOOKS:
            self._copy("jaxlaunch.launcher.agent", f"site/{name}", name)
        for name in (CONTRACT, ISOLATED):
            self._copy("jaxlaunch", name, name)
        os.makedirs(os.path.join(self.site, FALLBACK, "jaxlaunch"))
        for name in FALLBACK_FILES:
            self._copy("jaxlaunch", name, f"{FALLBACK}/jaxlaunch/{name}")

    def path(self, suffix: str) -> str:
        """A path in the folder that was not returned before."""
        return os.path.join(self._folder, f"{next(self._numbers)}.{suffix}")

    def command(self, module: str) -> list[str]:
        """The command that runs a module of ours, which nothing of the user's can shadow."""
        return isolated.command(module, script=os.path.join(self.site, ISOLATED))

    def standby(self, module: str, descriptor: int) -> list[str]:
        """The command of a process with the imports of `module` done; it reads from `descriptor` how to go on."""
        return [*self.command(os.path.join(self.site, STANDBY)), str(descriptor), module]

    def close(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._lock)

    def _copy(self, package: str, resource: str, name: str) -> None:
        data = pkgutil.get_data(package, resource)
        assert data is not None, "packages are read by loaders that have get_data, zipimport's included"
        with open(os.path.join(self.site, name), "wb") as file:
            file.write(data)

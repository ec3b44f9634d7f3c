"""Commands as another user, who may read neither the clone nor the Python of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
# The user and the group that own nothing.
NOBODY = 65534
COMMAND = ("-m", "jaxlaunch.launcher.cli.main")
# What no command imports, and what is copied on its own.
LEFT_OUT = shutil.ignore_patterns("*-packages", "test", "tests", "idlelib", "config-*", "ensurepip")


class OtherUser:
    """Run `launcher` as a user without rights, on a copy of Python and the package if necessary."""

    def __init__(self, folder: Path) -> None:
        self._python = sys.executable
        self._variables = {"PYTHONDONTWRITEBYTECODE": "1"}
        if not self._starts():
            self._copy(folder / "python")
            assert self._starts(), "the copy of Python does not start"

    def _starts(self) -> bool:
        try:
            return self.launcher("--version", folder=Path("/")).returncode == 0
        except PermissionError:
            return False

    def launcher(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run a command in this folder to its end."""
        return subprocess.run(
            [self._python, *COMMAND, *arguments],
            cwd=folder,
            env=os.environ | self._variables,
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            capture_output=True,
            text=True,
        )

    def _copy(self, home: Path) -> None:
        """Copy the interpreter, standard library, package and requirements to `home`."""
        library = Path(sysconfig.get_path("stdlib"))
        executable = home / "bin" / library.name
        executable.parent.mkdir(parents=True)
        shutil.copy(Path(sys.executable).resolve(), executable)
        # Python finds the library next to its executable by these names.
        shutil.copytree(library, home / "lib" / library.name, ignore=LEFT_OUT)
        shared = Path(
            sysconfig.get_config_var("LIBDIR") or "", sysconfig.get_config_var("INSTSONAME") or ""
        )
        if ".so" in shared.name and shared.is_file():
            shutil.copy(shared, home / "lib")
        packages = home / "packages"
        shutil.copytree(ROOT / "jaxlaunch", packages / "jaxlaunch")
        files = [
            (package_file, file.parts[0])
            for package_file in required("jaxlaunch")
            for file in package_file.files or ()
        ]
        for source in {
            Path(str(package_file.locate_file(name)))
            for package_file, name in files
            if name != ".."
        }:
            # With its bytecode: without it every command would compile all that it imports.
            if source.is_dir():
                shutil.copytree(source, packages / source.name)
            elif source.is_file():
                shutil.copy2(source, packages)
        for path in (home, *home.rglob("*")):
            path.chmod(path.stat().st_mode | (0o055 if path.is_dir() else 0o044))
        self._python = str(executable)
        self._variables |= {"PYTHONPATH": str(packages), "LD_LIBRARY_PATH": str(home / "lib")}


def required(name: str) -> list[metadata.Distribution]:
    """Return the distributions of a package without its extras and of all that it requires."""
    distributions: dict[str, metadata.Distribution] = {}
    names = [name]
    while names:
        name = names.pop()
        if name not in distributions:
            distributions[name] = metadata.distribution(name)
            for text in distributions[name].requires or ():
                requirement = Requirement(text)
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    names.append(requirement.name)
    return list(distributions.values())

"""Install packages with uv where this environment has it, otherwise with pip.

    python requirements/install.py [--python PYTHON] ARGUMENT...

The arguments are those that `pip install` and `uv pip install` share. uv installs our lists in a
tenth of the time that pip takes, but it has no wheel for some platforms, and it does not read pip's
configuration: this passes on how packages are reached. If uv fails, pip tries.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

# Settings of pip, and the variables of uv that mean the same.
VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "no-index": "UV_NO_INDEX",
}


def read_settings(listing: str) -> dict[str, str]:
    """Return the settings of `pip install` in `pip config list`; [install] overrides [global]."""
    settings: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        name, _, value = line.partition("=")
        section, _, key = name.partition(".")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section, -1)
        if rank >= settings.get(key, (0, ""))[0]:
            settings[key] = rank, ast.literal_eval(value)
    return {key: value for key, (_, value) in settings.items()}


def uv_environment(settings: dict[str, str]) -> dict[str, str]:
    """Return variables so that uv reaches packages as pip does; variables of the user stay."""
    # pip takes the best version of all indexes. The hashes of our lists make that safe.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_NO_PROGRESS": "1"}
    for key, variable in VARIABLES.items():
        if key in settings:
            separator = "," if variable == "UV_FIND_LINKS" else " "
            variables[variable] = separator.join(settings[key].split())
    return variables | os.environ


def install(python: str, arguments: list[str]) -> int:
    """Install into the environment of `python`; return the installer's exit code."""
    pip = [sys.executable, "-m", "pip", "--python", python]
    uv = Path(sys.executable).with_name("uv")
    if uv.exists():
        listing = subprocess.run(
            [*pip[:3], "config", "list"], stdout=subprocess.PIPE, text=True, check=True
        ).stdout
        environment = uv_environment(read_settings(listing))
        command = [str(uv), "pip", "install", "--quiet", "--python", python, *arguments]
        if subprocess.run(command, env=environment).returncode == 0:
            return 0
        print("uv could not install these packages; pip tries", file=sys.stderr)
    return subprocess.run([*pip, "install", "--quiet", *arguments]).returncode


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--python", python, *arguments]:
            sys.exit(install(python, arguments))
        case arguments:
            sys.exit(install(sys.executable, arguments))

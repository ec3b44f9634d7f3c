"""Start a command next to the process of a rank: in its folder and with its environment.

The source of this file is sent into pods, whose image may lack jaxlaunch, so it needs only the
standard library and Python >= 3.10.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

# Variables of contract.py. Without these, a command neither reports as the rank, nor joins its
# gang, nor is killed as a process of the rank that was left behind.
_PROGRESS = "JAXLAUNCH_PROGRESS"
_DROPPED = (
    _PROGRESS,
    "JAXLAUNCH_PROGRESS_FD",
    "JAXLAUNCH_METRICS",
    "JAXLAUNCH_PROFILE",
    "JAXLAUNCH_STACKS",
    "JAXLAUNCH_FIRST_PYTHON",
    "JAXLAUNCH_REPORTER",
    "JAX_COORDINATOR_ADDRESS",
    "JAX_COORDINATOR_BIND_ADDRESS",
)
# Suffix of the file next to the progress pipe with the variables that a standby process received
# when it became a rank, as in contract.py.
_ACTIVATION = ".activation"
_RANK, _USER_PATH, _PYTHONPATH = "JAX_PROCESS_ID", "JAXLAUNCH_BEHIND", "PYTHONPATH"
# The variable by which `interrupt` recognizes the processes of a command.
_ENTRY = "JAXLAUNCH_ENTRY"
_SHELLS = ("bash", "sh")


def _list_environments() -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the pid and the environment of each process of this user, by pid."""
    for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdecimal()):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                pairs = file.read().split(b"\0")
        except OSError:
            # The process has ended, or belongs to another user.
            continue
        fields = (os.fsdecode(pair).partition("=") for pair in pairs)
        yield pid, {name: value for name, separator, value in fields if separator}


def find_rank(rank: int, marker: Mapping[str, str]) -> tuple[str, dict[str, str]] | None:
    """Return the folder and the environment of a rank's process, or None if it has none.

    Args:
        rank: The rank.
        marker: Variables that its process has, which identify a run of this machine.
    """
    wanted = {_RANK: str(rank), **marker}.items()
    for pid, environ in _list_environments():
        if _PROGRESS not in environ:
            continue
        environ |= _read_activation(environ[_PROGRESS])
        if wanted <= environ.items():
            try:
                return os.readlink(f"/proc/{pid}/cwd"), environ
            except OSError:
                continue
    return None


def _read_activation(progress: str) -> dict[str, str]:
    """Return the variables that a standby process received later; none for another process."""
    try:
        with open(progress + _ACTIVATION, encoding="utf-8") as file:
            variables: dict[str, str] = json.load(file)
    except (OSError, ValueError):
        # There is no such file, or it is being written.
        return {}
    return variables


def enter_environ(environ: Mapping[str, str], entry: str) -> dict[str, str]:
    """Return the environment of a command next to a process with this environment."""
    variables = {name: value for name, value in environ.items() if name not in _DROPPED}
    # The built-in trainer has hidden the user's part from Python.
    parts = variables.get(_PYTHONPATH), variables.pop(_USER_PATH, None)
    if python_path := os.pathsep.join(filter(None, parts)):
        variables[_PYTHONPATH] = python_path
    # The terminal is that of the user.
    terminal = os.environ.get("TERM") or variables.get("TERM")
    return {**variables, **({"TERM": terminal} if terminal else {}), _ENTRY: entry}


def start_command(argv: Sequence[str], folder: str | None, environ: Mapping[str, str]) -> NoReturn:
    """Become a command, or a shell if it is empty. Exits with 127 if it cannot be started."""
    search_path = environ.get("PATH")
    shell = next((name for name in _SHELLS if shutil.which(name, path=search_path)), "sh")
    argv = argv or [shell]
    name = folder
    try:
        if folder is not None:
            os.chdir(folder)
        name = argv[0]
        # Python ignores these signals, and a command would inherit that.
        for number in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(name, list(argv), dict(environ))
    except OSError as error:
        print(f"{name}: {error.strerror}", file=sys.stderr)
    sys.exit(127)


def interrupt(entry: str) -> None:
    """Send SIGINT to all processes of a command, as Ctrl-C in its terminal would do."""
    for pid, environ in _list_environments():
        if environ.get(_ENTRY) == entry:
            try:
                os.kill(pid, signal.SIGINT)
            except OSError:
                continue


def main(argv: Sequence[str]) -> None:
    """Run `enter RANK ENTRY TERM COMMAND…` or `interrupt ENTRY`."""
    action, *words = argv
    if action == "interrupt":
        interrupt(words[0])
        return
    rank, entry, os.environ["TERM"], *command = words
    place = find_rank(int(rank), {})
    if place is None:
        print(f"rank {rank} has no process now: this is the pod's environment", file=sys.stderr)
    folder, environ = place or (None, dict(os.environ))
    start_command(command, folder, enter_environ(environ, entry))


if __name__ == "__main__":
    main(sys.argv[1:])

"""How the program of a rank has ended, where a wrapper does not say so. Pure.

The agent sees the exit code of the process that it has started. A wrapper may translate the code of
the program, or end with 0 whatever the program did (`wandb agent`). The program is what joined JAX
or reported, so its exception, code or signal decides. Only the exit code of a shell counts more,
because a script says which failures it handles (`|| true`), unless the shell knows nothing: in a
pipeline, or if a Python below it has ended with 0 after its child has failed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.root_cause import is_signal_exit_code
from jaxlaunch.records.verdict import MAX_SIGNAL

# The exit code of a Python that raises.
RAISED = 1
# The end of the message of a CalledProcessError, as Python's subprocess writes it.
_CHILD_SIGNAL = re.compile(r"died with <Signals\.\w+: (\d+)>\.$")
# What `setsid --wait` of util-linux prints when its child was killed.
_SETSID_SIGNAL = re.compile(rb"setsid: child \d+ did not exit normally")


@dataclasses.dataclass
class ProgramEnd:
    """What is known of the end of a rank's program.

    Attributes:
        error: The exception that ended the program.
        task_error: The exception of a task that a worker of a pool sent to its parent.
        other_error: The exception of another Python: a wrapper, or what one starts before the
            program.
        code: Exit code of the program, or minus the signal.
        parent_pid: The Python that has waited for the program, 0 if none has said so.
        was_stopped: Whether a wrapper has sent it a signal, for reasons of its own.
        decides: Whether its end counts whatever a shell says.
        was_first: Whether the program had ended before the process that started it.
    """

    error: Mapping[str, Any] | None = None
    task_error: Mapping[str, Any] | None = None
    other_error: Mapping[str, Any] | None = None
    code: int | None = None
    parent_pid: int = 0
    was_stopped: bool = False
    decides: bool = False
    was_first: bool = False

    def take_child(self, parent_pid: int, code: int) -> None:
        """Record how the program ended, as its parent says."""
        self.parent_pid, self.code = parent_pid, code

    def take_other_error(self, error: Mapping[str, Any], *, is_killed: bool) -> None:
        """Record the exception of a Python that is not the program.

        Args:
            error: The exception.
            is_killed: Whether the program was killed or ended itself by os._exit.
        """
        match = _CHILD_SIGNAL.search(error["message"])
        if match is not None and is_killed:
            self.code = -int(match[1])
        elif self.other_error is None or not reports_child(error):
            self.other_error = error

    def take_other_exit(self, pid: int, code: int | None) -> None:
        """Record that another Python ends by itself, and the argument of its sys.exit."""
        if pid == self.parent_pid and not code and self.code != contract.DONE:
            self.decides = True

    def find_error(self, code: int) -> Mapping[str, Any] | None:
        """Return the exception that explains an exit code of the rank, if one is known."""
        wrapper_error = None if code == self.code else self.other_error
        return self.error or self.task_error or wrapper_error

    def resolve_code(
        self,
        code: int,
        *,
        is_below_shell: bool,
        has_left: bool,
        kept_codes: Collection[int],
        last_line: bytes,
    ) -> int:
        """Return how the rank ended: its exit code, or minus the signal that killed the program.

        Args:
            code: Exit code of the process that was started, or minus the signal.
            is_below_shell: Whether a shell has started the program or one of its wrappers.
            has_left: Whether the program ended by itself.
            kept_codes: Exit codes that ask for a restart, which a wrapper may choose.
            last_line: The last line of output.
        """
        was_killed = self.was_first and not has_left
        is_above_shell = self.decides or not is_below_shell
        own_code = None if self.was_stopped and (self.code or 0) < 0 else self.code
        if own_code is not None and code not in kept_codes:
            is_hidden = code == contract.DONE and is_above_shell
            is_failure = code != contract.DONE and own_code != contract.DONE
            if is_hidden or (is_failure and (is_above_shell or was_killed)):
                return own_code
        return code if code == contract.DONE or not was_killed else _read_signal(code, last_line)


def _read_signal(code: int, last_line: bytes) -> int:
    """Return minus the signal that a wrapper passes on by its exit code, else the code.

    It is 128 plus the signal, as of shells, or `sys.exit(-9)`, which Python turns into 247.
    """
    if is_signal_exit_code(code):
        return 128 - code
    if 256 - MAX_SIGNAL <= code < 255:
        return code - 256
    # `setsid --wait` ends with the status of waitpid(2).
    return -(code & 0x7F) if _SETSID_SIGNAL.match(last_line) else code


def reports_child(error: Mapping[str, Any]) -> bool:
    """Return whether an exception only says that another process failed."""
    return error.get("type") == "CalledProcessError"

"""End of a rank's program: its exit code, signal or exception, even behind a wrapper.

The agent sees only the exit code of the process that it has started. That process may be a wrapper,
which may translate the exit code of the program, or end with 0 even if the program failed (`wandb
agent`). The process that joined JAX or reported progress is the program, and its exception, code or
signal counts. A shell is an exception: its exit code counts, because a script chooses which
failures it handles (`|| true`), unless it cannot know of the failure: in a pipeline, or if a Python
below the shell ended with 0 although its child had failed. This module does no I/O.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.root_cause import is_signal_exit_code
from jaxlaunch.records.verdict import MAX_SIGNAL

# Exit code of a Python that an exception ends.
RAISED = 1
# The end of the message of a CalledProcessError, as Python's subprocess writes it.
_CHILD_SIGNAL = re.compile(r"died with <Signals\.\w+: (\d+)>\.$")
# Line that `setsid --wait` of util-linux prints when its child was killed.
_SETSID_SIGNAL = re.compile(rb"setsid: child \d+ did not exit normally")


@dataclasses.dataclass
class ProgramEnd:
    """Reported facts about the end of a rank's program.

    Attributes:
        error: The exception that ended the program.
        task_error: The exception of a task that a worker of a pool sent to its parent.
        other_error: The exception of a Python that is not the program: a wrapper, or a process that
            a wrapper started.
        code: Exit code of the program, or minus the signal.
        parent_pid: Pid of the Python that reported the end of the program as its child, else 0.
        was_signalled: Whether a wrapper has sent the program a signal to end.
        overrides_shell: Whether the end of the program counts even behind a shell.
        ended_first: Whether the program ended before the process that the agent started.
    """

    error: Mapping[str, Any] | None = None
    task_error: Mapping[str, Any] | None = None
    other_error: Mapping[str, Any] | None = None
    code: int | None = None
    parent_pid: int = 0
    was_signalled: bool = False
    overrides_shell: bool = False
    ended_first: bool = False

    def record_child_end(self, parent_pid: int, code: int) -> None:
        """Record the exit code of the program that its parent has reported."""
        self.parent_pid, self.code = parent_pid, code

    def take_other_error(self, error: Mapping[str, Any], *, is_killed: bool) -> None:
        """Record the exception that ended a Python that is not the program.

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
        """Record the exit of another Python, and the argument of its sys.exit.

        If it is the parent of the failed program and ends with 0, a shell above it cannot know of
        the failure.
        """
        if pid == self.parent_pid and not code and self.code != contract.DONE:
            self.overrides_shell = True

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
        requeue_codes: Collection[int],
        last_line: bytes,
    ) -> int:
        """Return the exit code of the rank, or minus the signal that killed the program.

        Args:
            code: Exit code of the process that was started, or minus the signal.
            is_below_shell: Whether a shell has started the program or one of its wrappers.
            has_left: Whether the program ended by itself.
            requeue_codes: Exit codes that ask for a restart. A wrapper may end with one of them
                for any end of the program.
            last_line: The last line of output.
        """
        was_killed = self.ended_first and not has_left
        is_above_shell = self.overrides_shell or not is_below_shell
        # A signal that a wrapper sent is not a failure of the program.
        program_code = None if self.was_signalled and (self.code or 0) < 0 else self.code
        if program_code is not None and code not in requeue_codes:
            is_hidden = code == contract.DONE and is_above_shell
            is_failure = code != contract.DONE and program_code != contract.DONE
            if is_hidden or (is_failure and (is_above_shell or was_killed)):
                return program_code
        return code if code == contract.DONE or not was_killed else _read_signal(code, last_line)


def _read_signal(code: int, last_line: bytes) -> int:
    """Return minus the signal that an exit code stands for, or the code if there is none.

    Shells end with 128 plus the signal, and Python turns `sys.exit(-9)` into 247.
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

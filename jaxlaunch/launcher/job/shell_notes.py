"""Notes on the exit code of a shell in `command:`, which may hide that a program failed. Pure.

The exit code of a job's process decides whether the job is done. A shell has the exit code of its
last command, so a pipeline, `;`, `&` and `||` can hide that of the program. The text is split at
the operators outside of quotes and brackets, and only simple cases produce a note: a wrong note is
worse than a missing one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence

from jaxlaunch.contract import SHELLS

_HARMLESS_LIST = (
    "[ [[ : . alias awk cat cd chmod chown cp date declare df dmesg du echo exit export false find "
    "free grep hash head hostname id jobs kill less ln local ls mkdir mv nproc nvidia-smi printenv "
    "printf pwd read readonly return rm sed set shift shopt sleep sort source tail tee test touch "
    "tput tr trap true type ulimit umask uname unset wait wc whoami yes"
)
# Commands whose failure does not mean that the training failed.
HARMLESS_COMMANDS = frozenset(_HARMLESS_LIST.split())
# Commands that run the program after them.
_PREFIXES = frozenset(("command", "env", "eval", "exec", "nice", "nohup", "stdbuf", "time"))
_KEYWORD_LIST = "if then else elif fi for while until do done case esac function select { }"
# With these words, commands do not run in the order of the text.
_KEYWORDS = frozenset(_KEYWORD_LIST.split())
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*\+?=")
_ERREXIT = re.compile(r"\bset\s+(-\w+\s+)*-(\w*e\w*|o\s+errexit)\b")
_SHORT_OPTIONS = re.compile(r"-[A-Za-z]+")
_OPERATORS = ("||", "&&", "|&", "|", ";", "&", "\n")
# Characters of a command in a note.
MAX_SHOWN_CHARS = 60

ReadScript = Callable[[str], str | None]


def find_exit_code_notes(command: Sequence[str], read_script: ReadScript) -> Iterator[str]:
    """Yield a note for each place where a shell hides the exit code of a program.

    Args:
        command: Arguments of the job's command.
        read_script: Returns the text of a script of the job, or None if it cannot be read.
    """
    shell_index = next(
        (index for index, word in enumerate(command) if os.path.basename(word) in SHELLS), None
    )
    if shell_index is None:
        script = read_script(command[0])
        first_line = (script or "").partition("\n")[0]
        words = first_line[2:].split() if first_line.startswith("#!") else []
        if not any(os.path.basename(word) in SHELLS for word in words):
            return
        options, text = [word for word in words if word.startswith("-")], script
    else:
        options, text = _read_shell_arguments(command[shell_index + 1 :], read_script)
    if text is not None:
        yield from _script_notes(text, " ".join(options))


def _read_shell_arguments(
    arguments: Sequence[str], read_script: ReadScript
) -> tuple[list[str], str | None]:
    """Return the options of a shell, and the script that it runs, or None if it cannot be read."""
    options: list[str] = []
    has_text = False
    for index, word in enumerate(arguments):
        if word == "-o" or (index and arguments[index - 1] == "-o"):
            options.append(word)
        elif word.startswith("-"):
            options.append(word)
            has_text = has_text or (_SHORT_OPTIONS.fullmatch(word) is not None and "c" in word)
        else:
            return options, word if has_text else read_script(word)
    return options, None


def _script_notes(text: str, options: str) -> Iterator[str]:
    commands = split_commands(text)
    has_errexit = _ERREXIT.search(text) is not None or any(
        _SHORT_OPTIONS.fullmatch(option) and "e" in option for option in options.split()
    )
    is_complex = any(_first_word(command) in _KEYWORDS for command, _ in commands)
    if "pipefail" not in text + options:
        for command, operator in commands:
            if operator in ("|", "|&") and _is_program(command):
                yield (
                    f"command: the exit code of `{_shorten(command)}` is lost, because a pipeline "
                    "has the exit code of its last command: begin with `set -o pipefail` (bash)."
                )
                break
    if is_complex:
        return
    yield from _alternative_notes(commands)
    yield from _background_notes(commands)
    if not has_errexit:
        yield from _sequence_notes(commands)


def _alternative_notes(commands: Sequence[tuple[str, str]]) -> Iterator[str]:
    for index, (command, operator) in enumerate(commands):
        if operator != "||" or not _is_program(command):
            continue
        # These run if the command fails.
        later_commands = [later for later, _ in commands[index + 1 :]]
        is_handled = any(_is_program(later) or _handles_failure(later) for later in later_commands)
        if later_commands and not is_handled:
            yield (
                f"command: a failure of `{_shorten(command)}` counts as success, because of "
                f"`|| {_shorten(later_commands[0])}` after it."
            )


def _background_notes(commands: Sequence[tuple[str, str]]) -> Iterator[str]:
    waits_for_code = any(re.match(r"wait\s+\S", command) for command, _ in commands)
    foreground = [command for command, operator in commands if operator != "&"]
    if waits_for_code or any(_is_program(command) for command in foreground):
        return
    for command, operator in commands:
        if operator == "&" and _is_program(command):
            yield (
                f"command: the exit code of `{_shorten(command)}` is lost, because `&` starts it "
                "in the background: leave it out, or use `wait -n` or `wait $!`."
            )
            break


def _sequence_notes(commands: Sequence[tuple[str, str]]) -> Iterator[str]:
    for (command, operator), (next_command, _) in zip(commands, commands[1:], strict=False):
        is_ignored = operator in (";", "\n") and "$?" not in next_command
        if is_ignored and _is_program(command):
            yield (
                f"command: the shell continues with `{_shorten(next_command)}` if "
                f"`{_shorten(command)}` fails: begin with `set -e`, or join them by `&&`."
            )
            break


def split_commands(text: str) -> list[tuple[str, str]]:
    """Return each simple command of a shell's text with the operator after it."""
    commands: list[tuple[str, str]] = []
    current, position = "", 0
    while position < len(text):
        character = text[position]
        if character == "\\":
            # A newline after a backslash only continues the line.
            current += "" if text[position + 1 : position + 2] == "\n" else text[position:][:2]
            position += 2
            continue
        if character in "'\"`(" or text.startswith(("$(", "${"), position):
            end = _skip_quoted(text, position)
            current += text[position:end]
            position = end
            continue
        if character == "#" and (not current or current[-1].isspace()):
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
            continue
        operator = next((name for name in _OPERATORS if text.startswith(name, position)), None)
        # 2>&1, &>file and >&2 are redirections.
        is_redirection = operator in ("&", "|") and (
            current.endswith((">", "<")) or text.startswith("&>", position)
        )
        if operator is None or is_redirection:
            current += character
            position += 1
            continue
        if current.strip():
            commands.append((current.strip(), operator))
        elif commands and operator != "\n":
            commands[-1] = commands[-1][0], operator
        current = ""
        position += len(operator)
    if current.strip():
        commands.append((current.strip(), ""))
    return commands


def _skip_quoted(text: str, start: int) -> int:
    """Return the end of a quoted text or a bracket that starts here."""
    opening = text[start + 1] if text[start] == "$" else text[start]
    if opening in "'`":
        end = text.find(opening, start + 1)
        return len(text) if end < 0 else end + 1
    closing = {"(": ")", "{": "}"}.get(opening, opening)
    position = start + (2 if text[start] == "$" else 1)
    while position < len(text):
        if text[position] == "\\":
            position += 2
        elif text[position] == closing:
            return position + 1
        elif opening != '"' and (text[position] in "'\"`(" or text.startswith("${", position)):
            position = _skip_quoted(text, position)
        else:
            position += 1
    return len(text)


def _first_word(command: str) -> str:
    """Return the name of the program of a command, without assignments and words such as exec."""
    words, has_prefix = command.split(), False
    while words:
        is_option = has_prefix and words[0].startswith("-")
        is_prefix = words[0] in _PREFIXES
        if not (is_option or is_prefix or _ASSIGNMENT.match(words[0])):
            break
        has_prefix = has_prefix or is_prefix
        words.pop(0)
    return os.path.basename(words[0].strip("'\"")) if words else ""


def _is_program(command: str) -> bool:
    word = _first_word(command)
    return bool(word) and word not in HARMLESS_COMMANDS


def _handles_failure(command: str) -> bool:
    """Return whether a command ends the shell with a failure, or reads the exit code."""
    failure = re.search(r"\b(exit|return)\s+[^0\s]|\bfalse\b|\bkill\b", command)
    return "$?" in command or failure is not None


def _shorten(command: str) -> str:
    line = " ".join(command.split())
    return line if len(line) <= MAX_SHOWN_CHARS else f"{line[: MAX_SHOWN_CHARS - 1]}…"

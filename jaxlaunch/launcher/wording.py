"""Formatting of paths, counts, sizes, choices, long values and control characters in messages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxlaunch.launcher.errors import KeyPath

# Longer values and keys are shortened in messages.
MAX_SHOWN_CHARS = 60
# Control characters that a terminal executes: C0, DEL and C1 except tab and newline. They can set
# the clipboard (OSC 52) or the title, and clear the screen. Also characters that a reader cannot
# see: marks that change the direction of text, have no width, or end a line or paragraph in some
# programs (Unicode's Cf, Zl and Zp), and surrogates, which represent bytes of a name that is not
# UTF-8.
CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
# SGR sequences of ECMA-48 change only how the following characters look.
_COLOUR = re.compile(r"(\x1b\[[0-9;:]{0,64}m)")


def shorten_text(text: str) -> str:
    """Return the text, shortened to `MAX_SHOWN_CHARS` characters."""
    return text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}…"


def format_key_path(path: KeyPath) -> str:
    """Format a path as in overrides: `volumes.0.path`."""
    return ".".join(shorten_text(str(key)) for key in path)


def join_choices(options: Sequence[object]) -> str:
    """Join options as `1, 2 or 4`."""
    *others, last = map(str, options)
    return f"{', '.join(others)} or {last}" if others else last


def format_count(number: int, noun: str) -> str:
    """Format a count with its noun: `1 host`, `4 hosts`, `2 processes`."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('s') else 's'}"


def format_duration(value_s: float) -> str:
    """Format whole seconds in the shortest form: 5400 is 1h30m."""
    remaining_s, parts = int(value_s), []
    for letter, unit in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        number, remaining_s = divmod(remaining_s, unit)
        if number:
            parts.append(f"{number}{letter}")
    return "".join(parts) or "0s"


def format_size(size_bytes: float) -> str:
    """Format a number of bytes: `131.2 MiB`."""
    if size_bytes < 1000:
        return f"{size_bytes:.0f} B"
    units = ("KiB", "MiB", "GiB")
    power = next((power for power in (1, 2) if size_bytes / 1024**power < 1000), 3)
    return f"{size_bytes / 1024**power:.1f} {units[power - 1]}"


def os_error_reason(error: OSError) -> str:
    """Return why a system call failed, as the end of a sentence."""
    return (error.strerror or str(error)).lower()


def escape_controls(text: str) -> str:
    """Replace control characters by their escapes."""
    return CONTROL.sub(lambda match: escape_character(match[0], "\\x{:02x}"), text)


def escape_character(character: str, byte_format: str) -> str:
    """Return the escape of a character; `byte_format` is the format of code points below 256."""
    code = ord(character)
    return (byte_format if code < 0x100 else "\\u{:04x}" if code < 0x10000 else "\\U{:08x}").format(
        code
    )


def escape_except_colours(text: str) -> str:
    """Escape the control characters of a line except its colours, which are reset at its end."""
    # Every second part is a colour.
    parts = _COLOUR.split(text)
    parts[::2] = map(escape_controls, parts[::2])
    return "".join(parts) + ("\x1b[0m" if len(parts) > 1 else "")

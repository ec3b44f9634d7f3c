"""Splits the bytes of a stream into lines. A line that is too long comes in pieces; all but the first are marked."""

from __future__ import annotations

from jaxlaunch import contract

CONTINUED = "… "  # before each further piece of a line
_MARK = CONTINUED.encode()


class Lines:
    """The lines of one stream, in pieces of at most `limit` bytes and the mark, cut between characters."""

    def __init__(self, limit: int = contract.MAX_LINE) -> None:
        self._rest = bytearray()  # of the line that has not ended
        self._limit = limit
        self._is_continued = False

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their newlines, and what of the next is too long to keep."""
        *whole, self._rest = (self._rest + data).split(b"\n")
        found: list[bytes] = []
        for line in whole:
            self._cut(line, found)
            found.append(self._piece(line))
            self._is_continued = False
        self._cut(self._rest, found)
        return found

    def end(self) -> list[bytes]:
        """The last line, if the stream ended without a newline."""
        rest, self._rest = self._rest, bytearray()
        return [self._piece(rest)] if rest else []

    def _cut(self, line: bytearray, found: list[bytes]) -> None:
        """Moves whole pieces from the begin of a line to `found`."""
        while len(line) > self._limit:
            at = _boundary(line, self._limit)
            found.append(self._piece(line[:at]))
            self._is_continued = True
            del line[:at]

    def _piece(self, text: bytearray) -> bytes:
        return _MARK + text if self._is_continued else bytes(text)


def _boundary(text: bytearray, limit: int) -> int:
    """Where to cut at `limit` or just before, so that no character of UTF-8 is cut in two."""
    for at in range(limit, max(limit - 4, 0), -1):
        if text[at] & 0xC0 != 0x80:
            return at
    return limit  # not UTF-8

"""The terminal, or the streams, of this command as those of a command in a pod."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator, Sequence

from jaxlaunch.launcher.jobs.exec import rank_pod
from jaxlaunch.launcher.jobs.exec.rank_pod import RankPod
from jaxlaunch.launcher.kubernetes import streams
from jaxlaunch.launcher.kubernetes.streams import CommandStream

# What the signal handlers write to the pipe of the loop.
_RESIZED, _INTERRUPTED = b"r", b"i"


def run_in_pod(pod: RankPod, command: Sequence[str]) -> int:
    """Run a command next to the process of a rank, and return its exit code.

    If stdin and stdout are terminals, the command has a terminal of the same size, which gets every
    key, Ctrl-C too. Otherwise its streams are those of this process, and Ctrl-C is passed on.

    Raises:
        ClusterError: If the command cannot be started, or its connection is cut.
        KeyboardInterrupt: At the second Ctrl-C that is passed on.
    """
    has_terminal = os.isatty(0) and os.isatty(1)
    entry = rank_pod.new_entry()
    with (
        pod.start(command, entry, has_terminal=has_terminal) as stream,
        _catch_signals() as events,
        _raw_terminal() if has_terminal else contextlib.nullcontext(),
    ):
        if has_terminal:
            stream.resize(*os.get_terminal_size(1))
        for kind in _relay(stream, events):
            if kind == _INTERRUPTED:
                pod.interrupt(entry)
            elif has_terminal:
                stream.resize(*os.get_terminal_size(1))
    assert stream.exit_code is not None, "the relay ends with an exit code"
    return stream.exit_code


def _relay(stream: CommandStream, events: int) -> Iterator[bytes]:
    """Pass bytes in both directions until the command ends, and yield each event on the way."""
    unsent, is_open, interrupts = b"", True, 0
    while stream.exit_code is None:
        readers = [events, 0] if is_open and not unsent else [events]
        ready, can_send = stream.wait(readers, is_sending=bool(unsent))
        if stream.fileno() in ready:
            channel, data = stream.receive()
            if channel in (streams.STDOUT, streams.STDERR):
                _write_all(channel, data)
        if events in ready:
            kinds = os.read(events, 64)
            interrupts += kinds.count(_INTERRUPTED)
            if interrupts > 1:
                raise KeyboardInterrupt
            yield from (bytes([kind]) for kind in kinds)
        if can_send:
            stream.send(unsent)
            unsent = b""
        if 0 in ready:
            unsent = os.read(0, streams.PIECE_BYTES)
            is_open = bool(unsent)
            if not is_open:
                stream.close_stdin()


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


@contextlib.contextmanager
def _catch_signals() -> Iterator[int]:
    """Write a byte for SIGWINCH and SIGINT to a pipe, whose other end is yielded."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    kinds = {signal.SIGWINCH: _RESIZED, signal.SIGINT: _INTERRUPTED}

    def report(number: int, _frame: object) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(writer, kinds[signal.Signals(number)])

    previous = {number: signal.signal(number, report) for number in kinds}
    try:
        yield reader
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Pass every key on as it is, and restore the terminal at the end."""
    sys.stdout.flush()
    settings = termios.tcgetattr(0)
    # What the user has typed meanwhile is for the command, too.
    tty.setraw(0, termios.TCSADRAIN)
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, settings)

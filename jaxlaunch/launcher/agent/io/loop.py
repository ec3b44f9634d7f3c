"""Event loop of one thread: descriptors, timers, signals and ended child processes.

It uses epoll directly. With thousands of connections, `selectors` would take as long as the
callbacks themselves.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import select
import signal
import socket
import time
from collections.abc import Callable

READ, WRITE = select.EPOLLIN, select.EPOLLOUT
# Longest wait for an event if no timer is set.
IDLE_S = 60.0

# Called with the mask of the ready events.
ReadyCallback = Callable[[int], None]


def wait_until_ready(fd: int, mask: int, timeout_s: float) -> bool:
    """Return whether a descriptor becomes ready within `timeout_s` seconds."""
    # `select` raises ValueError for descriptors above 1,023, which the leader of a large gang has.
    poll = select.poll()
    poll.register(fd, mask)
    return bool(poll.poll(1000 * timeout_s))


class Timer:
    """Callback that runs later, unless it is cancelled."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Drop the callback. This is allowed at any time, even after it ran."""
        self._callback = None

    def fire(self) -> None:
        """Run the callback, unless it was cancelled."""
        if self._callback is not None:
            self._callback()


class Loop:
    """Event loop. In each turn, callbacks of descriptors run before those of timers."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # Mask and callback of each descriptor.
        self._watched: dict[int, tuple[int, ReadyCallback]] = {}
        # Descriptors that were watched or unwatched since the last poll.
        self._changed_fds: set[int] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_numbers = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._exit_callbacks: dict[int, Callable[[int], None]] = {}
        self._is_running = True
        self._pause_s = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self.watch(self._wake_read.fileno(), READ, lambda mask: self._drain_signals())

    def watch(self, fd: int, mask: int, callback: ReadyCallback) -> None:
        """Call back whenever `fd` is ready. This replaces an earlier callback of `fd`."""
        change = self._epoll.modify if fd in self._watched else self._epoll.register
        change(fd, mask)
        self._watched[fd] = mask, callback
        self._changed_fds.add(fd)

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`, if it is watched."""
        if self._watched.pop(fd, None) is not None:
            self._changed_fds.add(fd)
            # The descriptor may be closed already.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, after `seconds`."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._timer_numbers), timer))
        return timer

    def call_every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back `seconds` after each return of the callback, indefinitely."""

        def run_and_reschedule() -> None:
            callback()
            self.call_later(seconds, run_and_reschedule)

        self.call_later(seconds, run_and_reschedule)

    def on_signal(self, signal_number: int, callback: Callable[[], None]) -> None:
        """Call back for a signal. The callback runs in the loop, not in the signal handler."""
        self._signals[signal_number] = callback
        signal.signal(signal_number, lambda *_: None)

    def on_child_exit(
        self, on_ending: Callable[[int], None], on_reaped: Callable[[int, int, int], None]
    ) -> None:
        """Call back for every child that ends, including adopted orphans.

        While the loop runs, Popen.wait and the like get no exit codes; use `on_exit_of` instead.

        Args:
            on_ending: Called with the pid before the child is reaped, so that the kernel cannot
                reuse the pid.
            on_reaped: Called after the child was reaped with its pid, its exit code (or minus the
                signal), and the most bytes of memory that it or a descendant had.
        """

        def reap_children() -> None:
            while True:
                try:
                    child = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    return
                if child is None:
                    return
                on_ending(child.si_pid)
                _, status, usage = os.wait4(child.si_pid, 0)
                code = os.waitstatus_to_exitcode(status)
                # The unit is KiB (getrusage(2)).
                on_reaped(child.si_pid, code, 1024 * usage.ru_maxrss)
                if (on_exit := self._exit_callbacks.pop(child.si_pid, None)) is not None:
                    on_exit(code)

        self.on_signal(signal.SIGCHLD, reap_children)

    def on_exit_of(self, pid: int, on_exit: Callable[[int], None]) -> None:
        """Call back with the exit code of this child. Requires `on_child_exit`."""
        self._exit_callbacks[pid] = on_exit

    def pause_between_polls(self, seconds: float) -> None:
        """Pause between two polls, so that each finds many ready descriptors.

        With thousands of connections, a poll per message would take most of the time.
        """
        self._pause_s = seconds

    def stop(self) -> None:
        """Make `run` return after the current callback."""
        self._is_running = False

    def run(self) -> None:
        """Run callbacks until `stop`."""
        while self._is_running:
            if self._pause_s:
                time.sleep(self._pause_s)
            timeout_s = IDLE_S
            if self._timers:
                timeout_s = max(0.0, self._timers[0][0] - time.monotonic())
            self._changed_fds.clear()
            for fd, events in self._epoll.poll(timeout_s, len(self._watched)):
                # An earlier callback of this turn may have closed the descriptor, or opened another
                # one with the same number.
                if fd not in self._changed_fds:
                    mask, callback = self._watched[fd]
                    # A broken connection reports other events, and counts as ready for all that are
                    # watched.
                    callback(mask & events or mask)
            while self._is_running and self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2].fire()

    def _drain_signals(self) -> None:
        try:
            signal_numbers = self._wake_read.recv(4096)
        except BlockingIOError:
            return
        # The position of SIGCHLD does not matter, because its callback reaps all ended children.
        for signal_number in dict.fromkeys(signal_numbers):
            if signal_number in self._signals:
                self._signals[signal_number]()

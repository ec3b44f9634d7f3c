"""Event loop with one thread and one epoll for descriptors, timers, signals and ended child processes.

It does not use `selectors`, which with thousands of connections takes as long as the callbacks themselves.
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
# The longest wait if no timer is set.
IDLE_S = 60.0

# Takes the mask of what is ready.
Ready = Callable[[int], None]


class Timer:
    """Callback that is due later."""

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
    """Runs callbacks until `stop`, descriptors before timers, so that a message in time is read before its timeout."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        # Mask and callback of each descriptor.
        self._watched: dict[int, tuple[int, Ready]] = {}
        # Descriptors whose watch began or ended since the last poll.
        self._changed: set[int] = set()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._ends: dict[int, Callable[[int], None]] = {}
        self._running = True
        self._pause_s = 0.0
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self.watch(self._wake_read.fileno(), READ, lambda mask: self._drain_signals())

    def watch(self, fd: int, mask: int, ready: Ready) -> None:
        """Call back whenever `fd` is ready. This replaces an earlier watch of the descriptor."""
        change = self._epoll.modify if fd in self._watched else self._epoll.register
        change(fd, mask)
        self._watched[fd] = mask, ready
        self._changed.add(fd)

    def unwatch(self, fd: int) -> None:
        """End the watch of `fd`, if there is one."""
        if self._watched.pop(fd, None) is not None:
            self._changed.add(fd)
            # The descriptor may be closed already.
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Call back once, after `seconds`."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Call back `seconds` after each return of the callback, without end."""

        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def on_signal(self, number: int, callback: Callable[[], None]) -> None:
        """Call back from the loop and not from the signal handler, so that no other callback is interrupted."""
        self._signals[number] = callback
        signal.signal(number, lambda *_: None)

    def on_child(self, ending: Callable[[int], None], ended: Callable[[int, int], None]) -> None:
        """Call back for every child that ends, adopted orphans included: PID 1 of a container must reap them all.

        Other waits for a process, such as Popen.wait, learn no exit code while the loop runs. Use `on_exit_of` there.

        Args:
            on_ending: Called with the pid while the kernel cannot reuse it yet.
            on_reaped: Called with the pid and the exit code (or minus the signal) after the child was reaped.
        """

        def reap() -> None:
            while True:
                try:
                    found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                except ChildProcessError:
                    return
                if found is None:
                    return
                ending(found.si_pid)
                _, status = os.waitpid(found.si_pid, 0)
                code = os.waitstatus_to_exitcode(status)
                ended(found.si_pid, code)
                if (on_end := self._ends.pop(found.si_pid, None)) is not None:
                    on_end(code)

        self.on_signal(signal.SIGCHLD, reap)

    def on_end_of(self, pid: int, ended: Callable[[int], None]) -> None:
        """Call back with the exit code (or minus the signal) of this child. It requires `on_child_exit`."""
        self._ends[pid] = ended

    def pause_between(self, seconds: float) -> None:
        """Pause between two polls, so that each finds many ready descriptors.

        With thousands of connections, waking up for each message would take most of the time.
        """
        self._pause_s = seconds

    def stop(self) -> None:
        """Make `run` return after the present callback."""
        self._running = False

    def run(self) -> None:
        """Run callbacks until `stop`."""
        while self._running:
            if self._pause_s:
                time.sleep(self._pause_s)
            wait = IDLE_S
            if self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            self._changed.clear()
            for fd, events in self._epoll.poll(wait, len(self._watched)):
                # An earlier callback may have closed the descriptor, or opened another with its number.
                if fd not in self._changed:
                    mask, ready = self._watched[fd]
                    # A broken connection is ready for everything that is watched.
                    ready(mask & events or mask)
            while self._running and self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2].fire()

    def _drain_signals(self) -> None:
        try:
            numbers = self._wake_read.recv(4096)
        except BlockingIOError:
            return
        # The position of SIGCHLD does not matter, because its callback reaps all ended children.
        for number in dict.fromkeys(numbers):
            if number in self._signals:
                self._signals[number]()

"""The event loop: one thread and one epoll for descriptors, timers, signals and ended child processes.

No selector of the standard library: with thousands of connections it takes as long as the callbacks' own work.
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
IDLE_S = 60.0  # the longest wait when no timer is set

Ready = Callable[[int], None]  # takes the mask of what is ready


class Timer:
    """A callback that is due later."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Drops the callback; allowed at any time, also after it ran."""
        self._callback = None

    def fire(self) -> None:
        """Runs the callback, unless it was cancelled."""
        if self._callback is not None:
            self._callback()


class Loop:
    """Runs callbacks until `stop`; descriptors before timers, so that a message in time is read before its timeout."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[int, Ready]] = {}  # what is waited for, and who is called
        self._changed: set[int] = set()  # descriptors whose watch began or ended since the last look
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
        """Calls `ready` whenever `fd` is; replaces an earlier watch of the same descriptor."""
        change = self._epoll.modify if fd in self._watched else self._epoll.register
        change(fd, mask)
        self._watched[fd] = mask, ready
        self._changed.add(fd)

    def unwatch(self, fd: int) -> None:
        """Ends the watch of `fd`, if there is one."""
        if self._watched.pop(fd, None) is not None:
            self._changed.add(fd)
            with contextlib.suppress(OSError):  # it is closed already
                self._epoll.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        """Calls back once, after `seconds`."""
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        """Calls back `seconds` after each return of the callback, for ever."""

        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def on_signal(self, number: int, callback: Callable[[], None]) -> None:
        """Calls back from the loop, not from the signal handler, so that no other callback is interrupted."""
        self._signals[number] = callback
        signal.signal(number, lambda *_: None)

    def on_child(self, ending: Callable[[int], None], ended: Callable[[int, int], None]) -> None:
        """Calls back for every child that ends, an adopted orphan included: PID 1 of a container has to reap them all.

        `ending` gets the pid while the kernel cannot reuse it yet, `ended` the pid and the exit code (minus the signal)
        after it was reaped. What else waits for a process while the loop runs (Popen.wait) learns no exit code: it asks
        `on_end_of`.
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
        """Calls back with the exit code (minus the signal) when this child has ended; needs `on_child`."""
        self._ends[pid] = ended

    def pause_between(self, seconds: float) -> None:
        """Waits this long after each look at the descriptors: the next one then finds many that are ready.

        With thousands of connections most of the time would go into being woken for each message.
        """
        self._pause_s = seconds

    def stop(self) -> None:
        """Has `run` return after the present callback."""
        self._running = False

    def run(self) -> None:
        """Runs callbacks until `stop`."""
        while self._running:
            if self._pause_s:
                time.sleep(self._pause_s)
            wait = IDLE_S
            if self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            self._changed.clear()
            for fd, events in self._epoll.poll(wait, len(self._watched)):
                if fd not in self._changed:  # an earlier callback may have closed it, or opened another
                    mask, ready = self._watched[fd]
                    ready(mask & events or mask)  # of a connection that is broken: all that is waited for
            while self._running and self._timers and self._timers[0][0] <= time.monotonic():
                heapq.heappop(self._timers)[2].fire()

    def _drain_signals(self) -> None:
        try:
            numbers = self._wake_read.recv(4096)
        except BlockingIOError:
            return
        for number in dict.fromkeys(numbers):  # SIGCHLD last or first is the same: its callback reaps all there are
            if number in self._signals:
                self._signals[number]()

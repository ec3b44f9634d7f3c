"""One thread, one selector: descriptors, timers, signals and ended children, each handled as it happens."""

from __future__ import annotations

import heapq
import itertools
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
IDLE_S = 60.0  # the longest wait when no timer is set

Ready = Callable[[int], None]  # takes the mask of what is ready


class Timer:
    """A call to come. `cancel` may be called at any time, also after it was made."""

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self._callback = None

    def fire(self) -> None:
        if self._callback is not None:
            self._callback()


class Loop:
    """Runs callbacks until `stop`; descriptors before timers, so that who speaks in time is heard in time."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._signals: dict[int, Callable[[], None]] = {}
        self._running = True
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        signal.set_wakeup_fd(self._wake_write.fileno(), warn_on_full_buffer=False)
        self.watch(self._wake_read.fileno(), READ, lambda mask: self._drain_signals())

    def watch(self, fd: int, mask: int, ready: Ready) -> None:
        """Calls `ready` whenever `fd` is; replaces what was watched for on it."""
        if fd in self._selector.get_map():
            self._selector.modify(fd, mask, ready)
        else:
            self._selector.register(fd, mask, ready)

    def unwatch(self, fd: int) -> None:
        if fd in self._selector.get_map():
            self._selector.unregister(fd)

    def after(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(callback)
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._order), timer))
        return timer

    def every(self, seconds: float, callback: Callable[[], None]) -> None:
        def again() -> None:
            callback()
            self.after(seconds, again)

        self.after(seconds, again)

    def on_signal(self, number: int, callback: Callable[[], None]) -> None:
        """Calls back from the loop, not from the handler, so that nothing is interrupted half-way."""
        self._signals[number] = callback
        signal.signal(number, lambda *_: None)

    def on_child(self, ending: Callable[[int], None], ended: Callable[[int, int], None]) -> None:
        """Calls back for every child that ends, ours or an adopted orphan: as PID 1 of a container we reap them all.

        `ending` is called with the pid while its number cannot be anybody else's yet, `ended` with the exit code (minus
        the signal) once it was reaped. The only wait of the agent.
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
                ended(found.si_pid, os.waitstatus_to_exitcode(status))

        self.on_signal(signal.SIGCHLD, reap)

    def stop(self) -> None:
        self._running = False

    def run(self) -> None:
        while self._running:
            wait = IDLE_S
            if self._timers:
                wait = max(0.0, self._timers[0][0] - time.monotonic())
            for key, mask in self._selector.select(wait):
                if key.fd in self._selector.get_map():  # an earlier callback may have closed it
                    key.data(mask)
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

"""A host's connection to its leader.

A host connects to host 0 and retries until it succeeds. The leader sends a challenge, which begins
a handshake in which both sides prove that they have the key of the run. The leader then admits the
host with a "welcome" or refuses it, for good or for now. After that the leader sends orders, and
this host sends reports. Either side closes a connection that has been silent for too long.
`MemberState` holds the attempt that the leader has ordered, and outlives connections.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.protocol import (
    FROM_LEADER,
    HandshakeError,
    Hello,
    HostHandshake,
    Refused,
    Welcome,
)
from jaxlaunch.launcher.agent.io.link import SILENCE_TIMEOUT_S, Link, Message, create_channel
from jaxlaunch.launcher.agent.io.loop import READ, WRITE, Loop, Timer
from jaxlaunch.records import codec
from jaxlaunch.records.codec import MalformedError
from jaxlaunch.records.verdict import Verdict

# --- state of the member --------------------------------------------------------------------------

# Signals within this time count as one, because a terminal and the launcher may both pass on one
# Ctrl-C.
SAME_SIGNAL_S = 0.5


class StopRequest(enum.Enum):
    """Meaning of a signal to stop: the first, a repetition of it, or a second one."""

    REPEATED = enum.auto()
    STOP = enum.auto()
    KILL = enum.auto()


class IdleAction(enum.Enum):
    """Action of a host after the last process of a finished attempt has ended."""

    REPORT = enum.auto()
    WAIT_FOR_LEADER = enum.auto()
    FINISH = enum.auto()


class MemberState:
    """The attempt that a host takes part in, and the verdict on it. It does no I/O."""

    def __init__(self, config: Config) -> None:
        self._replaces, self._is_leader = config.job.replaces, config.is_leader
        # Attempts are numbered across generations of pods.
        self.attempt = 0
        self.has_started = self.is_stopping = False
        self.verdict: Verdict | None = None
        self.signalled_at: float | None = None

    @property
    def awaits_first_start(self) -> bool:
        """Return whether no attempt has started or failed on this host yet."""
        return self.verdict is None and not self.has_started

    def start_attempt(self, attempt: int) -> None:
        """Begin an attempt."""
        self.attempt, self.has_started, self.is_stopping, self.verdict = attempt, True, False, None

    def end_attempt(self, attempt: int, verdict: Verdict) -> None:
        """Record the leader's verdict on an attempt."""
        self.attempt, self.verdict = attempt, verdict

    def take_signal(self, now: float) -> StopRequest:
        """Return the meaning of a SIGTERM or SIGINT. The second signal kills the processes."""
        if self.signalled_at is None:
            self.signalled_at = now
            return StopRequest.STOP
        return StopRequest.REPEATED if now - self.signalled_at < SAME_SIGNAL_S else StopRequest.KILL

    def idle_action(self, *, has_leader: bool) -> IdleAction | None:
        """Return the action after the last process has ended, or None without a verdict."""
        if self.verdict is None:
            return None
        if has_leader:
            return IdleAction.REPORT
        may_get_leader = self._replaces and not self._is_leader and self.signalled_at is None
        if may_get_leader and contract.outcome_for_code(self.verdict.code).restarts:
            return IdleAction.WAIT_FOR_LEADER
        return IdleAction.FINISH


# --- dialling -------------------------------------------------------------------------------------

RETRY_S, LOG_PERIOD_S, CONNECT_TIMEOUT_S = 0.3, 10.0, 5.0
_NOT_TRIED = "not tried yet"

Addresses = list[tuple[Any, ...]]


class Dialer:
    """Connects to the leader and calls `on_connected` with the socket.

    It retries until it succeeds, and logs the reason of the failures every ten seconds. Each call
    of `dial` establishes one connection.
    """

    def __init__(
        self,
        loop: Loop,
        address: tuple[str, int],
        *,
        say: Callable[[str], None],
        on_connected: Callable[[socket.socket], None],
    ) -> None:
        self._loop, self._address, self._say, self._on_connected = loop, address, say, on_connected
        self._dialed_at: float | None = None
        self._retry_timer, self._log_timer = Timer(lambda: None), Timer(lambda: None)
        self._reason = _NOT_TRIED

    @property
    def failure_text(self) -> str:
        """Reason of the missing connection, such as "connection refused for 40 s"."""
        now = time.monotonic()
        return f"{self._reason} for {now - (self._dialed_at or now):.0f} s"

    def dial(self, after_s: float = 0.0) -> None:
        """Connect after `after_s` seconds, and retry until it succeeds or `stop` is called."""
        if self._dialed_at is None:
            self._dialed_at = time.monotonic()
            self._log_timer = self._loop.call_later(LOG_PERIOD_S, self._log_reason)
        self._retry_timer = self._loop.call_later(after_s, self._resolve_address)

    def stop(self) -> None:
        """Stop the retries. A connection that is being established will be closed."""
        self._retry_timer.cancel()
        self._log_timer.cancel()
        self._dialed_at = None

    def _log_reason(self) -> None:
        address = ":".join(map(str, self._address))
        self._say(f"cannot reach the leader (host 0) at {address}: {self.failure_text}")
        self._log_timer = self._loop.call_later(LOG_PERIOD_S, self._log_reason)

    def _resolve_address(self) -> None:
        host, port = self._address
        try:
            flags = socket.AI_NUMERICHOST
            addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
            self._connect_to(addresses)
            return
        except (socket.gaierror, UnicodeError):
            # The address is a name. It is resolved in a thread, because DNS may take a minute and
            # the loop must still handle a SIGTERM.
            pass
        if self._reason == _NOT_TRIED:
            self._reason = "the name server has not answered"
        answers: list[Addresses] = []
        read_end, write_end = os.pipe()

        def look_up() -> None:
            # A UnicodeError means that the name is longer than DNS allows.
            with contextlib.suppress(OSError, UnicodeError):
                answers.append(list(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
            os.close(write_end)

        def on_resolved(mask: int) -> None:
            self._loop.unwatch(read_end)
            os.close(read_end)
            # The dialer may have been stopped in the meantime.
            if self._dialed_at is not None and answers and answers[0]:
                self._connect_to(answers[0])
            elif self._dialed_at is not None:
                self._retry_later("name not resolved")

        self._loop.watch(read_end, READ, on_resolved)
        threading.Thread(target=look_up, daemon=True).start()

    def _connect_to(self, addresses: Addresses, faults: Sequence[str] = ()) -> None:
        """Connect to the first address, or to the next one if that fails.

        Args:
            addresses: Addresses that were not tried yet, at least one.
            faults: Reasons why earlier addresses of the leader did not answer.
        """
        (family, kind, protocol, _, address), *others = addresses

        def try_next(code: int) -> None:
            reasons = [*faults, os.strerror(code).lower()]
            if others:
                self._connect_to(others, reasons)
            else:
                self._retry_later(", ".join(dict.fromkeys(reasons)))

        try:
            sock = socket.socket(family, kind, protocol)
        except OSError as error:
            # This host may have no IPv6, or no free descriptor.
            try_next(error.errno or errno.EAFNOSUPPORT)
            return
        sock.setblocking(False)
        code = sock.connect_ex(address)
        if code not in (0, errno.EINPROGRESS):
            sock.close()
            try_next(code)
            return

        def finish(code: int) -> None:
            timeout.cancel()
            self._loop.unwatch(sock.fileno())
            if code == 0 and self._dialed_at is not None:
                self.stop()
                self._on_connected(sock)
                return
            sock.close()
            if self._dialed_at is not None:
                try_next(code)

        def on_ready(mask: int) -> None:
            finish(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

        timeout = self._loop.call_later(CONNECT_TIMEOUT_S, lambda: finish(errno.ETIMEDOUT))
        self._loop.watch(sock.fileno(), WRITE, on_ready)

    def _retry_later(self, reason: str) -> None:
        self._reason = reason
        self._retry_timer = self._loop.call_later(RETRY_S, self._resolve_address)


# --- the connection -------------------------------------------------------------------------------

# The leader may be silent for this long on a new connection, because it may have to accept
# thousands of others first.
CHALLENGE_TIMEOUT_S = 60.0
RETRY_REFUSED_S = 2.0


class LeaderConnection:
    """Connection to the leader, which passes the leader's orders to `handlers`.

    An order is passed on only after the leader has proven that it has the key of the run.
    """

    def __init__(
        self,
        config: Config,
        loop: Loop,
        *,
        say: Callable[[str], None],
        hello: Callable[[], Hello],
        handlers: dict[str, Callable[[Any], None]],
        on_admitted: Callable[[], None],
        on_refused: Callable[[Refused], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Create the object; `dial` connects.

        Args:
            config: Configuration of the agent.
            loop: Event loop of the agent.
            say: Writes a message for people.
            hello: Returns the message with which this host joins.
            handlers: Function for each kind of order.
            on_admitted: Called when the leader admits this host.
            on_refused: Called when the leader refuses this host for good.
            on_lost: Called with the reason when the connection to a leader that admitted this host
                is lost.
        """
        self.last_message_at = self._ticked_at = time.monotonic()
        self._config, self._loop, self._say = config, loop, say
        self._hello, self._handlers = hello, handlers
        self._on_admitted, self._on_refused, self._on_lost = on_admitted, on_refused, on_lost
        self._dialer = Dialer(loop, config.leader_address, say=say, on_connected=self._on_connected)
        self._link: Link | None = None
        self._patience_s = SILENCE_TIMEOUT_S
        self._handshake = HostHandshake(config.handshake_key)
        # Reason why the last leader that was reached did not admit this host.
        self._refusal: str | None = None

    @property
    def is_admitted(self) -> bool:
        """Return whether this host is connected to a leader that has admitted it."""
        return self._link is not None and self._link.epoch is not None

    @property
    def leader_address(self) -> str:
        """Address at which other hosts reach the leader, or "" without a connection."""
        return "" if self._link is None else self._link.peer

    @property
    def dial_fault(self) -> str:
        """Reason why this host is not connected to a leader."""
        return self._refusal or self._dialer.failure_text

    def dial(self, after_s: float = 0.0) -> None:
        """Connect, and retry until the leader answers."""
        self._dialer.dial(after_s)

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message for the leader; drop it if no leader has admitted this host."""
        if self._link is not None and self._link.epoch is not None:
            self._link.send(kind, **fields)

    def check_silence(self, now: float) -> None:
        """Close a connection whose other end has been silent for too long."""
        stalled_s, self._ticked_at = now - self._ticked_at, now
        # If this process itself was stopped or starved, it could not receive a message meanwhile.
        if stalled_s > SILENCE_TIMEOUT_S / 2:
            self.last_message_at += stalled_s
        if self._link is not None and now - self.last_message_at > self._patience_s:
            self._drop_link(self._link, f"no message for {self._patience_s:.0f} s")

    def _on_connected(self, sock: socket.socket) -> None:
        try:
            peer = str(sock.getpeername()[0])
            channel = create_channel(self._config.certificates, is_server=False)
            self._link = Link(self._loop, sock, self._on_message, self._on_closed, peer, channel)
        except OSError:
            # The other side has closed the connection in the meantime.
            sock.close()
            self.dial(RETRY_S)
            return
        self._handshake = HostHandshake(self._config.handshake_key)
        self.last_message_at, self._patience_s = time.monotonic(), CHALLENGE_TIMEOUT_S

    def _on_message(self, link: Link, message: Message) -> None:
        self.last_message_at, self._patience_s = time.monotonic(), SILENCE_TIMEOUT_S
        if link.epoch is None:
            self._handle_handshake(link, message)
            return
        kind = message["type"]
        # Host 0 may have a newer version, with orders that this version does not know.
        if (handler := self._handlers.get(kind)) is None:
            return
        try:
            order = codec.read_record(FROM_LEADER[kind], message) if kind in FROM_LEADER else None
        except MalformedError as error:
            self._drop_link(link, f"it sent a `{kind}` whose {error}")
            return
        handler(order)

    def _handle_handshake(self, link: Link, message: Message) -> None:
        """Handle a message from a peer that has not yet proven that it leads this run."""
        try:
            if message["type"] == "challenge":
                hello = self._hello().to_wire()
                link.send("hello", **self._handshake.answer_challenge(message, hello))
                return
            fields = self._handshake.open_answer(message)
            if message["type"] == "welcome":
                link.epoch = codec.read_record(Welcome, fields).epoch
                self._on_admitted()
                return
            refused = codec.read_record(Refused, fields)
        except (HandshakeError, MalformedError) as error:
            self._drop_link(link, str(error))
            return
        link.close()
        self._link = None
        if refused.may_retry:
            self._retry_refused(f"refused this host: {refused.message}")
        else:
            self._on_refused(refused)

    def _drop_link(self, link: Link, reason: str) -> None:
        link.close()
        self._on_closed(link, reason)

    def _on_closed(self, link: Link, reason: str) -> None:
        self._link = None
        if link.epoch is not None:
            self._on_lost(reason)
            return
        hint = "it may belong to another run, or have another gang_secret"
        self._retry_refused(f"did not admit this host: {reason}; {hint}")

    def _retry_refused(self, reason: str) -> None:
        if reason != self._refusal:
            self._say(f"host 0 {reason}")
        self._refusal = reason
        self.dial(RETRY_REFUSED_S)

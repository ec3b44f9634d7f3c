"""A host's connection to its leader: dialled until the leader admits this host, and closed once it is silent."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.handshake import HostSide, NotProven
from jaxlaunch.launcher.agent.gang.messages import FROM_LEADER, Refused, Welcome
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.io.dial import RETRY_S, Dialer
from jaxlaunch.launcher.agent.io.link import SILENCE_S, Link, Message, secured
from jaxlaunch.launcher.agent.io.loop import Loop
from jaxlaunch.records import checked
from jaxlaunch.records.checked import Malformed

# The leader's silence on a new connection: it may have thousands to accept before this one.
CHALLENGE_S = 60.0
RETRY_REFUSED_S = 2.0

Handler = Callable[[Any], None]


class LeaderConnection:
    """Passes the orders of a leader that has proven the run's key to their `handlers`, and drops all others."""

    def __init__(
        self,
        config: Config,
        loop: Loop,
        *,
        say: Callable[[str], None],
        hello: Callable[[], Hello],
        handlers: dict[str, Handler],
        on_admitted: Callable[[], None],
        on_refused: Callable[[Refused], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Connect nothing yet.

        Args:
            config: This host's place in the gang.
            loop: Delivers what the leader sends.
            say: Writes a message for people.
            hello: Returns what this host says of itself when it joins.
            handlers: Called with the order of each kind.
            on_admitted: Called once the leader takes this host in.
            on_refused: Called with a refusal that is final.
            on_lost: Called with the reason, when a leader that admitted this host is lost.
        """
        self.last_message_at = self._ticked_at = time.monotonic()
        self._config, self._loop, self._say = config, loop, say
        self._hello, self._handlers = hello, handlers
        self._on_admitted, self._on_refused, self._on_lost = on_admitted, on_refused, on_lost
        self._dialer = Dialer(loop, config.leader, say=say, connected=self._connected)
        self._link: Link | None = None
        self._patience_s = SILENCE_S
        self._side = HostSide(config.key)
        # Why the leader that was reached last did not admit this host.
        self._refusal: str | None = None

    @property
    def is_admitted(self) -> bool:
        """Whether a leader has admitted this host, and the connection stands."""
        return self._link is not None and self._link.epoch is not None

    @property
    def address(self) -> str:
        """The leader's address as the other hosts reach it; "" without a connection."""
        return "" if self._link is None else self._link.peer

    @property
    def fault(self) -> str:
        """Why there is no connection yet."""
        return self._refusal or self._dialer.reason

    def dial(self, after_s: float = 0.0) -> None:
        """Connect, and retry until the leader answers."""
        self._dialer.dial(after_s)

    def send(self, kind: str, /, **fields: Any) -> None:
        """Queue a message for the leader that has admitted this host; without one, drop it."""
        if self._link is not None and self._link.epoch is not None:
            self._link.send(kind, **fields)

    def check_silence(self, now: float) -> None:
        """Close a connection whose other end has been silent for too long."""
        away_s, self._ticked_at = now - self._ticked_at, now
        # This process itself was stopped or starved, and could not receive anything.
        if away_s > SILENCE_S / 2:
            self.last_message_at += away_s
        if self._link is not None and now - self.last_message_at > self._patience_s:
            self._drop(self._link, f"no message for {self._patience_s:.0f} s")

    def _connected(self, sock: socket.socket) -> None:
        try:
            peer, channel = str(sock.getpeername()[0]), secured(self._config.certificates, is_server=False)
            self._link = Link(self._loop, sock, self._take, self._closed, peer, channel)
        except OSError:
            # The other side closed meanwhile.
            sock.close()
            return self.dial(RETRY_S)
        self._side = HostSide(self._config.key)
        self.last_message_at, self._patience_s = time.monotonic(), CHALLENGE_S

    def _take(self, link: Link, message: Message) -> None:
        self.last_message_at, self._patience_s = time.monotonic(), SILENCE_S
        if link.epoch is None:
            return self._shake_hands(link, message)
        kind = message["type"]
        # Orders that are not known are those of a newer host 0.
        if (handler := self._handlers.get(kind)) is None:
            return
        try:
            order = checked.read(FROM_LEADER[kind], message) if kind in FROM_LEADER else None
        except Malformed as error:
            return self._drop(link, f"it sent a `{kind}` whose {error}")
        handler(order)

    def _shake_hands(self, link: Link, message: Message) -> None:
        """Take a message before this host is admitted: whoever answers may be no leader of this run."""
        try:
            if message["type"] == "challenge":
                return link.send("hello", **self._side.hello(message, self._hello().to_wire()))
            fields = self._side.opened(message)
            if message["type"] == "welcome":
                link.epoch = checked.read(Welcome, fields).epoch
                return self._on_admitted()
            refused = checked.read(Refused, fields)
        except (NotProven, Malformed) as error:
            return self._drop(link, str(error))
        link.close()
        self._link = None
        if refused.may_retry:
            self._retry(f"refused this host: {refused.message}")
        else:
            self._on_refused(refused)

    def _drop(self, link: Link, reason: str) -> None:
        link.close()
        self._closed(link, reason)

    def _closed(self, link: Link, reason: str) -> None:
        self._link = None
        if link.epoch is not None:
            return self._on_lost(reason)
        hint = "it may belong to another run, or have another gang_secret"
        self._retry(f"did not admit this host: {reason}; {hint}")

    def _retry(self, reason: str) -> None:
        if reason != self._refusal:
            self._say(f"host 0 {reason}")
        self._refusal = reason
        self.dial(RETRY_REFUSED_S)

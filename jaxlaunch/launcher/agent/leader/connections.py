"""Where connections come in: each is challenged, and who has the run's key gets to the leader.

Whoever has not is told nothing, and costs little: their number, time and bytes are bounded, and so is what is logged.
"""

from __future__ import annotations

import errno
import itertools
import socket
import time
from collections.abc import Callable

from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.handshake import LeaderSide, NotProven
from jaxlaunch.launcher.agent.gang.rendezvous import Hello
from jaxlaunch.launcher.agent.io.link import Link, Message, secured
from jaxlaunch.launcher.agent.io.loop import READ, Loop
from jaxlaunch.launcher.agent.io.ports import listen

HELLO_S = 10.0  # a connection without a hello by then is closed
FULL_S = 1.0  # for connections to close, when this process can open no more
AT_ONCE = 256  # connections that are accepted in one turn of the loop, which may sleep between two
SPARE = 16  # connections that may be without a hello, beside one for each host
LOG_S = 60.0  # between two lines about strangers

Admitted = Callable[[Link, LeaderSide, Hello], None]


class Gate:
    """Listens, and calls `admitted` with each connection whose hello proves the key. Raises OSError when the port is
    in use."""

    def __init__(self, config: Config, loop: Loop, *, say: Callable[[str], None], admitted: Admitted) -> None:
        self._loop, self._say, self._admitted = loop, say, admitted
        self._key, self._certificates, self._most = config.key, config.certificates, config.hosts + SPARE
        self._waiting: dict[Link, tuple[float, LeaderSide]] = {}  # since when, the longest first
        self._late: set[Link] = set()  # those that were silent for too long at the last tick
        self._strangers = 0  # that the next line about them counts
        self._stranger = ""  # the last one
        self._logged_at: float | None = None
        self._listener = listen(config.address, config.leader[1])
        self._listener.setblocking(False)
        self._listen()

    def tick(self, now: float) -> None:
        """Closes connections that are silent for too long, and logs how many strangers there were.

        Each is closed at the second tick that finds it so: what came while this process was busy is read between them.
        """
        late = set(itertools.takewhile(lambda link: now - self._waiting[link][0] > HELLO_S, self._waiting))
        for link in late & self._late:
            self._turn_away(link, f"it sent no hello within {HELLO_S:.0f} s")
        self._late = late - self._late
        if self._strangers and (self._logged_at is None or now - self._logged_at >= LOG_S):
            count = "a connection" if self._strangers == 1 else f"{self._strangers} connections, the last"
            self._say(f"closed {count} from {self._stranger}")
            self._strangers, self._logged_at = 0, now

    def _listen(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, lambda mask: self._accept())

    def _accept(self) -> None:
        room = self._most - len(self._waiting)  # who came in this turn could not answer yet, and is not turned away
        for _ in range(max(1, min(AT_ONCE, room))):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):  # it would be ready again at once
                    self._say(f"cannot accept another host: {error.strerror}")
                    self._loop.unwatch(self._listener.fileno())
                    self._loop.after(FULL_S, self._listen)
                return  # else none is left, or the other side closed before it was accepted
            if len(self._waiting) >= self._most:  # hosts answer at once: the longest silent is none
                self._turn_away(next(iter(self._waiting)), "it sent no hello before many others came")
            self._challenge(sock, address[0])

    def _challenge(self, sock: socket.socket, peer: str) -> None:
        try:
            channel = secured(self._certificates, is_server=True)
            link = Link(self._loop, sock, self._message, self._turn_away, peer, channel)
        except OSError:  # the other side closed meanwhile
            return sock.close()
        side = LeaderSide(self._key)
        self._waiting[link] = time.monotonic(), side
        link.send("challenge", **side.challenge())

    def _message(self, link: Link, message: Message) -> None:
        _, side = self._waiting[link]
        try:
            hello = Hello.from_wire(side.opened(message))
        except NotProven as error:
            return self._turn_away(link, str(error))
        except (KeyError, TypeError, ValueError) as error:
            return self._turn_away(link, f"its hello is invalid: {str(error)[:200]}")
        del self._waiting[link]
        self._admitted(link, side, hello)

    def _turn_away(self, link: Link, reason: str) -> None:
        if self._waiting.pop(link, None) is None:
            return  # it was admitted, and closes before its answer is sent
        link.close()
        self._strangers += 1
        self._stranger = f"{link.peer}: {reason}"

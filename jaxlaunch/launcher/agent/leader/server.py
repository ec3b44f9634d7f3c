"""Server of host 0: passes events of hosts to `Gang`, and performs its actions.

`Gate` admits connections whose hello proves the key of the run. A stranger without it learns
nothing and costs little: the number, the duration and the bytes of such connections are bounded,
and so are the log lines about them.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import itertools
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from typing import Any

from jaxlaunch.launcher.agent.gang.clock import Clock
from jaxlaunch.launcher.agent.gang.config import Config
from jaxlaunch.launcher.agent.gang.protocol import HandshakeError, Hello, LeaderHandshake, Refused
from jaxlaunch.launcher.agent.io import resources
from jaxlaunch.launcher.agent.io.link import (
    HEARTBEAT_S,
    SILENCE_TIMEOUT_S,
    Link,
    Message,
    bracket_ipv6,
    choose_free_port,
    create_channel,
    encode_message,
    open_listener,
)
from jaxlaunch.launcher.agent.io.loop import READ, Loop
from jaxlaunch.launcher.agent.leader import gang as actions
from jaxlaunch.launcher.agent.leader.gang import Action, Gang, Stage
from jaxlaunch.launcher.agent.leader.publishers import PodLog
from jaxlaunch.launcher.agent.leader.reporter import Reporter
from jaxlaunch.records.members import Members
from jaxlaunch.records.verdict import Verdict
from jaxlaunch.runs import history
from jaxlaunch.runs.run_folder import RunFolder, settle_records

TICK_INTERVAL_S = 0.2
# With MANY_HOSTS or more hosts, the loop pauses between polls, so that each poll finds many ready
# connections.
MANY_HOSTS, POLL_PAUSE_S = 100, 0.02
# Interval at which a host receives the state of the gang, for few and for many hosts.
STATE_INTERVAL_S, MANY_HOSTS_STATE_INTERVAL_S = HEARTBEAT_S, 2.0
# A connection without a hello is closed after this time.
HELLO_TIMEOUT_S = 10.0
# Time to wait for connections to close if this process can open no more.
ACCEPT_RETRY_S = 1.0
# Largest number of connections that are accepted in one turn of the loop.
ACCEPT_BATCH = 256
# Number of connections that may be without a hello, in addition to one for each host.
SPARE_CONNECTIONS = 16
# Seconds between two log lines about strangers.
LOG_INTERVAL_S = 60.0


class Gate:
    """Accepts connections, and calls `admit` for each whose hello proves the key.

    Raises:
        OSError: The port is in use.
    """

    def __init__(
        self,
        config: Config,
        loop: Loop,
        *,
        say: Callable[[str], None],
        admit: Callable[[Link, LeaderHandshake, Hello], None],
    ) -> None:
        self._config, self._loop, self._say, self._admit = config, loop, say, admit
        self._max_waiting = config.hosts + SPARE_CONNECTIONS
        # Connections without a hello, with their time of arrival, the oldest first.
        self._waiting: dict[Link, tuple[float, LeaderHandshake]] = {}
        # Connections without a hello that were too old at the last tick.
        self._late_links: set[Link] = set()
        # Number of strangers since the last log line, and a description of the last one.
        self._stranger_count, self._last_stranger = 0, ""
        self._logged_at: float | None = None
        # Warning about the listener, for the summary.
        self.note: str | None = None
        self._listener = self._open_listener()
        self._listener.setblocking(False)
        self._start_accepting()

    def _open_listener(self) -> socket.socket:
        """Listen on the pod's address, or on every interface if no interface has that address."""
        address, port = self._config.listen_address, self._config.leader_address[1]
        try:
            return open_listener(address, port)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL or not self._config.pod_ip:
                raise
        key = "key" if self._config.certificates is None else "certificates and key"
        self.note = (
            f"the pod's address, {address}, is not one of its interfaces: its agent listens on all "
            f"of them, and the gang's {key} still decide who may join"
        )
        self._say(self.note)
        return open_listener("", port)

    def close_late_connections(self, now: float) -> None:
        """Close connections that are silent for too long, and log the number of strangers.

        A connection is closed at the second tick that finds it too old: between the two ticks, the
        loop reads a hello that arrived while this process was busy.
        """

        def is_late(link: Link) -> bool:
            return now - self._waiting[link][0] > HELLO_TIMEOUT_S

        late_links = set(itertools.takewhile(is_late, self._waiting))
        for link in late_links & self._late_links:
            self._close_stranger(link, f"it sent no hello within {HELLO_TIMEOUT_S:.0f} s")
        self._late_links = late_links - self._late_links
        is_due = self._logged_at is None or now - self._logged_at >= LOG_INTERVAL_S
        if self._stranger_count and is_due:
            count = "a connection"
            if self._stranger_count > 1:
                count = f"{self._stranger_count} connections, the last"
            self._say(f"closed {count} from {self._last_stranger}")
            self._stranger_count, self._logged_at = 0, now

    def _start_accepting(self) -> None:
        self._loop.watch(self._listener.fileno(), READ, lambda mask: self._accept_connections())

    def _accept_connections(self) -> None:
        # A connection of this turn cannot have answered yet, so it must not be closed in favor of
        # another one of this turn.
        free_slots = self._max_waiting - len(self._waiting)
        for _ in range(max(1, min(ACCEPT_BATCH, free_slots))):
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                # If no descriptor is free, the listener would be ready again at once, so it is not
                # watched for a while. Otherwise no connection is left, or the other side has closed
                # it.
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._say(f"cannot accept another host: {error.strerror}")
                    self._loop.unwatch(self._listener.fileno())
                    self._loop.call_later(ACCEPT_RETRY_S, self._start_accepting)
                return
            if len(self._waiting) >= self._max_waiting:
                # Hosts answer at once, so the oldest connection is not from a host.
                oldest = next(iter(self._waiting))
                self._close_stranger(oldest, "it sent no hello before many others came")
            self._send_challenge(sock, address[0])

    def _send_challenge(self, sock: socket.socket, peer: str) -> None:
        try:
            channel = create_channel(self._config.certificates, is_server=True)
            link = Link(self._loop, sock, self._take_hello, self._close_stranger, peer, channel)
        except OSError:
            # The other side has closed the connection already.
            sock.close()
            return
        handshake = LeaderHandshake(self._config.handshake_key)
        self._waiting[link] = time.monotonic(), handshake
        link.send("challenge", **handshake.challenge_fields())

    def _take_hello(self, link: Link, message: Message) -> None:
        _, handshake = self._waiting[link]
        try:
            hello = Hello.from_wire(handshake.open_hello(message))
        except HandshakeError as error:
            self._close_stranger(link, str(error))
            return
        except (KeyError, TypeError, ValueError) as error:
            self._close_stranger(link, f"its hello is invalid: {str(error)[:200]}")
            return
        del self._waiting[link]
        self._admit(link, handshake, hello)

    def _close_stranger(self, link: Link, reason: str) -> None:
        if self._waiting.pop(link, None) is None:
            # The host was admitted, and the connection failed before the answer was sent.
            return
        link.close()
        self._stranger_count += 1
        self._last_stranger = f"{link.peer}: {reason}"


class Peer:
    """A host that has joined, and its connection."""

    def __init__(self, hello: Hello, link: Link) -> None:
        self.hello, self.host, self.link = hello, hello.host, link
        # Seconds since the last message of the host during which this process was stopped or
        # starved and could not receive one.
        self.excused_s = 0.0


class Server:
    """Runs the gang on host 0. It calls `finish` once, after every agent has received the verdict.

    Raises:
        OSError: The port is in use.
    """

    def __init__(
        self,
        config: Config,
        loop: Loop,
        hello: Hello,
        clock: Clock,
        run_folder: RunFolder,
        pod_log: PodLog,
        *,
        say: Callable[[str], None],
        finish: Callable[[Verdict, bool], None],
    ) -> None:
        self._config, self._loop, self._say, self._finish = config, loop, say, finish
        self._gate = Gate(config, loop, say=say, admit=self._answer_hello)
        max_connections = resources.allow_connections(config.hosts)
        if max_connections is not None:
            limit = f"a limit of {max_connections} open files (ulimit -Hn)"
            say(f"warning: {limit} is too low for {config.hosts} hosts")
        if config.hosts >= MANY_HOSTS:
            loop.pause_between_polls(POLL_PAUSE_S)
        now = time.monotonic()
        records = settle_records(run_folder, config.uid)
        started_at = time.time() - (now - clock.started_at)
        clock.add_earlier_seconds(history.sum_seconds(records, started_at, config.run_started_at))
        deadline_at = None
        if config.job.deadline_s is not None:
            spent_s = sum(clock.seconds_by_cause(clock.started_at).values())
            deadline_at = clock.started_at + config.job.deadline_s - spent_s
        self._gang = Gang(config, hello, records, now, deadline_at)
        self._reporter = Reporter(config, self._gang, loop, clock, run_folder, pod_log, say)
        if self._gate.note is not None:
            self._reporter.add_note(self._gate.note)
        self._epoch, self._coordinator = secrets.token_hex(8), ""
        self._peers: dict[int, Peer] = {}
        # Whether a host has joined since the last start, so that agents.json must be written at the
        # next one.
        self._has_new_host = False
        # Assignment of ranks to hosts that agents.json shows.
        self._listed_table: Members | None = None
        # Whether a host joined after the start of the attempt and is missing in agents.json.
        self._has_late_host = False
        self._is_acting = False
        self._finish_action: actions.Finish | None = None
        self._ticked_at = now
        # Number of the group of hosts that receives the state of the gang at the next tick.
        self._turn = 0

    def start_waiting(self) -> None:
        """Log the attempts of earlier pods, and begin to wait for hosts."""
        for record in self._gang.records[-3:]:
            name = f"previous attempt {record.attempt} (generation {record.generation})"
            self._say(f"{name}: {record.verdict.message}")
        self._reporter.write_start(time.monotonic())
        self._loop.call_every(TICK_INTERVAL_S, self._on_tick)

    # --- connections ------------------------------------------------------------------------------

    def _answer_hello(self, link: Link, handshake: LeaderHandshake, hello: Hello) -> None:
        """Admit or refuse a host that has proven the run's key."""
        refusal = self._gang.check_hello(hello)
        if refusal is not None:
            refused = Refused(refusal.message, refusal.exit_code, refusal.may_retry)
            fields = handshake.seal_answer("refused", **dataclasses.asdict(refused))
            link.send("refused", **fields)
            link.close()
            self._gang.on_host_refused(hello, refusal, time.monotonic())
            self._perform_actions()
            return
        link.send("welcome", **handshake.seal_answer("welcome", epoch=self._epoch))
        if not link.is_open:
            # The host has disconnected after its hello.
            return
        previous = self._peers.get(hello.host)
        if previous is not None:
            previous.link.close()
        peer = self._peers[hello.host] = Peer(hello, link)
        link.epoch = self._epoch
        link.on_message = functools.partial(self._take_message, peer)
        link.on_close = functools.partial(self._drop_peer, peer)
        self._has_new_host = True
        self._has_late_host = self._has_late_host or self._gang.stage is Stage.RUN
        self._gang.on_host_joined(hello, time.monotonic())
        self._perform_actions()

    def _take_message(self, peer: Peer, link: Link, message: Message) -> None:
        now, host, kind = time.monotonic(), peer.host, message["type"]
        peer.excused_s = 0.0
        self._gang.members.record_message(host, now)
        try:
            if kind == "beat":
                is_current = self._gang.take_beat(host, message["attempt"], message["ranks"], now)
                if is_current and (metrics := message.get("metrics")) is not None:
                    self._reporter.add_metrics(metrics)
            elif kind == "note":
                self._reporter.add_note(str(message["text"]))
            else:
                self._gang.take_message(host, message, now)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._say(f"{peer.hello.description} sent an invalid message: {str(error)[:200]}")
            link.close()
            self._drop_peer(peer, link, "it sent an invalid message")
        if self._gang.actions:
            self._perform_actions()

    def _drop_peer(self, peer: Peer, link: Link, reason: str) -> None:
        if self._peers.get(peer.host) is not peer:
            return
        del self._peers[peer.host]
        self._gang.on_host_lost(peer.host, reason, time.monotonic())
        self._perform_actions()

    # --- actions ----------------------------------------------------------------------------------

    def _perform_actions(self) -> None:
        """Perform the actions of the gang, including those that are added meanwhile."""
        if self._is_acting:
            return
        self._is_acting = True
        try:
            while self._gang.actions:
                self._perform_action(self._gang.actions.pop(0))
        finally:
            self._is_acting = False
        now = time.monotonic()
        if self._finish_action is not None and not self._reporter.is_busy(now):
            self._finish(self._finish_action.verdict, self._finish_action.leaves_alone)

    def _perform_action(self, action: Action) -> None:  # noqa: C901 - a case per action
        now, reporter = time.monotonic(), self._reporter
        match action:
            case actions.Say(text):
                self._say(text)
            case actions.Send(hosts, kind, fields):
                self._send_message(hosts, kind, **fields)
            case actions.SendStart(hosts):
                self._send_start(hosts)
            case actions.Disconnect(host):
                self._peers.pop(host).link.close()
            case actions.StartAttempt(follows_lost_attempt):
                self._start_attempt(follows_lost_attempt, now)
            case actions.JudgeAttempt(verdict):
                reporter.report_verdict(verdict, now)
            case actions.RecordAttempt(verdict):
                self._gang.on_attempt_recorded(reporter.record_attempt(verdict, now), now)
            case actions.AwaitHosts():
                reporter.await_hosts(now)
            case actions.WriteEnd(verdict, leaves_alone, hold_s):
                reporter.write_end(verdict, leaves_alone=leaves_alone, hold_s=hold_s)
                if not leaves_alone:
                    self._send_ping(list(self._peers), time.monotonic())
                self._gang.on_end_written(time.monotonic())
            case actions.PublishEnd(verdict, leaves_alone):
                reporter.publish_end(verdict, leaves_alone=leaves_alone)
            case actions.Finish():
                self._finish_action = action

    def _send_message(self, hosts: Iterable[int], kind: str, **fields: Any) -> None:
        message = encode_message(kind, **fields)
        for host in hosts:
            # The host may have been lost since the gang decided to send this.
            if (peer := self._peers.get(host)) is not None:
                peer.link.send_encoded(message)

    def _start_attempt(self, follows_lost_attempt: bool, now: float) -> None:
        attempts = self._gang.attempt_number - 1
        is_new_leader = attempts > 0 and not self._gang.records
        if (self._has_new_host and follows_lost_attempt) or is_new_leader:
            # The log of a lost pod is deleted with the pod, so its lines are repeated here.
            self._reporter.log_past(attempts)
        # Without a new host, the table changes if a lost host is left out or replaced by a spare.
        if self._has_new_host or self._gang.members.table != self._listed_table:
            self._has_new_host = False
            self._list_agents()
        self._coordinator = f"{bracket_ipv6(self._config.leader_address[0])}:{choose_free_port()}"
        self._reporter.start_attempt(now)

    def _send_start(self, hosts: Iterable[int]) -> None:
        number, members = self._gang.attempt_number, self._gang.members.table.to_wire()
        attempt = {"attempt": number, "coordinator": self._coordinator, "members": members}
        self._send_message(hosts, "start", **attempt, **self._reporter.state.start_fields())

    def _list_agents(self) -> None:
        self._has_late_host, self._listed_table = False, self._gang.members.table
        peers = [peer for _, peer in sorted(self._peers.items())]
        self._reporter.list_agents([(peer.hello, peer.link.peer) for peer in peers])

    # --- time -------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        now = time.monotonic()
        stalled_s, self._ticked_at = now - self._ticked_at, now
        if stalled_s > SILENCE_TIMEOUT_S / 2:
            for peer in self._peers.values():
                peer.excused_s += stalled_s
        self._gate.close_late_connections(now)
        self._close_silent(now)
        self._send_state(now)
        if self._has_late_host and self._turn == 0:
            # Thousands of hosts may join at once, so agents.json is written once per round of
            # turns.
            self._list_agents()
        self._reporter.report_progress(now)
        self._gang.overdue_since = self._reporter.overdue_since(now)
        self._gang.on_tick(now)
        self._perform_actions()
        self._reporter.save_state(now)

    def _close_silent(self, now: float) -> None:
        last_message_at = self._gang.members.last_message_at

        def is_silent(host: int) -> bool:
            return now - last_message_at[host] > SILENCE_TIMEOUT_S

        for host in list(itertools.takewhile(is_silent, last_message_at)):
            silent_s, peer = now - last_message_at[host], self._peers.get(host)
            if peer is not None and silent_s - peer.excused_s > SILENCE_TIMEOUT_S:
                peer.link.close()
                self._drop_peer(peer, peer.link, f"no message for {SILENCE_TIMEOUT_S:.0f} s")

    def _send_state(self, now: float) -> None:
        """Send the state of the gang to the hosts whose turn it is.

        Sending it to all hosts at once would delay urgent messages.
        """
        hosts, interval_s = self._config.hosts, STATE_INTERVAL_S
        if hosts >= MANY_HOSTS:
            interval_s = MANY_HOSTS_STATE_INTERVAL_S
        turns = round(interval_s / TICK_INTERVAL_S)
        turn_hosts = [host for host in range(self._turn, hosts, turns) if host in self._peers]
        self._turn = (self._turn + 1) % turns
        if turn_hosts:
            self._send_ping(turn_hosts, now)

    def _send_ping(self, hosts: Iterable[int], now: float) -> None:
        self._send_message(hosts, "ping", gang=self._reporter.state.gang_state(now))

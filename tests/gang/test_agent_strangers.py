"""A live gang of two under fire: messages of strangers who know all but its key, thousands at each stage."""

from __future__ import annotations

import json
import random
import re
import socket
import struct
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from jaxlaunch import contract
from jaxlaunch.launcher.agent.gang.config import read_versions
from jaxlaunch.launcher.agent.gang.protocol import HostHandshake
from tests.gang.agents import PATIENCE_S, Gang, job, program

pytestmark = pytest.mark.extended

SEEDS = {"gathering": range(10), "running": range(10, 20)}
MESSAGES = 1_000  # of each seed
AT_ONCE = 50
MOST_GROWTH, MOST_LOG = 64 * 1024 * 1024, 1_000_000  # bytes
UID, PODS = "the-uid", ("pod-0", "pod-1")
SECRET = bytes(range(32))
STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    2**70,
    1e308,
    "",
    "\udce9",
    "x" * 5_000,
    [],
    {},
    [[[[]]]],
    {"a": {"b": []}},
)
EPOCH = "0" * 16
VERSIONS = read_versions()


def hello(chance: random.Random) -> dict[str, Any]:
    """What a host of this gang says of itself, or would if it were to end it."""
    host = chance.randrange(3)
    found = {
        "host": host,
        "generation": chance.choice((0, 0, 1)),
        "pod": chance.choice(PODS),
        "hostname": socket.gethostname(),
        "node": "",
        "versions": chance.choice((VERSIONS, VERSIONS | {"jax": "9.9.9"})),
        "spec": chance.choice(("f" * 64, "another")),
        "pid": 1,
        "metrics_port": 9400,
        "fault": chance.choice((None, "the gang must end")),
    }
    if chance.random() < 0.5:
        found[chance.choice(list(found))] = chance.choice(STRANGE)
    return found


def greeting(chance: random.Random, challenge: dict[str, Any]) -> bytes:
    """A hello with a key that strangers may have: none, the uid, the file's name; or the gang's own, of elsewhere."""
    if chance.random() < 0.2:
        challenge, key = {"type": "challenge", "nonce": "0" * 32}, SECRET + UID.encode()
    else:
        key = chance.choice((b"", UID.encode(), b"key", SECRET[:16] + UID.encode(), SECRET))
    message = {"type": "hello", **HostHandshake(key).answer_challenge(challenge, hello(chance))}
    if chance.random() < 0.4:
        message[chance.choice(list(message))] = chance.choice(STRANGE)
    return line(message)


def order(chance: random.Random, challenge: dict[str, Any]) -> bytes:
    """Messages that the leader obeys once a host is admitted."""
    about = {"attempt": chance.randrange(3), "rank": 1, "status": {}, "epoch": EPOCH}
    kinds = (
        "stop",
        "kill",
        "note",
        "gone",
        "event",
        "beat",
        "stacks",
        "verdict",
        "leave",
        "welcome",
        "challenge",
    )
    orders = [
        {"type": chance.choice(kinds), "n": number, "kind": "error", **about} for number in range(3)
    ]
    first = chance.choice(([], [greeting(chance, challenge)]))
    return b"".join([*first, *map(line, orders)])


def old_hello(chance: random.Random, challenge: dict[str, Any]) -> bytes:
    """As the protocol before the handshake had it, with the uid."""
    return line({"type": "hello", "uid": UID, **hello(chance)})


def noise(chance: random.Random, challenge: dict[str, Any]) -> bytes:
    """Bytes without a meaning, and lines that are hard to read."""
    return chance.choice(
        (
            lambda: chance.randbytes(chance.randrange(1, 2_000)),
            lambda: b"[" * chance.randrange(1, 60_000) + b"\n",
            lambda: b'{"type":' * chance.randrange(1, 5_000) + b"\n",
            lambda: b'{"type": "hello", "nonce": ' + b"9" * chance.randrange(1, 15_000) + b"}\n",
            lambda: line(chance.choice(STRANGE)),
            lambda: b"x" * 250_000,
            lambda: b"",
        )
    )()


def mutated(chance: random.Random, challenge: dict[str, Any]) -> bytes:
    """A hello with some of its bytes changed, cut, doubled or left out."""
    found = bytearray(greeting(chance, challenge))
    for _ in range(chance.randrange(1, 8)):
        at = chance.randrange(len(found) + 1)
        found[at : at + chance.randrange(3)] = chance.choice(
            (b"", b"\x00", b'"', b"\\ud800", b"\n", bytes(found[:at]))
        )[:9_000]
    return bytes(found)


KINDS: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
    greeting,
    order,
    old_hello,
    noise,
    mutated,
)


def line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def fire(port: int, seed: int) -> list[bytes]:
    """Sends the messages of a seed, each on a connection of its own; returns what came back beside the challenge."""
    chance, told = random.Random(seed), []
    for _ in range(MESSAGES // AT_ONCE):
        with ExitStack() as stack:
            socks = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(AT_ONCE)
            ]
            for sock in socks:
                sock.settimeout(PATIENCE_S)
                challenge = json.loads(sock.recv(65536))
                told += (
                    []
                    if challenge.keys() == {"type", "nonce"}
                    else [json.dumps(challenge).encode()]
                )
                try:
                    sock.sendall(chance.choice(KINDS)(chance, challenge))
                    sock.shutdown(socket.SHUT_WR)
                except OSError:  # the leader has heard enough
                    pass
            told += filter(None, map(rest, socks))
    return told


def rest(sock: socket.socket) -> bytes:
    """What the leader sends until it closes the connection."""
    try:
        found = sock.recv(65536)
    except ConnectionResetError:
        found = b""
    sock.setsockopt(
        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
    )  # its port is free again at once
    return found


def memory(pid: int) -> int:
    """The most memory that a process has had, in bytes."""
    found = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def test_twenty_thousand_messages_of_strangers_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    env = {contract.UID: UID, contract.GANG_SECRET: str(tmp_path / "key")}
    command = program(tmp_path, "mark('up'); wait_for('go')")
    with Gang(tmp_path, job(command), hosts=2, env=env) as gang:
        gang.start(0, env={contract.POD_UID: PODS[0]})
        gang.until("the leader", lambda: listens(gang.port))
        leader = gang.agents[0]
        before = memory(leader.pid)
        for stage, seeds in SEEDS.items():
            for seed in seeds:
                told = fire(gang.port, seed)
                assert not told, (stage, seed, told[:3])
                assert leader.poll() is None, (stage, seed, gang.talk[-2_000:])
            if stage == "gathering":
                gang.start(1, env={contract.POD_UID: PODS[1]}).until_marked("up-0", "up-1")
        growth = memory(leader.pid) - before
        gang.allow("go")
        codes = gang.wait()
    assert codes == [0, 0] and gang.summary["status"] == "done" and len(gang.attempts) == 1, (
        gang.talk[-2_000:]
    )
    assert growth < MOST_GROWTH and len(gang.talk) < MOST_LOG, (growth, len(gang.talk))
    assert "Traceback" not in gang.talk and UID not in gang.talk and "refused" not in gang.talk
    assert re.search(r"closed \d+ connections, the last from 127\.0\.0\.1: ", gang.talk)


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True

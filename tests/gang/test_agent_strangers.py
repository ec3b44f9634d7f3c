"""A live gang of two under fire: thousands of messages of strangers who know all but its key."""

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
from tests.gang.agents import PATIENCE_S, Gang, make_job, write_program

pytestmark = pytest.mark.extended

SEEDS = {"gathering": range(4), "running": range(4, 8)}
MESSAGES = 1_000  # of each seed
CONNECTIONS = 50
MAX_GROWTH_BYTES, MAX_LOG_BYTES = 64 * 1024 * 1024, 1_000_000  # bytes
UID, PODS = "the-uid", ("pod-0", "pod-1")
SECRET = bytes(range(32))
STRANGE_VALUES: tuple[Any, ...] = (
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


def make_hello(rng: random.Random) -> dict[str, Any]:
    """Return what a host of this gang sends, or would send to end it."""
    host = rng.randrange(3)
    fields = {
        "host": host,
        "generation": rng.choice((0, 0, 1)),
        "pod": rng.choice(PODS),
        "hostname": socket.gethostname(),
        "node": "",
        "versions": rng.choice((VERSIONS, VERSIONS | {"jax": "9.9.9"})),
        "spec": rng.choice(("f" * 64, "another")),
        "pid": 1,
        "metrics_port": 9400,
        "fault": rng.choice((None, "the gang must end")),
    }
    if rng.random() < 0.5:
        fields[rng.choice(list(fields))] = rng.choice(STRANGE_VALUES)
    return fields


def make_greeting(rng: random.Random, challenge: dict[str, Any]) -> bytes:
    """Return a hello with a wrong key, or with the right one for another challenge."""
    if rng.random() < 0.2:
        challenge, key = {"type": "challenge", "nonce": "0" * 32}, SECRET + UID.encode()
    else:
        key = rng.choice((b"", UID.encode(), b"key", SECRET[:16] + UID.encode(), SECRET))
    message = {"type": "hello", **HostHandshake(key).answer_challenge(challenge, make_hello(rng))}
    if rng.random() < 0.4:
        message[rng.choice(list(message))] = rng.choice(STRANGE_VALUES)
    return encode_line(message)


def make_orders(rng: random.Random, challenge: dict[str, Any]) -> bytes:
    """Return messages that the leader obeys once a host is admitted."""
    fields = {"attempt": rng.randrange(3), "rank": 1, "status": {}, "epoch": EPOCH}
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
        {"type": rng.choice(kinds), "n": number, "kind": "error", **fields} for number in range(3)
    ]
    first = rng.choice(([], [make_greeting(rng, challenge)]))
    return b"".join([*first, *map(encode_line, orders)])


def make_old_hello(rng: random.Random, challenge: dict[str, Any]) -> bytes:
    """Return a hello of the protocol before the handshake, with the uid."""
    return encode_line({"type": "hello", "uid": UID, **make_hello(rng)})


def make_noise(rng: random.Random, challenge: dict[str, Any]) -> bytes:
    """Return bytes without a meaning, or lines that are hard to parse."""
    return rng.choice(
        (
            lambda: rng.randbytes(rng.randrange(1, 2_000)),
            lambda: b"[" * rng.randrange(1, 60_000) + b"\n",
            lambda: b'{"type":' * rng.randrange(1, 5_000) + b"\n",
            lambda: b'{"type": "hello", "nonce": ' + b"9" * rng.randrange(1, 15_000) + b"}\n",
            lambda: encode_line(rng.choice(STRANGE_VALUES)),
            lambda: b"x" * 250_000,
            lambda: b"",
        )
    )()


def mutate_greeting(rng: random.Random, challenge: dict[str, Any]) -> bytes:
    """Return a hello with some of its bytes changed, cut, doubled or left out."""
    message = bytearray(make_greeting(rng, challenge))
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(message) + 1)
        message[at : at + rng.randrange(3)] = rng.choice(
            (b"", b"\x00", b'"', b"\\ud800", b"\n", bytes(message[:at]))
        )[:9_000]
    return bytes(message)


MESSAGE_KINDS: tuple[Callable[[random.Random, dict[str, Any]], bytes], ...] = (
    make_greeting,
    make_orders,
    make_old_hello,
    make_noise,
    mutate_greeting,
)


def encode_line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"


def send_messages(port: int, seed: int) -> list[bytes]:
    """Send the messages of a seed, each on its own connection; return unexpected answers."""
    rng, answers = random.Random(seed), []
    for _ in range(MESSAGES // CONNECTIONS):
        with ExitStack() as stack:
            socks = [
                stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                for _ in range(CONNECTIONS)
            ]
            for sock in socks:
                sock.settimeout(PATIENCE_S)
                challenge = json.loads(sock.recv(65536))
                answers += (
                    []
                    if challenge.keys() == {"type", "nonce"}
                    else [json.dumps(challenge).encode()]
                )
                try:
                    sock.sendall(rng.choice(MESSAGE_KINDS)(rng, challenge))
                    sock.shutdown(socket.SHUT_WR)
                except OSError:  # the leader has heard enough
                    pass
            answers += filter(None, map(read_rest, socks))
    return answers


def read_rest(sock: socket.socket) -> bytes:
    """Return what the leader sends until it closes the connection."""
    try:
        answer = sock.recv(65536)
    except ConnectionResetError:
        answer = b""
    # Its port is free again at once.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return answer


def peak_memory(pid: int) -> int:
    """Return the peak memory of a process in bytes."""
    match = re.search(r"^VmHWM:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


def test_messages_of_strangers_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(SECRET)
    env = {contract.UID: UID, contract.GANG_SECRET: str(tmp_path / "key")}
    command = write_program(tmp_path, "mark('up'); wait_for('go')")
    with Gang(tmp_path, make_job(command), hosts=2, env=env) as gang:
        gang.start(0, env={contract.POD_UID: PODS[0]})
        gang.wait_until("the leader", lambda: is_listening(gang.port))
        leader = gang.agents[0]
        initial_memory = peak_memory(leader.pid)
        for stage, seeds in SEEDS.items():
            for seed in seeds:
                answers = send_messages(gang.port, seed)
                assert not answers, (stage, seed, answers[:3])
                assert leader.poll() is None, (stage, seed, gang.stderr[-2_000:])
            if stage == "gathering":
                gang.start(1, env={contract.POD_UID: PODS[1]}).wait_for_marks("up-0", "up-1")
        growth = peak_memory(leader.pid) - initial_memory
        gang.release("go")
        codes = gang.wait()
    assert codes == [0, 0], gang.stderr[-2_000:]
    assert gang.summary["status"] == "done", gang.stderr[-2_000:]
    assert len(gang.attempts) == 1, gang.stderr[-2_000:]
    assert growth < MAX_GROWTH_BYTES and len(gang.stderr) < MAX_LOG_BYTES, (
        growth,
        len(gang.stderr),
    )
    assert "Traceback" not in gang.stderr
    assert UID not in gang.stderr
    assert "refused" not in gang.stderr
    assert re.search(r"closed \d+ connections, the last from 127\.0\.0\.1: ", gang.stderr)


def is_listening(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True

"""What anyone may write to an agent beside its gang's own port: the scrape and profile port, and the progress pipe."""

from __future__ import annotations

import json
import random
import re
import socket
from pathlib import Path

from tests import mutate
from tests.gang.agents import Gang, job, program

COUNT = 20_000  # messages, of each kind
SEED = 16
# Rank 0 writes mutated reports, but none that its program ended: those are believed.
WRITES = f"""
import random, select
from tests import mutate
fd = int(os.environ["JAXLAUNCH_PROGRESS_FD"])
def write(data):
    while data:
        select.select([], [fd], [])
        try:
            data = data[os.write(fd, data):]
        except BlockingIOError:
            pass
seeds = [json.dumps(each).encode() for each in (
    {{"phase": "step", "step": 120}}, {{"restored": 80}}, {{"committed": 120}}, {{"note": "a take-over"}},
    {{"metrics": {{"loss": 1.5, "step": 120}}}}, {{"profile": {{"id": 1, "state": "tracing", "step": 3}}}},
    {{"phase": "data", "step": 7, "jax": None, "pid": 4711}},
)]
mark("up")
if RANK == 0:
    for line in mutate.lines(seeds, {COUNT}, random.Random({SEED})):
        write(line + b"\\n")
    for value in ("x", "\\x1b", "\\udce9"):
        write(b'{{"metrics": {{"text": "' + value.encode(errors="surrogateescape") * 64_000 + b'"}}}}\\n')
    write(b"[" * 1_000_000)
    write(b"\\n" * 1_000_000)
mark("wrote")
wait_for("go")
"""
REQUESTS = (
    b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /profile?steps=3 HTTP/1.1\r\nHost: a\r\nOrigin: null\r\n\r\n",
    b"POST /profile?steps=3 HTTP/1.1\r\nHost: a\r\nContent-Length: 0\r\n\r\n",
)


def peak_kib(pid: int) -> int:
    """The most memory that the process had so far, in KiB."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found
    return int(found[1])


def mutated(chance: random.Random) -> bytes:
    """A request with bytes changed, cut or inserted."""
    data = bytearray(chance.choice(REQUESTS))
    for _ in range(chance.randrange(4)):
        at = chance.randrange(len(data) + 1)
        data[at : at + chance.randrange(9)] = chance.choice((b"", chance.randbytes(3), *mutate.WORDS))
    return bytes(data)


def bombard(ports: list[int], count: int, chance: random.Random) -> None:
    """Sends that many requests, of which one in eight is never read or answered."""
    held: list[socket.socket] = []
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=30)
        held.append(connection)
        try:
            connection.sendall(mutated(chance))
            if chance.random() < 0.5:
                connection.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it was closed for a newer one
        if len(held) > 8:
            held.pop(chance.randrange(8)).close()
    for connection in held:
        connection.close()


def test_no_bytes_at_the_scrape_port_or_in_the_progress_pipe_end_a_gang_or_fill_it(tmp_path: Path) -> None:
    with Gang(tmp_path, job(program(tmp_path, WRITES)), hosts=2) as gang:
        gang.start().until_marked("up-0", "up-1")
        gang.until("its addresses", (gang.run_dir / "agents.json").exists)
        listed = json.loads((gang.run_dir / "agents.json").read_text())
        bombard([int(agent["address"].rpartition(":")[2]) for agent in listed], COUNT, random.Random(SEED))
        gang.until_marked("wrote-0", "wrote-1")
        peaks = [peak_kib(agent.pid) for agent in gang.agents.values()]
        gang.allow("go")
        assert gang.wait() == [0, 0], gang.talk[-5_000:]
    assert gang.verdict["cause"] == "done"
    assert max(peaks) < 64 * 1024
    assert len(gang.talk) + len(gang.out) < 1_000_000 and (gang.run_dir / "summary.json").stat().st_size < 1_000_000

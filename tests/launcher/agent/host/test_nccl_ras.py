"""The query of NCCL's RAS. The texts are those of NVIDIA's user guide and source."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxlaunch.launcher.agent.gang import nccl
from jaxlaunch.launcher.agent.gang.nccl import describe_faults
from tests.launcher.agent.host.fake_ras import play, server

HEAD = """NCCL version 2.29.1+cuda13.0 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      4          8            1         32       32

Communicators... ({seconds}s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
"""
ROW = "{0:5d}  {1:8d}         4         8        32        32   {2}\n"
MEMBER = "  Rank {0} -- GPU {0} managed by process 48307{0} on node 172.16.64.210\n"


def make_answer(*rows: str, errors: str = "", warnings: str = "", seconds: str = "0.00") -> str:
    """Return what RAS prints: communicators, silent ranks, and those that differ."""
    table = "".join(ROW.format(number, 1, row) for number, row in enumerate(rows))
    faults = f"Errors\n======\n\n{errors}Warnings\n========\n\n{warnings}"
    return f"{HEAD.format(seconds=seconds)}{table}\n{faults}"


HEALTHY = make_answer("RUNNING      OK")
COUNTS = "  Communicator ranks have different {0} operation counts\n"
LAGGING_2_24 = make_answer(
    "RUNNING  MISMATCH",
    warnings="#0-0 (27a079b828ff1a75) MISMATCH\n"
    + COUNTS.format("collective")
    + "  26 ranks have launched up to operation 6650\n  6 ranks have launched up to "
    "operation 6649\n" + "".join(MEMBER.format(rank) for rank in (0, 2, 3, 4, 5, 7)),
)
ONE_BEHIND = "  Rank {0} has launched up to operation {1} -- GPU 5 managed by process 7 on node n\n"
LAGGING_2_26 = make_answer(
    "RUNNING  MISMATCH",
    warnings="#0-0 (27a079b828ff1a75) MISMATCH\n"
    + COUNTS.format("AllReduce")
    + "  31 ranks have launched up to operation 6650\n"
    + ONE_BEHIND.format(5, 6649)
    + "\n"
    + COUNTS.format("AllGather")
    + "  31 ranks have launched up to operation 8\n"
    + "  Rank 5 has not launched any operations -- GPU 5 managed by process 7 on node n\n\n",
)
HALF_BEHIND = LAGGING_2_26.replace(
    "  31 ranks have launched up to operation 6650\n",
    "  16 ranks have launched up to operation 2\n",
)
MISSING = """INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487984 on node 172.16.64.213 managing GPU 5

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
{rank}
"""
TIMEOUT = "TIMEOUT\n  Encountered 2 communication timeouts while gathering communicator data\n\n"
MISSING_RANK = (
    "process 3487984 on node 172.16.64.213 managing GPU 5 {0}; #0-0: rank 21 gives no answer"
)
INCOMPLETE_2_24 = make_answer(
    "RUNNING  INCOMPLETE",
    errors=MISSING.format(rank="  The missing rank: 21"),
    warnings=TIMEOUT,
    seconds="2.05",
)
INCOMPLETE_2_29 = make_answer(
    "RUNNING  INCOMPLETE",
    errors=MISSING.format(
        rank="  Rank 21 -- GPU 5 managed by process 3487984 on node 172.16.64.213"
    ),
)
DEAD = make_answer(
    "RUNNING  INCOMPLETE", errors=MISSING.format(rank="  The missing rank: 21")
).replace(
    "INCOMPLETE\n  Missing communicator data from 1 job process",
    "DEAD\n  1 job process is considered dead (unreachable via the RAS network)",
)
STATUS = make_answer(
    "FINALIZE  MISMATCH",
    "RUNNING      OK",
    warnings="#0-0 (9e17999afaa87dbb) MISMATCH\n  Communicator ranks have different status\n"
    "  26 ranks have status UNKNOWN\n  4 ranks have status RUNNING\n"
    + "".join(MEMBER.format(rank) for rank in (0, 8))
    + "  Rank 4 has status INIT -- GPU 4 managed by process 507289 on node 172.16.64.210\n",
)
SEVERAL = make_answer(
    "RUNNING  INCOMPLETE",
    "RUNNING  ERROR,MISMATCH",
    errors="#0-0 (01) INCOMPLETE\n  Missing communicator data from 2 ranks\n  The missing "
    "ranks: 3,7\n\n"
    "#1-0 (02) ERROR\n  Asynchronous errors on 2 ranks\n  2 ranks reported REMOTE_ERROR\n"
    + MEMBER.format(1)
    + "  Rank 2 -- [process information not found]\n\n",
    warnings="#1-0 (02) MISMATCH\n"
    + COUNTS.format("Broadcast")
    + "  3 ranks have launched up to operation 9\n"
    "  Rank 1 has not launched any operations -- [process information not found]\n\n",
)
MANY = make_answer(
    "RUNNING  INCOMPLETE",
    errors="DEAD\n" + "".join(f"  Process {n} on node n managing GPU 0\n" for n in range(9)),
)


def stay_silent(peer: socket.socket) -> None:
    """A process that was stopped: the kernel takes the connection, and nobody answers."""
    while peer.recv(1000):
        pass


def play_all(text: str) -> Callable[[socket.socket], None]:
    return play("SERVER PROTOCOL 2\nOK\n", text)


HEAD_LINES = HEAD.format(seconds="0.00").partition("Group")[0]
PIECES = [INCOMPLETE_2_24[at : at + 20] for at in range(0, len(INCOMPLETE_2_24), 20)]
CUT = INCOMPLETE_2_24[: INCOMPLETE_2_24.index("#0-0")]
NO_ANSWER, IS_DEAD = map(MISSING_RANK.format, ("gives no answer", "is dead"))
SLOW = "process 3487984 on node 172.16.64.213 managing GPU 5 gives no answer"
CASES: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "healthy": (play_all(HEALTHY), ""),
    "lagging ranks, 2.24": (
        play_all(LAGGING_2_24),
        "#0-0: ranks 0, 2, 3, 4, 5, 7 are behind (6649 of 6650)",
    ),
    "a lagging rank by operation, 2.26": (
        play_all(LAGGING_2_26),
        "#0-0: rank 5 is behind in AllReduce (6649 of 6650); #0-0: rank 5 is behind in "
        "AllGather (0 of 8)",
    ),
    "many behind without names": (
        play_all(HALF_BEHIND),
        "#0-0: 16 ranks are behind in AllReduce (2 of 6649); #0-0: rank 5 is behind in "
        "AllGather (0 of 8)",
    ),
    "a missing rank, 2.24": (play_all(INCOMPLETE_2_24), NO_ANSWER),
    "a missing rank, 2.29": (play_all(INCOMPLETE_2_29), NO_ANSWER),
    "a dead process": (play_all(DEAD), IS_DEAD),
    "ranks of unlike states": (
        play_all(STATUS),
        "#0-0: ranks 0, 8 have status RUNNING; #0-0: rank 4 has status INIT",
    ),
    "several communicators": (
        play_all(SEVERAL),
        "#0-0: ranks 3, 7 give no answer; #1-0: ranks 1, 2 reported REMOTE_ERROR; "
        "#1-0: rank 1 is behind in Broadcast (0 of 9)",
    ),
    "more than a line has room for": (
        play_all(MANY),
        "; ".join(f"process {n} on node n managing GPU 0 is dead" for n in range(6)) + "; 3 more",
    ),
    "no communicators": (play_all(f"{HEAD_LINES}No communicator data collected!\n"), ""),
    "in small pieces": (play("SERVER PROTOCOL 2\n", *PIECES), NO_ANSWER),
    "without the handshake": (play(INCOMPLETE_2_24), NO_ANSWER),
    "an error for every command": (
        play("ERROR: Unknown command CLIENT PROTOCOL 2\n" * 3, DEAD),
        IS_DEAD,
    ),
    "cut": (play_all(CUT), SLOW),
    "slow": (play(CUT, "#0-0", pause_s=30.0), SLOW),
    "endless": (play(DEAD, "x" * 4096, forever=True), IS_DEAD),
    "silent": (stay_silent, ""),
    "closed at once": (play(), ""),
    "garbage": (play(bytes(range(256)) * 40), ""),
    "another server": (play("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), ""),
    "escapes of a terminal": (
        play_all(DEAD.replace("node 172", "node \x1b[2J172")),
        IS_DEAD.replace("node ", "node ?[2J"),
    ),
    "numbers without end": (
        play_all(DEAD.replace(": 21", ": " + "9" * 5000)),
        IS_DEAD.replace("rank 21 gives", f"ranks {', '.join(['9' * 9] * 10)}, … gives"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_answer_of_nccl_is_summarized_and_kept(case: str) -> None:
    act, faults = CASES[case]
    limit_s = 1.0 if case in ("silent", "slow") else 60.0  # the others end without it
    began = time.monotonic()
    with server(act) as address:
        text = nccl.query_ras({nccl.ADDRESS_VARIABLE: address}, began + limit_s)
    assert time.monotonic() - began < 3 * limit_s
    assert len(text) <= nccl.MAX_ANSWER_BYTES and text.isascii()
    assert "\x1b" not in text and "SERVER" not in text
    assert describe_faults(text) == faults
    assert bool(text) == ("Communicators" in text), "what is not RAS's is not kept"


def test_unreachable_ras_gives_an_empty_answer() -> None:
    with server(play_all(DEAD)) as address:
        environ = {nccl.ADDRESS_VARIABLE: address, nccl.ENABLE_VARIABLE: "0"}
        assert nccl.query_ras(environ, time.monotonic() + 1) == ""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        # It is too late to ask.
        assert nccl.query_ras({nccl.ADDRESS_VARIABLE: address}, time.monotonic() - 1) == ""
    with socket.socket() as closed:  # it holds the port, and does not listen
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        for name in (address, "no-port", "host:port", "127.0.0.1:99999", "[::1"):
            assert nccl.query_ras({nccl.ADDRESS_VARIABLE: name}, time.monotonic() + 1) == ""


def test_nccl_query_does_not_block(monkeypatch) -> None:
    monkeypatch.setattr(nccl, "QUERY_TIMEOUT_S", 600.0)
    closes = threading.Event()
    with server(lambda _: closes.wait()) as address:
        question = nccl.NcclQuery({nccl.ADDRESS_VARIABLE: address})
        assert question.answer is None
        closes.set()
        while question.answer is None:
            time.sleep(0.01)
        assert question.answer == ""


def test_nccl_query_ends_without_an_answer(monkeypatch) -> None:
    monkeypatch.setattr(nccl, "QUERY_TIMEOUT_S", 0.2)
    with server(stay_silent) as address:
        question = nccl.NcclQuery({nccl.ADDRESS_VARIABLE: address})
        while question.answer is None:
            time.sleep(0.01)
        assert question.answer == ""


def test_kernel_messages_about_gpus_are_read(tmp_path: Path) -> None:
    now = int(time.monotonic() * 1e6)
    lost = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus."
    old = f"3,1,{now - int(3601e6)},-;NVRM: Xid (PCI:0000:3b:00): 13, old"
    other = f"6,3,{now},-;eth0: link up"
    (tmp_path / "kmsg").write_text(f"{old}\n3,2,{now},-;{lost}\n SUBSYSTEM=pci\n{other}\n")
    assert nccl.read_xids(str(tmp_path / "kmsg")) == lost
    assert nccl.read_xids(str(tmp_path / "none")) == ""

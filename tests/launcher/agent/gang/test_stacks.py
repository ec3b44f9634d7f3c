"""Which rank the others wait for, by the stacks of all."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.agent.gang.progress import Status
from jaxlaunch.launcher.agent.leader import hang
from jaxlaunch.launcher.agent.leader.hang import EarlyLook, RankStacks
from jaxlaunch.launcher.agent.leader.rank_statuses import RankStatuses

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3/threading.py", line 320 in wait
  File "/lib/python3/queue.py", line 171 in get

Current thread 0x00007f02 (most recent call first):
  File "/home/me/tasks.py", line 12 in read
  File "/home/me/train.py", line 99 in <module>
"""


def test_place_of_a_rank_is_innermost_frame_of_its_main_thread() -> None:
    assert RankStacks({0: Status()}, {0: DUMP}).describe_places(0) == "rank 0 in read (tasks.py:12)"
    assert RankStacks({0: Status()}, {0: DUMP}).place_of(0) == "in read (tasks.py:12)"
    stacks = RankStacks({0: Status(), 1: Status()}, {0: ""})
    assert stacks.describe_places(0) == "2 ranks without a stack"


def test_largest_groups_and_group_of_the_suspect_are_listed() -> None:
    texts = {rank: make_dump((f"/me/{rank // 2}.py", "f")) for rank in range(41)}
    result = RankStacks(dict.fromkeys(texts, Status()), texts)
    assert result.find_suspect(first_overdue_rank=0) == 40
    groups = ", ".join(f"2 ranks in f ({place}.py:1)" for place in range(8))
    assert result.describe_places(40) == f"{groups}, rank 40 in f (20.py:1), 24 ranks elsewhere"


def make_dump(*frames: tuple[str, str]) -> str:
    heads = (
        f'Thread 0x0 (most recent call first):\n  File "{file}", line 1 in {name}\n'
        for file, name in frames
    )
    return "\n".join(heads)


IN_JAX = ("/lib/jax/_src/array.py", "_value")


@pytest.mark.parametrize(
    ("texts", "culprit"),
    [
        ({0: make_dump(IN_JAX), 1: make_dump(IN_JAX), 2: make_dump(("/me/a.py", "f"))}, 2),
        ({0: make_dump(IN_JAX), 1: "", 2: make_dump(("/me/a.py", "f"))}, 1),
        (
            {
                0: make_dump(("/me/a.py", "f")),
                1: make_dump(("/me/b.py", "g")),
                2: make_dump(("/me/a.py", "f")),
            },
            1,
        ),
        (
            {
                0: make_dump(IN_JAX),
                1: make_dump(("/me/a.py", "callback"), IN_JAX),
                2: make_dump(IN_JAX),
            },
            1,
        ),
        ({0: make_dump(IN_JAX), 1: make_dump(IN_JAX), 2: make_dump(IN_JAX)}, 0),
    ],
)
def test_suspect_is_the_rank_that_others_wait_for(texts: dict[int, str], culprit: int) -> None:
    statuses = dict.fromkeys(texts, Status(phase="step", step=5, stepped=True))
    assert RankStacks(statuses, texts).find_suspect(first_overdue_rank=0) == culprit


PYTHON = "/usr/lib/python3.11"
IMPORTLIB = ("<frozen importlib._bootstrap>", "_call_with_frames_removed")
MAIN = ("/app/train.py", "<module>")
ORBAX = "/lib/python3.11/site-packages/orbax/checkpoint/_src"


def make_stacks(*threads: tuple[tuple[str, str], ...]) -> str:
    """Return the stacks of a rank: for each thread its frames, the innermost first."""
    return "\n".join(
        "Thread 0x01 (most recent call first):\n"
        + "".join(f'  File "{file}", line 7 in {name}\n' for file, name in texts)
        for texts in threads
    )


HOOK = ("/tmp/x/site/jaxhook.py", "wait_for_listener")
OUR_WAIT = (f"{PYTHON}/socket.py", "create_connection"), HOOK, MAIN
JAX_WAIT = (("/v/site-packages/jax/_src/distributed.py", "initialize"), MAIN)
START = "/a/trainer/start"
ANSWER = (f"{START}/distributed.py", "of_primary"), (f"{START}/compile_cache.py", "_names"), MAIN
FINDS = (("/a/trainer/start/compile_cache.py", "find"), *ANSWER)
JOINS = ((f"{PYTHON}/threading.py", "wait"), (f"{ORBAX}/futures/future.py", "result"), MAIN)
FUTURE = (f"{ORBAX}/futures/future.py", "run")
BARRIER = (f"{ORBAX}/futures/signaling_client.py", "wait_at_barrier"), FUTURE
WRITES = (f"{ORBAX}/serialization/type_handlers.py", "_write"), FUTURE
COMPILES = (("/v/site-packages/jax/_src/compiler.py", "backend_compile_and_load"), IN_JAX, MAIN)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize(
    ("phase", "waits", "works"),
    [
        (
            "init",
            make_stacks(OUR_WAIT),
            make_stacks((("/v/jax/_src/lax.py", "<module>"), IMPORTLIB, MAIN)),
        ),
        (
            "init",
            make_stacks(JAX_WAIT),
            make_stacks(
                (("/v/jax/_src/api.py", "jit"), ("/v/jax/a.py", "<module>"), IMPORTLIB, MAIN)
            ),
        ),
        (
            "init",
            make_stacks(JAX_WAIT),
            make_stacks((("<frozen importlib._bootstrap_external>", "get_data"), IMPORTLIB, MAIN)),
        ),
        (
            "init",
            make_stacks((*JAX_WAIT, IMPORTLIB, MAIN)),
            make_stacks((("/v/site-packages/flax/core.py", "<module>"), MAIN)),
        ),
        ("restore", make_stacks(ANSWER), make_stacks(FINDS)),
        ("compile", make_stacks((IN_JAX, MAIN)), make_stacks(COMPILES)),
        ("save", make_stacks(BARRIER, JOINS), make_stacks(WRITES, JOINS)),
        (
            "eval",
            make_stacks((IN_JAX, MAIN)),
            make_stacks(((f"{PYTHON}/queue.py", "get"), ("/app/data.py", "read"), MAIN)),
        ),
    ],
)
def test_suspect_is_the_rank_outside_the_common_wait(
    phase: str, waits: str, works: str, is_cut: bool
) -> None:
    texts = {0: works, 1: waits}
    if is_cut:
        texts = {number: hang.shorten_stacks(text) for number, text in texts.items()}
    result = RankStacks(dict.fromkeys(texts, Status(phase=phase)), texts)
    assert (result.find_suspect(first_overdue_rank=1), result.waiting_ranks) == (0, [1])


def test_rank_furthest_behind_is_suspected_if_stacks_are_equal() -> None:
    ahead, behind = (Status(phase="step", step=step, stepped=True) for step in (6, 5))
    stacks = RankStacks({0: ahead, 1: behind}, dict.fromkeys((0, 1), make_dump(IN_JAX)))
    assert stacks.find_suspect(first_overdue_rank=0) == 1


def look_at(*frames: tuple[str, str]) -> EarlyLook:
    """Return a look during an overdue step, at one rank for each frame."""
    statuses = RankStatuses({0: range(len(frames))})
    statuses.update({rank: Status(phase="step", step=7) for rank in range(len(frames))})
    look = EarlyLook(statuses)
    assert not look.update(None, 99.0) and look.update(90.0, 100.0)
    for rank, frame in enumerate(frames):
        assert look.suspect is None
        look.add_stacks(rank, make_dump(frame))
        look.update(90.0, 100.5)
    return look


def test_rank_that_hangs_is_known_before_the_timeout() -> None:
    look = look_at(IN_JAX, IN_JAX, ("/me/data.py", "read"))
    assert look.suspect == (2, "in step in read (data.py:1)", 90.0, True)
    assert not look.update(90.0, 200.0) and look.suspect is not None
    # The step is complete, and the next one is overdue.
    assert not look.update(None, 201.0) and look.suspect is None
    assert look.update(202.0, 210.0)


def test_ranks_that_all_wait_accuse_none_and_are_looked_at_again() -> None:
    look = look_at(IN_JAX, IN_JAX)
    assert look.suspect is None and not look.update(90.0, 104.0)
    times = [at for at in range(105, 1000) if look.update(90.0, float(at))]
    assert len(times) == hang.MAX_LOOKS - 1 and times[0] == 100 + hang.LOOK_INTERVAL_S


def test_thousands_of_ranks_do_not_write_their_stacks_early() -> None:
    statuses = RankStatuses({0: range(5000)})
    assert not EarlyLook(statuses).update(90.0, 100.0)

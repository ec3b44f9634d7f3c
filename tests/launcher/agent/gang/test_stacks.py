"""Which rank the others wait for, by the stacks of all."""

from __future__ import annotations

import pytest

from jaxlaunch.launcher.agent.gang import stacks
from jaxlaunch.launcher.agent.gang.progress import Status

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/lib/python3/threading.py", line 320 in wait
  File "/lib/python3/queue.py", line 171 in get

Current thread 0x00007f02 (most recent call first):
  File "/home/me/tasks.py", line 12 in read
  File "/home/me/train.py", line 99 in <module>
"""


def test_the_main_threads_innermost_frame_comes_last() -> None:
    assert [str(frame) for frame in stacks.innermost(DUMP)] == ["wait (threading.py:320)", "read (tasks.py:12)"]
    assert stacks.innermost("") == []


def dump(*frames: tuple[str, str]) -> str:
    heads = (f'Thread 0x0 (most recent call first):\n  File "{file}", line 1 in {name}\n' for file, name in frames)
    return "\n".join(heads)


IN_JAX = ("/lib/jax/_src/array.py", "_value")


@pytest.mark.parametrize(
    ("of", "culprit"),
    [
        ({0: dump(IN_JAX), 1: dump(IN_JAX), 2: dump(("/me/a.py", "f"))}, 2),
        ({0: dump(IN_JAX), 1: "", 2: dump(("/me/a.py", "f"))}, 1),
        ({0: dump(("/me/a.py", "f")), 1: dump(("/me/b.py", "g")), 2: dump(("/me/a.py", "f"))}, 1),
        ({0: dump(IN_JAX), 1: dump(("/me/a.py", "callback"), IN_JAX), 2: dump(IN_JAX)}, 1),
        ({0: dump(IN_JAX), 1: dump(IN_JAX), 2: dump(IN_JAX)}, 0),
    ],
)
def test_the_suspect_is_the_rank_that_the_others_wait_for(of: dict[int, str], culprit: int) -> None:
    statuses = dict.fromkeys(of, Status(phase="step", step=5, stepped=True))
    assert stacks.suspect(statuses, of, first=0) == culprit


def test_the_rank_furthest_behind_is_suspected_when_the_stacks_tell_nothing() -> None:
    ahead, behind = (Status(phase="step", step=step, stepped=True) for step in (6, 5))
    assert stacks.suspect({0: ahead, 1: behind}, dict.fromkeys((0, 1), dump(IN_JAX)), first=0) == 1

"""End again and again in one way: `repeats.py raise|exit|segfault|changes`, `requeue CODE COUNT`.

`changes` raises at another line in each attempt; `stays` does so twice, and then does not end.
`requeue` ends with CODE on rank 0 alone, until COUNT attempts have ended. `refuse CODE` ends as a
trainer that refuses to start.
"""

import json
import os
import signal
import sys
import time

kind, attempt = sys.argv[1], int(os.environ["JAXLAUNCH_ATTEMPT"])
generation, rank = int(os.environ["JAXLAUNCH_GENERATION"]), int(os.environ["JAX_PROCESS_ID"])


def say(**message: object) -> None:
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\n")


if kind == "refuse":
    say(hello="trainer")
    say(phase="restore", step=0)
    os._exit(int(sys.argv[2]))
if kind != "exit":
    for step in range(1, 4):
        say(phase="step", step=step)
if kind == "raise":
    raise ValueError(f"bad batch in attempt {attempt} of generation {generation}")
if kind in ("changes", "stays") and attempt == 1 and generation == 0:
    raise ValueError("first")
if kind in ("changes", "stays") and attempt == 2 and generation == 0:
    raise KeyError("second")
if kind == "stays":
    time.sleep(3600)
if kind == "exit":
    sys.exit(3)
if kind == "segfault":
    os.kill(os.getpid(), signal.SIGSEGV)
    signal.pause()
if kind == "requeue" and attempt + generation <= int(sys.argv[3]):
    if rank == 0:
        sys.exit(int(sys.argv[2]))
    time.sleep(3600)
print("finished", flush=True)

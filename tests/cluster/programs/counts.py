"""Count, and resume from the saved count: `counts.py FOLDER [stubborn]`.

On a stop it saves and reports it; a stubborn one saves now and then and ignores the stop. It ends a
little after it resumed.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

PERIOD_S = 0.25
SAVE_EVERY = 2  # steps, when it is stubborn
MORE = 5  # steps after it resumed

rank = os.environ["JAX_PROCESS_ID"]
saved, is_stubborn = Path(sys.argv[1]) / f"count-{rank}", sys.argv[2:] == ["stubborn"]
told: list[int] = []
signal.signal(
    signal.SIGTERM, signal.SIG_IGN if is_stubborn else lambda number, frame: told.append(number)
)


def say(**message: object) -> None:
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\n")


def save(step: int) -> None:
    partial = saved.with_suffix(".partial")
    partial.write_text(str(step))
    partial.replace(saved)
    say(committed=step)


first = step = int(saved.read_text()) if saved.exists() else 0
say(hello="trainer")
print(f"begins at step {first}", flush=True)
while first == 0 or step < first + MORE:
    time.sleep(PERIOD_S)
    step += 1
    say(phase="step", step=step)
    if is_stubborn and step % SAVE_EVERY == 0:
        save(step)
    if told:
        save(step)
        print(f"saved at step {step}", flush=True)
        say(stopped={"step": step, "saved": True})
        os._exit(80)
say(phase="done", step=step)
print(f"ends at step {step}", flush=True)

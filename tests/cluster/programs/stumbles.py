"""Take some steps and then fail: `stumbles.py hang|crash-once|raise`.

After one crash it runs on in the next attempt.
"""

import json
import os
import sys
import time


def say(**message: object) -> None:
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\n")


say(phase="compile")
if sys.argv[1] == "raise":
    raise ValueError("no such dataset: mnits")
for step in range(1, 4):
    say(phase="step", step=step)
    time.sleep(0.2)
if sys.argv[1] == "crash-once" and os.environ["JAXLAUNCH_ATTEMPT"] == "1":
    sys.exit(1)
time.sleep(3600)

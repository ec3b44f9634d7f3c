"""End in each way the contract knows: `ends.py CODE [GENERATIONS]`, where CODE is the gang's.

After so many restarts of the JobSet it ends one last time and then keeps running: a program that
crashes forever may use up its restarts before a test looks, and the leader's log reports the end of
an attempt only while the pod exists.
"""

import json
import os
import signal
import sys
import time

code, generation = int(sys.argv[1]), int(os.environ["JAXLAUNCH_GENERATION"])


def say(**message: object) -> None:
    os.write(int(os.environ["JAXLAUNCH_PROGRESS_FD"]), json.dumps(message).encode() + b"\n")


say(hello="trainer")
# Two equal ends at the same step would be the last, and a later step is progress.
attempt = int(os.environ["JAXLAUNCH_ATTEMPT"])
say(phase="step", step=max(1, 9 - 2 * attempt) if sys.argv[2:] else 3)
if code in (80, 85) and generation > 0:
    code = 0  # what was stopped from outside, or asks for it, is started again for ever
if sys.argv[2:] and generation >= int(sys.argv[2]) and int(os.environ["JAXLAUNCH_ATTEMPT"]) > 1:
    time.sleep(3600)
print(f"ends with {code}", flush=True)
if code == 0:
    say(phase="done", step=3)
if code > 128:
    os.kill(os.getpid(), code - 128)
    signal.pause()
os._exit(code)

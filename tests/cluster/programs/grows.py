"""Take memory until there is none, on one rank: `grows.py child|container RANK`.

A container dies with its agent.
"""

import os
import sys
import time
from pathlib import Path

if int(os.environ["JAX_PROCESS_ID"]) != int(sys.argv[2]):
    time.sleep(3600)
hoard = bytearray()
if sys.argv[1] == "child":
    while True:
        hoard += b"x" * 2**20
# Memory that belongs to no process: the kernel kills what is largest, and that is not this program.
Path("/proc/1/oom_score_adj").write_text("1000")
with open("/dev/shm/hoard", "wb", buffering=0) as file:
    while True:
        file.write(b"x" * 2**20)

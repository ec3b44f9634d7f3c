"""Takes memory until there is none: `grows.py child` dies alone, `grows.py container` takes its agent along."""

import sys
from pathlib import Path

if sys.argv[1] == "container":
    Path("/proc/1/oom_score_adj").write_text("1000")  # the kernel's first choice is now the agent
hoard = []
while True:
    hoard.append(b"x" * 2**20)

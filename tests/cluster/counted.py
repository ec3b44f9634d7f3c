"""Runs the launcher, and says as the last line of stderr what that cost: requests to the API server, time, memory."""

from __future__ import annotations

import http.client
import json
import re
import sys
import time
from pathlib import Path

from jaxlaunch.launcher.cli.main import main

asked: list[str] = []
send = http.client.HTTPConnection.putrequest


def counted(
    self: http.client.HTTPConnection, method: str, url: str, *rest: bool, **more: bool
) -> None:
    asked.append(f"{method} {url}")
    send(self, method, url, *rest, **more)


http.client.HTTPConnection.putrequest = counted  # type: ignore[method-assign]
begun = time.perf_counter()
try:
    main()
finally:
    spent_s = time.perf_counter() - begun
    # The peak of this process alone: what getrusage counts has that of the process that began it.
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None, "Linux"
    print(
        json.dumps({"requests": asked, "seconds": spent_s, "peak_mib": int(peak[1]) / 1024}),
        file=sys.stderr,
    )

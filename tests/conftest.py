"""Every test runs on the CPU, whatever the machine holds, and can be interrupted, whatever starts it."""

import os
import signal

os.environ["JAX_PLATFORMS"] = "cpu"
# A shell lets what it starts in the background ignore Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

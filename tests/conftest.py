"""Every test runs on the CPU, whatever the machine holds."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

"""The training loop, and `jaxlaunch.run`."""

"""Start a process: devices, jax.distributed and exit codes."""

"""Save and restore checkpoints with Orbax."""

"""Save and restore checkpoints through Orbax."""

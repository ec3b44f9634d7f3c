"""The compiled train step and its state."""

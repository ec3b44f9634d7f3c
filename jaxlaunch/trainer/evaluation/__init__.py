"""Held-out numbers of a checkpoint, and predictions."""

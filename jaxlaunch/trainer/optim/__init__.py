"""Builds optax optimizers and schedules by name."""

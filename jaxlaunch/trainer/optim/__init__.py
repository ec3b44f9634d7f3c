"""Build Optax optimizers and schedules by name."""

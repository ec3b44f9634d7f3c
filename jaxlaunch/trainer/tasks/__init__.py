"""The tasks `classify`, `lm` and `dpo`."""

"""Evaluation of a checkpoint on held-out data, and predictions for files."""

"""Sends the metrics of a run to experiment trackers such as W&B and MLflow."""

"""Trackers of runs."""

"""Sweeps: runs of one job with several values of its keys."""

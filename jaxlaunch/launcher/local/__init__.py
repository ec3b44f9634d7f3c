"""Run jobs on this machine, and find the runs on it."""

"""Estimates of a job's needs before it runs."""

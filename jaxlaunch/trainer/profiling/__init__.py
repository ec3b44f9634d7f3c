"""Trace steps and split their time."""
